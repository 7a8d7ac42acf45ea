"""Debian 12's own kernel has no PAGEMAP_SCAN: there pages are found by their soft-dirty bits.

The machine runs that kernel; inside.py runs in it.
"""

from pathlib import Path

import pytest

from tests import nested

# numpy wants a processor of after 2008.
CPU = ("-cpu", "Nehalem")
FACTS = (
    "the trackers' own tests",
    "looking at 256 MiB",
    "checkpoints of a guest that works",
    "it went back, and its memory is whole",
    "protected, and whole at the standby",
)


@pytest.mark.timeout(nested.LIMIT_S + 300)
def test_an_older_kernel_marks_what_a_guest_writes(tmp_path: Path) -> None:
    _, looked, *_ = nested.facts(tmp_path, "tests.kernel.inside", *CPU, wanted=FACTS)
    assert looked["soft-dirty bits"] < looked["comparison"] / 3
