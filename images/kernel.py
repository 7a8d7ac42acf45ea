"""Puts a Linux of another Debian release aside, and prints where it is.

    python3 images/kernel.py 6.12      # last line of stdout: a directory

It has `vmlinuz`, and in `modules` the DRIVERS with all that they depend on, to be loaded in the
order of their names. Nothing is installed. Tests boot machines with it (nested.py).
"""

import lzma
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

if not __package__:  # run as a script: the folder above holds the package `images`
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from images import debian

SUITE_OF = {"6.12": "trixie"}
RECIPE = 2  # raise it when what lies in the cache changes shape: older entries are made anew
# ext4 takes the first one without naming it.
DRIVERS = ("crc32c_generic", "virtio_pci", "virtio_blk", "virtio_rng", "ext4", "tun", "vhost_net")
_DEPENDS = re.compile(rb"\0depends=([\w,-]*)\0")


def provide(version: str) -> Path:
    """The directory with the kernel of `version`, from the cache or put there.

    Raises CannotProvideError.
    """
    suite = SUITE_OF[version]
    whole = re.compile(r"linux-image-\d")

    def make(scratch: Path, _: Path) -> tuple[Path, Mapping[str, str]]:
        debian.say(f"fetching Linux {version} from {suite}")
        packages = debian.fetch(scratch, suite, [f"linux-image-amd64/{suite}"], kept=whole)
        tree, made = scratch / "tree", scratch / "made"
        debian.unpack(scratch, tree, scratch / "others", whole=whole)
        (made / "modules").mkdir(parents=True)
        [kernel] = tree.glob(f"boot/vmlinuz-{version}.*")
        shutil.copyfile(kernel, made / "vmlinuz")
        for number, (name, content) in enumerate(_ordered(tree, DRIVERS)):
            (made / "modules" / f"{number:02d}-{name}.ko").write_bytes(content)
        return made, packages

    return debian.provide("kernels", version, recipe=RECIPE, make=make)


def _ordered(tree: Path, names: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """The drivers and what they depend on, each after what it depends on."""
    files = {_plain(path.name.partition(".")[0]): path for path in tree.rglob("*.ko.xz")}
    built_in = next(tree.rglob("modules.builtin")).read_text()
    have = {_plain(Path(line).stem) for line in built_in.splitlines()}

    def load(name: str) -> Iterator[tuple[str, bytes]]:
        if name in have:
            return
        have.add(name)
        if name not in files:
            raise debian.CannotProvideError(
                f"this kernel has no driver {name}",
                why="it is neither a module nor built in",
                remedy="correct DRIVERS in images/kernel.py",
            )
        content = lzma.decompress(files[name].read_bytes())
        found = _DEPENDS.search(content)
        for other in found[1].decode().split(",") if found else ():
            if other:
                yield from load(_plain(other))
        yield name, content

    for name in names:
        yield from load(_plain(name))


def _plain(name: str) -> str:
    return name.replace("-", "_")


if __name__ == "__main__":
    sys.exit(debian.answer("Provide a kernel of another Debian release.", SUITE_OF, provide))
