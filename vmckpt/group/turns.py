"""Whose guests are stopped at once: no more of one machine's than it has processors for.

Stopping a guest and saving what it is takes one processor for some milliseconds, its service and
its QEMU by turns. More of them at once than there are processors make each pause longer, and no cut
shorter: they take turns. A turn costs a word there and one back, which output is held for as well.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

# Of a machine's processors for guests that are being stopped; the others are for those that run.
_SHARE = 2
# Turns may take so much of the time for which output may be held.
_HELD_SHARE = 4


class MemberSite(NamedTuple):
    """Where a member works: on which machine, of how many processors, and how fast it answers."""

    machine: str
    processors: int
    answer_s: float


def turns(places: Mapping[str, MemberSite], most_held_s: float) -> list[list[str]]:
    """Rows of members, each to be stopped when the one before it in its row is paused.

    All rows proceed concurrently. With slow connections there are more rows with fewer turns.
    """
    machines: dict[str, list[str]] = {}
    for vm, place in places.items():
        machines.setdefault(place.machine, []).append(vm)
    return [row for vms in machines.values() for row in _rows(vms, places, most_held_s)]


def _rows(
    vms: list[str], places: Mapping[str, MemberSite], most_held_s: float
) -> Iterable[list[str]]:
    processors = min(places[vm].processors for vm in vms)
    # A late answer shows a busy member; the quickest shows what a message takes.
    word_s = min(places[vm].answer_s for vm in vms)
    most_turns = max(int(most_held_s / _HELD_SHARE / max(word_s, 1e-6)), 1)
    wide = max(processors // _SHARE, -(-len(vms) // most_turns), 1)
    return [vms[first::wide] for first in range(min(wide, len(vms)))]
