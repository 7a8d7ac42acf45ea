"""Puts a QEMU of a given version beside whatever is installed, and prints where it is.

    python3 images/qemu.py 10.0      # last line of stdout: .../qemu/10.0/bin/qemu-system-x86_64

Debian's own builds, unpacked and never installed: 7.2 is bookworm's, 10.0 is bookworm-backports',
11.1 is trixie-backports'. Beside the emulator lie `qemu-img` and `qemu-nbd` of the same version.
They bring every library that they need, so that they run alike on a bare machine and on one whose
own QEMU comes and goes. The C library and its loader they bring if they are of a later release:
patchelf names both in the programs, since what these start must find this machine's own.
"""

import re
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

if not __package__:  # run as a script: the folder above holds the package `images`
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from images import debian
from images.debian import CannotProvideError

SUITE_OF = {"7.2": debian.RELEASE, "10.0": debian.BACKPORTS, "11.1": "trixie-backports"}
RELEASE_OF = {"11.1": "trixie"}
COMMANDS = ("qemu-system-x86_64", "qemu-img", "qemu-nbd")
ASKED_FOR = ("qemu-system-x86", "qemu-utils")
# In later releases a package of its own.
SPICE = dict.fromkeys(("10.0", "11.1"), ("qemu-system-modules-spice",))
DATA_DIRS = ("usr/share/qemu", "usr/share/seabios")
# Of Debian 12 only; later it is in QEMU's own.
IPXE_DIR = "usr/lib/ipxe/qemu"
# Kept as whole trees; of all other packages only the libraries that these need are kept.
WHOLE = re.compile(r"qemu-|seabios$|ipxe-")
KEPT = re.compile(rf"{WHOLE.pattern}|lib|zlib")
RECIPE = 2  # raise it when what lies in the cache changes shape: older entries are made anew


def provide(version: str) -> Path:
    """The emulator of `version`, taken from the cache or fetched and put there.

    Raises CannotProvideError.
    """

    def make(scratch: Path, home: Path) -> tuple[Path, Mapping[str, str]]:
        return make_qemu(version, scratch, home)

    return debian.provide("qemu", version, recipe=RECIPE, make=make) / "bin" / COMMANDS[0]


def make_qemu(version: str, scratch: Path, home: Path) -> tuple[Path, Mapping[str, str]]:
    """Builds in `scratch` what is to be renamed to `home`, and tries it; its place and packages."""
    suite = SUITE_OF[version]
    debian.say(f"fetching QEMU from {suite}")
    release = RELEASE_OF.get(version, debian.RELEASE)
    words = ["-t", suite, *ASKED_FOR, *SPICE.get(version, ())]
    packages = debian.fetch(scratch, suite, words, kept=KEPT, release=release)
    made, libraries = scratch / "made", scratch / "libraries"
    root = made / "root"
    debian.unpack(scratch, root, libraries, whole=WHOLE)
    # Without this a missing one would go unseen wherever the machine has firmware of its own.
    needed = (*DATA_DIRS, IPXE_DIR) if release == debian.RELEASE else DATA_DIRS
    absent = [name for name in needed if not (root / name).is_dir()]
    if absent:
        raise CannotProvideError(
            f"QEMU of {suite} comes without {', '.join(absent)}",
            why=f"none of the packages {', '.join(packages)} has it",
            remedy="name the package that holds it in ASKED_FOR in images/qemu.py",
        )
    programs = [root / "usr/bin" / name for name in COMMANDS]
    modules = root.glob("usr/lib/*-linux-*/qemu/*.so")
    debian.gather_libraries([*programs, *modules], libraries, made / "lib")
    loader = made / "lib" / debian.LOADER
    for place in (made, home):
        if loader.exists():
            bind(programs, place / "lib", scratch / "tools")
        write_wrappers(made / "bin", place)
        if place == made:
            require_version(version, made / "bin" / COMMANDS[0])
    return made, packages


def require_version(version: str, program: Path) -> None:
    """Raises CannotProvideError unless it is of that version, and runs."""
    said = debian.run([str(program), "-version"])
    if f"version {version}." not in said:
        raise CannotProvideError(
            f"{SUITE_OF[version]} has no QEMU {version}",
            why=f"what it has says {said.splitlines()[0]!r}",
            remedy="check that the package sources of this machine are Debian's own",
        )


def bind(programs: Iterable[Path], libraries: Path, tools: Path) -> None:
    """Names in the programs the loader and the libraries that they are to use, for themselves only.

    `tools`: where patchelf is unpacked, once. LD_LIBRARY_PATH would reach what they start, too.
    """
    patchelf = tools / "root/usr/bin/patchelf"
    if not patchelf.exists():
        whole = re.compile("patchelf$")
        debian.fetch(tools, debian.RELEASE, ["patchelf"], kept=whole)
        debian.unpack(tools, tools / "root", tools / "libraries", whole=whole)
    for program in programs:
        names = ["--set-interpreter", str(libraries / debian.LOADER), "--force-rpath"]
        debian.run([str(patchelf), *names, "--set-rpath", str(libraries), str(program)])


def write_wrappers(folder: Path, home: Path) -> None:
    """Writes to `folder` one small script per command, which runs the program under `home`."""
    root = home / "root"
    modules = next(iter(sorted((folder.parent / "root").glob("usr/lib/*-linux-*/qemu"))), None)
    settings = list[str]()
    if not (folder.parent / "lib" / debian.LOADER).exists():
        settings.append(f"LD_LIBRARY_PATH={shlex.quote(str(home / 'lib'))}")
    if modules is not None:
        where = root / modules.relative_to(folder.parent / "root")
        settings.append(f"QEMU_MODULE_DIR={shlex.quote(str(where))}")
    folder.mkdir(exist_ok=True)
    for name in COMMANDS:
        words = [str(root / "usr/bin" / name)]
        if name.startswith("qemu-system-"):
            there = (d for d in (*DATA_DIRS, IPXE_DIR) if (folder.parent / "root" / d).is_dir())
            words += (word for data in there for word in ("-L", str(root / data)))
        script = folder / name
        script.write_text(f'#!/bin/sh\n{" ".join(settings)} exec {shlex.join(words)} "$@"\n')
        script.chmod(0o755)


if __name__ == "__main__":
    sys.exit(debian.answer("Provide a QEMU beside the installed one.", SUITE_OF, provide))
