"""Puts a promtool beside whatever is installed, and prints where it is.

    python3 images/promtool.py 2.42      # last line of stdout: .../promtool/2.42/usr/bin/promtool

Debian's own build, unpacked and never installed. Tests play the alert rules with it.
"""

import sys
from pathlib import Path

if not __package__:  # run as a script: the folder above holds the package `images`
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from images import debian

SUITE_OF = {"2.42": debian.RELEASE}
RECIPE = 1  # raise it when what lies in the cache changes shape: older entries are made anew


def provide(version: str) -> Path:
    """The program of `version`, taken from the cache or fetched and put there.

    Raises CannotProvideError.
    """
    return debian.provide_program(
        "promtool", version, suite=SUITE_OF[version], package="prometheus",
        program="usr/bin/promtool", says=f"version {version}.", recipe=RECIPE,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(debian.answer("Provide a promtool beside the installed one.", SUITE_OF, provide))
