"""Puts an ocf-tester beside whatever is installed, and prints where it is.

    python3 images/ocf.py 4.12      # last line of stdout: .../ocf-tester/4.12/usr/sbin/ocf-tester

Debian's own build, unpacked and never installed. A test plays the resource agent with it.
"""

import sys
from pathlib import Path

if not __package__:  # run as a script: the folder above holds the package `images`
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from images import debian

SUITE_OF = {"4.12": debian.RELEASE}
RECIPE = 1  # raise it when what lies in the cache changes shape: older entries are made anew


def provide(version: str) -> Path:
    """The program of `version`, taken from the cache or fetched and put there.

    Raises CannotProvideError.
    """
    return debian.provide_program(
        "ocf-tester", version, suite=SUITE_OF[version], package="resource-agents",
        program="usr/sbin/ocf-tester", says=f"{version}.", recipe=RECIPE,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(debian.answer("Provide an ocf-tester beside the installed one.", SUITE_OF, provide))
