"""Limits how many guests of one machine are stopped at once, by its number of processors.

Stopping a guest and saving its state takes one processor for some milliseconds, alternating between
its service and its QEMU. More of them at once than there are processors make each pause longer, and
no cut shorter: they take turns. A turn costs a message there and back, for which output is held
too.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

# The divisor of a machine's processors for guests that are being stopped; the others are for those
# that run.
_SHARE = 2
# The divisor of the time for which output may be held: turns may take that much.
_HELD_SHARE = 4


class MemberSite(NamedTuple):
    """A member's machine, how many processors it has, and how fast it answers.

    `stays_paused`: its guest is paused until the last turn is over.
    """

    machine: str
    processors: int
    answer_s: float
    stays_paused: bool = False


def turns(sites: Mapping[str, MemberSite], most_held_s: float) -> list[list[str]]:
    """Rows of members, each to be stopped when the previous one in its row is paused.

    All rows proceed concurrently. With slow connections there are more rows with fewer turns.
    """
    machines: dict[str, list[str]] = {}
    for vm, site in sites.items():
        machines.setdefault(site.machine, []).append(vm)
    return [row for vms in machines.values() for row in _rows(vms, sites, most_held_s)]


def _rows(
    vms: list[str], sites: Mapping[str, MemberSite], most_held_s: float
) -> Iterable[list[str]]:
    processors = min(sites[vm].processors for vm in vms)
    # A late answer shows a busy member; the quickest shows what a message takes.
    word_s = min(sites[vm].answer_s for vm in vms)
    most_turns = max(int(most_held_s / _HELD_SHARE / max(word_s, 1e-6)), 1)
    wide = max(processors // _SHARE, -(-len(vms) // most_turns), 1)
    vms = sorted(vms, key=lambda vm: sites[vm].stays_paused)  # these last: they wait for others
    return [vms[first::wide] for first in range(min(wide, len(vms)))]
