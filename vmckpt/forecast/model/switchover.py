"""When a pre-copy may stop the guest: not before the destination has received what was sent."""

from collections.abc import Sequence
from itertools import pairwise
from math import inf
from typing import NamedTuple

WINDOW_S = 1.0
# Over a shorter time than this a speed is meaningless.
LEAST_WINDOW_S = 0.04
# Count at least this fraction of the speed, however full the sockets are: otherwise a link that is
# always full would never allow the switchover.
LEAST_PART = 0.5


class SentSample(NamedTuple):
    """The bytes sent since the start, and how many of them are still in sockets."""

    at_s: float
    sent_bytes: int
    queued_bytes: int

    @property
    def taken_bytes(self) -> int:
        """The bytes that the destination has read."""
        return self.sent_bytes - self.queued_bytes


def switchover_bytes_per_s(
    samples: Sequence[SentSample],
    first_pass_bytes: int,
    max_downtime_s: float,
    limit_bytes_per_s: int = 0,
) -> float | None:
    """The speed to assume at the switchover; None while the switchover has to wait.

    It waits until the destination has read everything that was sent when memory had been sent once
    (`first_pass_bytes`). From then on: the best speed at which the destination read between two
    samples of the last second, less what is in the sockets now and has to be read within
    `max_downtime_s` too. Samples are in order; two that are less than 40 ms apart show no speed.
    Under a bandwidth limit (0: none) QEMU sends ten times a second, in bursts: two samples with two
    bursts between them would show twice the limit.
    """
    now = samples[-1]
    if now.taken_bytes < first_pass_bytes:
        return None
    speeds = [
        (after.taken_bytes - before.taken_bytes) / (after.at_s - before.at_s)
        for before, after in pairwise(
            sample for sample in samples if sample.at_s >= now.at_s - WINDOW_S
        )
        if after.at_s - before.at_s >= LEAST_WINDOW_S
    ]
    speed = max(speeds, default=0.0)
    if limit_bytes_per_s:
        speed = min(speed, float(limit_bytes_per_s))
    if speed <= 0:
        return None
    return max(speed - now.queued_bytes / max_downtime_s, LEAST_PART * speed, 1.0)


def behind_s(samples: Sequence[SentSample]) -> float:
    """How long the destination needs for what is in the sockets, at its recent speed.

    Samples are in order; there may be none. Infinite if it has read nothing recently.
    """
    if not samples or not samples[-1].queued_bytes:
        return 0.0
    now = samples[-1]
    earlier = [sample for sample in samples if sample.at_s <= now.at_s - LEAST_WINDOW_S]
    if not earlier:
        return 0.0  # not known yet
    read = now.taken_bytes - earlier[-1].taken_bytes
    return now.queued_bytes * (now.at_s - earlier[-1].at_s) / read if read > 0 else inf
