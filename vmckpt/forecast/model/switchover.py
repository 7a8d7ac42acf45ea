"""When a pre-copy may stop the guest: not before the target has taken in what was sent."""

from collections.abc import Sequence
from itertools import pairwise
from math import inf
from typing import NamedTuple

WINDOW_S = 1.0
# Over less than this a speed says nothing.
LEAST_WINDOW_S = 0.04
# Of the speed at least this part counts, however much stands in the sockets: a link that is always
# full would never let the guest go otherwise.
LEAST_PART = 0.5


class SentSample(NamedTuple):
    """What was sent since the beginning, and how much of it still waits in sockets."""

    at_s: float
    sent_bytes: int
    queued_bytes: int

    @property
    def taken_bytes(self) -> int:
        """What the target has read."""
        return self.sent_bytes - self.queued_bytes


def switchover_bytes_per_s(
    looks: Sequence[SentSample],
    first_pass_bytes: int,
    max_downtime_s: float,
    limit_bytes_per_s: int = 0,
) -> float | None:
    """The speed to reckon with at the switchover; None while the guest has to wait.

    It waits until the target has read all that was sent when memory had gone once
    (`first_pass_bytes`). Then: the best speed at which the target read between two looks of the
    last second, less what stands in the sockets now and has to be read within `max_downtime_s` too.
    Looks are in order; two that are less than 40 ms apart tell no speed. Under a bandwidth limit
    (0: none) QEMU sends ten times a second, in bursts: two looks with two of these between them
    would tell twice the limit.
    """
    now = looks[-1]
    if now.taken_bytes < first_pass_bytes:
        return None
    speeds = [
        (after.taken_bytes - before.taken_bytes) / (after.at_s - before.at_s)
        for before, after in pairwise(look for look in looks if look.at_s >= now.at_s - WINDOW_S)
        if after.at_s - before.at_s >= LEAST_WINDOW_S
    ]
    speed = max(speeds, default=0.0)
    if limit_bytes_per_s:
        speed = min(speed, float(limit_bytes_per_s))
    if speed <= 0:
        return None
    return max(speed - now.queued_bytes / max_downtime_s, LEAST_PART * speed, 1.0)


def behind_s(looks: Sequence[SentSample]) -> float:
    """How long the target will need for what stands in the sockets, at its speed of late.

    Looks are in order; none is needed. Endless when it has read nothing lately.
    """
    if not looks or not looks[-1].queued_bytes:
        return 0.0
    now = looks[-1]
    earlier = [look for look in looks if look.at_s <= now.at_s - LEAST_WINDOW_S]
    if not earlier:
        return 0.0  # not known yet
    read = now.taken_bytes - earlier[-1].taken_bytes
    return now.queued_bytes * (now.at_s - earlier[-1].at_s) / read if read > 0 else inf
