"""Puts an etcd of a given version beside whatever is installed, and prints where it is.

    python3 images/etcd.py 3.4      # last line of stdout: .../etcd/3.4/usr/bin/etcd

Debian's own build, unpacked and never installed; no service starts. Tests run clusters of it.
"""

import sys
from pathlib import Path

if not __package__:  # run as a script: the folder above holds the package `images`
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from images import debian

SUITE_OF = {"3.4": debian.RELEASE}
RECIPE = 1  # raise it when what lies in the cache changes shape: older entries are made anew


def provide(version: str) -> Path:
    """The server of `version`, taken from the cache or fetched and put there.

    Raises CannotProvideError.
    """
    return debian.provide_program(
        "etcd", version, suite=SUITE_OF[version], package="etcd-server", program="usr/bin/etcd",
        says=f"Version: {version}.", recipe=RECIPE,
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(debian.answer("Provide an etcd beside the installed one.", SUITE_OF, provide))
