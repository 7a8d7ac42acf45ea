"""What a checkpoint says of itself, besides what it holds: all that a restore has to know."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from vmckpt.errors import RefusedError
from vmckpt.qemu.compare import Machine
from vmckpt.store.decoding import count, listed, mapping, number

FORMAT = 1
_MOST, _MOST_DEVICES = 1 << 62, 4096
RAM, DEVICES = "ram", "device-state"
# Of a VM that was saved as a whole (`whole.py`): what QEMU wrote.
SAVED = "saved"
EPOCH, FILE = "epoch", "file"
MAPPED_RAM, STREAM = "mapped-ram", "stream"


class UnknownFactsError(ValueError):
    """Written by another version of vmckpt."""


@dataclass(frozen=True, slots=True)
class DiskFacts:
    """One disk of the VM. Only of one that can be written (`area`) the content is kept."""

    path: str
    format: str
    size_bytes: int
    read_only: bool
    area: str | None


@dataclass(frozen=True, slots=True)
class Facts:
    """One checkpoint. Times are Unix seconds.

    `machine` is what the guest found itself on (`qemu.compare.Machine`), `firmware` the SHA-256 of
    its code. `macs` are those that its NICs had, in order.
    """

    name: str
    host: str
    taken_unix_s: float
    trigger: str
    tags: Mapping[str, str]
    spec: str
    platform: Mapping[str, str]
    qemu_version: str
    machine: Mapping[str, Any]
    firmware: str | None
    memory_bytes: int
    disks: tuple[DiskFacts, ...]
    macs: tuple[str, ...]
    pause_ms: float
    passes: int
    took_s: float
    changed_pages: int
    # `pause_ms` is the longest time that the guest stood still; all together (0: not known).
    stopped_ms: float = 0.0
    # How it was taken: EPOCH, or FILE, and then as what QEMU wrote its state (`whole.py`).
    kind: str = "epoch"
    saved_as: str = ""
    # Of those that were taken together: "id" and "name" of the group, "members" (checkpoints' ids
    # by VM), and how long its output was "held_ms".
    group: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """For the manifest."""
        words = {"format": FORMAT, **asdict(self)}
        if self.group is None:
            del words["group"]  # so that an older vmckpt knows what it is
        return words

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The inverse: each of its type, whoever wrote it. Raises UnknownFactsError."""
        try:
            if data["format"] != FORMAT:
                raise UnknownFactsError("written by another version of vmckpt")
            given = {name: value for name, value in data.items() if name != "format"}
            read = {name: _READ[name](value) for name, value in given.items()}
            return cls(**read)
        except (LookupError, TypeError, ValueError) as exc:
            raise UnknownFactsError(f"{type(exc).__name__}: {exc}") from exc


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__} in the place of text")
    return value


def _maybe_text(value: Any) -> str | None:
    return None if value is None else _text(value)


def _texts(value: Any) -> dict[str, str]:
    return {_text(key): _text(one) for key, one in mapping(value).items()}


def _count(value: Any) -> int:
    return count(value, _MOST)


def _number(value: Any) -> float:
    return number(value, _MOST)


def _listed(value: Any) -> list[Any]:
    return listed([*value] if isinstance(value, tuple) else value, _MOST_DEVICES)


def _macs(value: Any) -> tuple[str, ...]:
    return tuple(_text(mac) for mac in _listed(value))


def _disks(value: Any) -> tuple[DiskFacts, ...]:
    return tuple(_disk(mapping(disk)) for disk in _listed(value))


def _disk(words: Mapping[str, Any]) -> DiskFacts:
    mapping(words, of=DiskFacts.__slots__)
    read_only = words["read_only"]
    if not isinstance(read_only, bool):
        raise TypeError("a disk is read-only or not")
    path, kind, area = _text(words["path"]), _text(words["format"]), _maybe_text(words["area"])
    return DiskFacts(path, kind, _count(words["size_bytes"]), read_only, area)


def _group(value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    words = mapping(value)
    members = _texts(words["members"])
    said = {"id": _text(words["id"]), "name": _text(words["name"]), "members": members}
    return {**words, **said}


_READ: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("name", "host", "trigger", "spec", "qemu_version", "kind", "saved_as"), _text),
    **dict.fromkeys(("taken_unix_s", "pause_ms", "took_s", "stopped_ms"), _number),
    **dict.fromkeys(("memory_bytes", "passes", "changed_pages"), _count),
    **dict.fromkeys(("tags", "platform"), _texts),
    "machine": mapping,
    "firmware": _maybe_text,
    "disks": _disks,
    "macs": _macs,
    "group": _group,
}


def known_facts(data: Mapping[str, Any]) -> Facts:
    """The facts of a checkpoint that is to be used. Raises RefusedError."""
    try:
        return Facts.from_json(data)
    except UnknownFactsError as exc:
        raise RefusedError(
            "this vmckpt does not know what the checkpoint is of",
            why=str(exc),
            remedy="use the vmckpt that took it, or a newer one",
        ) from exc


def machine_to_json(machine: Machine) -> dict[str, Any]:
    """For `Facts.machine`."""
    features = sorted([list(map(list, word)) for word in machine.features])
    return {**machine._asdict(), "features": features, "devices": dict(machine.devices)}


def machine_from_json(data: Mapping[str, Any]) -> Machine:
    """The inverse."""
    words = (tuple((name, value) for name, value in word) for word in data["features"])
    return Machine(**{**data, "features": frozenset(words)})
