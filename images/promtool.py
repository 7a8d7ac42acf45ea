"""Puts a promtool beside whatever is installed, and prints where it is.

    python3 images/promtool.py 2.42      # last line of stdout: .../promtool/2.42/usr/bin/promtool

Debian's own build, unpacked and never installed. Tests play the alert rules with it.
"""

import re
import sys
from collections.abc import Mapping
from pathlib import Path

if not __package__:  # run as a script: the folder above holds the package `images`
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from images import debian

SUITE_OF = {"2.42": debian.RELEASE}
PACKAGE = "prometheus"
PROGRAM = "usr/bin/promtool"
WHOLE = re.compile(rf"{PACKAGE}$")
RECIPE = 1  # raise it when what lies in the cache changes shape: older entries are made anew


def provide(version: str) -> Path:
    """The program of `version`, taken from the cache or fetched and put there.

    Raises CannotProvideError.
    """

    def make(scratch: Path, _: Path) -> tuple[Path, Mapping[str, str]]:
        suite = SUITE_OF[version]
        debian.say(f"fetching promtool from {suite}")
        packages = debian.fetch(scratch, suite, [PACKAGE], kept=WHOLE)
        made = scratch / "made"
        debian.unpack(scratch, made, scratch / "libraries", whole=WHOLE)
        debian.run([str(made / PROGRAM), "--version"])  # it needs the C library alone
        return made, packages

    return debian.provide("promtool", version, recipe=RECIPE, make=make) / PROGRAM


if __name__ == "__main__":
    sys.exit(debian.answer("Provide a promtool beside the installed one.", SUITE_OF, provide))
