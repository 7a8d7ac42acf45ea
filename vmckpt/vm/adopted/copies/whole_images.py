"""An adopted machine's arguments for images from a checkpoint. Pure.

Such an image is a file with all of its disk's content, from its first byte on, and is based on no
other image. What the command line says otherwise about the disk is left out.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from vmckpt.errors import RefusedError
from vmckpt.vm.adopted import holes
from vmckpt.vm.adopted.arguments import values
from vmckpt.vm.adopted.settings import JsonObject, Settings

# Where a disk's content is, if not in its image alone.
_ELSEWHERE = ("backing", "data-file", "offset", "size")
_DEVICES = ("host_device", "host_cdrom")
_FORMATS = ("raw", "qcow2")


class WholeImages(NamedTuple):
    """The arguments; `unused` has all texts of block nodes that they had and no disk needs now."""

    arguments: tuple[str, ...]
    unused: frozenset[str]


class _Node(NamedTuple):
    """A block node in the -blockdev at `at`. Its settings' keys begin with `inside`."""

    at: int
    inside: str


def on_whole_images(arguments: Sequence[str], formats: Mapping[int, str]) -> WholeImages:
    """The arguments, with such an image for each disk of these numbers, of this format.

    Raises RefusedError: there is no place for the format's node.
    """
    work = _Changing(list(arguments))
    for number, kind in formats.items():
        work.give(number, kind)
    unused = work.pruned()
    return WholeImages(tuple(work.arguments), frozenset(unused))


class _Changing:
    """Arguments that are being changed."""

    def __init__(self, arguments: list[str]) -> None:
        self.arguments = arguments
        # Texts of settings that were left out: names of nodes among them may be unused now.
        self._left_out: list[str] = []

    def give(self, number: int, kind: str) -> None:
        """Give the disk an image of the format `kind`."""
        image = holes.disk(number)
        for at, option, value in values(self.arguments, "drive", "blockdev"):
            if option == "drive" and image in (value.get("file"), value.get("file.filename")):
                as_file = _as_file(value, "file.")
                key = "driver" if value.get("driver") else "format"
                self.arguments[at] = str(as_file.without(*_ELSEWHERE).put(key, kind))
            elif option == "blockdev" and (inside := _leaf_of(value, image)) is not None:
                self.arguments[at] = str(_as_file(value, inside))
                self._give_format(_Node(at, inside), number, kind)
                return

    def _give_format(self, leaf: _Node, number: int, kind: str) -> None:
        above = self._above(leaf)
        for _ in self.arguments:  # its nodes may be in a circle, which QEMU refuses
            if above is None:
                break
            value = self._value(above.at)
            if value.get(f"{above.inside}driver") in _FORMATS:
                kept = value.without(*(f"{above.inside}{key}" for key in _ELSEWHERE))
                self._left_out += {*value.texts()} - {*kept.texts()}
                self.arguments[above.at] = str(kept.put(f"{above.inside}driver", kind))
                return
            above = self._above(above)
        if kind != "raw":
            self._add_format(leaf, number, kind)

    def _add_format(self, leaf: _Node, number: int, kind: str) -> None:
        """Put a node for the format above the image's, under its name."""
        if leaf.inside:
            raise RefusedError(
                f"disk {number} cannot have an image of format {kind}",
                why=f"'-blockdev {self.arguments[leaf.at]}' has no node for a format",
                remedy="make a copy, whose image has the same format: vmckpt checkpoint restore "
                "ID --as NAME",
            )
        value, below = self._value(leaf.at), f"vmckpt-file{number}"
        node = {"driver": kind, "node-name": value.get("node-name"), "file": below}
        self.arguments[leaf.at] = str(value.put("node-name", below))
        self.arguments[leaf.at + 1 : leaf.at + 1] = ["-blockdev", str(JsonObject(node))]

    def _above(self, node: _Node) -> _Node | None:
        """The node that has this one as its file."""
        if node.inside:
            return _Node(node.at, node.inside.removesuffix("file."))
        name = self._value(node.at).get("node-name")
        for at, _, value in values(self.arguments, "blockdev"):
            for inside in _insides(value):
                if name is not None and value.get(f"{inside}file") == name:
                    return _Node(at, inside)
        return None

    def _value(self, at: int) -> Settings:
        return next(value for here, _, value in values(self.arguments, "blockdev") if here == at)

    def pruned(self) -> set[str]:
        """Remove nodes that are unused now; returns their texts."""
        unused = set[str]()
        while self._left_out:
            name = self._left_out.pop()
            for at, _, value in list(values(self.arguments, "blockdev")):
                if value.get("node-name") == name and not self._is_used(name, at):
                    unused |= {*value.texts()}
                    self._left_out += value.texts()
                    del self.arguments[at - 1 : at + 1]
                    break
        return unused

    def _is_used(self, name: str, besides: int) -> bool:
        users = values(self.arguments, "blockdev", "drive", "device", "machine")
        return any(name in value.texts() for at, _, value in users if at != besides)


def _insides(value: Settings) -> list[str]:
    """The prefixes of a -blockdev's own settings, and of those of the files that are inside it."""
    found = [""]
    while value.get(f"{found[-1]}file.driver"):
        found.append(f"{found[-1]}file.")
    return found


def _leaf_of(value: Settings, image: str) -> str | None:
    """Where inside a -blockdev the node of that image is."""
    named = (inside for inside in _insides(value) if value.get(f"{inside}filename") == image)
    return next(named, None)


def _as_file(value: Settings, inside: str) -> Settings:
    is_device = value.get(f"{inside}driver") in _DEVICES
    return value.put(f"{inside}driver", "file") if is_device else value
