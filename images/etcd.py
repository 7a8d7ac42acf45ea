"""Puts an etcd of a given version beside whatever is installed, and prints where it is.

    python3 images/etcd.py 3.4      # last line of stdout: .../etcd/3.4/usr/bin/etcd

Debian's own build, unpacked and never installed; no service starts. Tests run clusters of it.
"""

import re
import sys
from collections.abc import Mapping
from pathlib import Path

if not __package__:  # run as a script: the folder above holds the package `images`
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from images import debian
from images.debian import CannotProvideError

SUITE_OF = {"3.4": debian.RELEASE}
PACKAGE = "etcd-server"
PROGRAM = "usr/bin/etcd"
WHOLE = re.compile(rf"{PACKAGE}$")
RECIPE = 1  # raise it when what lies in the cache changes shape: older entries are made anew


def provide(version: str) -> Path:
    """The server of `version`, taken from the cache or fetched and put there.

    Raises CannotProvideError.
    """

    def make(scratch: Path, _: Path) -> tuple[Path, Mapping[str, str]]:
        return make_etcd(version, scratch)

    return debian.provide("etcd", version, recipe=RECIPE, make=make) / PROGRAM


def make_etcd(version: str, scratch: Path) -> tuple[Path, Mapping[str, str]]:
    """Unpacks it in `scratch`, and tries it; its place and packages."""
    suite = SUITE_OF[version]
    debian.say(f"fetching etcd from {suite}")
    packages = debian.fetch(scratch, suite, [PACKAGE], kept=WHOLE)
    made = scratch / "made"
    debian.unpack(scratch, made, scratch / "libraries", whole=WHOLE)
    # It needs the C library alone, which stays the machine's own.
    said = debian.run([str(made / PROGRAM), "--version"])
    if f"Version: {version}." not in said:
        raise CannotProvideError(
            f"{suite} has no etcd {version}",
            why=f"what it has says {said.splitlines()[0]!r}",
            remedy="check that the package sources of this machine are Debian's own",
        )
    return made, packages


if __name__ == "__main__":
    sys.exit(debian.answer("Provide an etcd beside the installed one.", SUITE_OF, provide))
