"""The forecast of a migration for each method: total time, downtime, bytes, slowdown.

Formulas: pre-copy in rounds (Clark et al., NSDI 2005), with U(t) instead of a rate. Each figure
has three values: one of ten outcomes is below p10, one above p90.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from enum import StrEnum
from typing import Any, NamedTuple

from vmckpt.forecast.model.course import Load
from vmckpt.forecast.model.guest import Guest
from vmckpt.forecast.model.link import NOISE_S, LinkModel
from vmckpt.forecast.model.rounds import (
    HELD_SPREAD_S,
    MOST_THROTTLE,
    NOT_HELD,
    TIMESLICE_S,
    PageTimes,
    Played,
    SwitchoverHold,
    dirtied_bytes,
    dirtied_s,
    first_pass,
    play_precopy,
    wire,
)

# The 10th percentile, in standard deviations.
_TENTH = 1.28
# The error of the simulation itself, as a fraction of the time. Of the workloads that teach
# benchmarks/forecast, each left out of the learning in turn, 79 % are then within p10 to p90.
MODEL_SPREAD = 0.05
# A bandwidth limit counts as kept up to this multiple of it: QEMU writes many pages at once.
HELD_WITHIN = 1.05


class TransferMode(StrEnum):
    """How memory can be moved; `multifd` and `zstd` are pre-copies over several channels."""

    PRECOPY = "precopy"
    AUTO_CONVERGE = "auto-converge"
    MULTIFD = "multifd"
    ZSTD = "zstd"
    HYBRID = "hybrid"
    POSTCOPY = "postcopy"
    STOP = "stop"


POSTCOPIES = frozenset({TransferMode.HYBRID, TransferMode.POSTCOPY})
PARALLEL = frozenset({TransferMode.MULTIFD, TransferMode.ZSTD})


class Band(NamedTuple):
    """The 10th, 50th and 90th percentile of the outcomes."""

    p10: float
    p50: float
    p90: float

    def holds(self, outcome: float) -> bool:
        """Whether the outcome is inside."""
        return self.p10 <= outcome <= self.p90

    def to_json(self) -> list[float | None]:
        """Infinity is null."""
        return [value if math.isfinite(value) else None for value in self]


class MigrationLimits(NamedTuple):
    """Limits of a migration: downtime, and bytes/s (0: none).

    `channels` applies to the parallel methods; auto-converge takes at most `most_throttle` of the
    guest's processor time; a pre-copy is `held` back from the switchover.
    """

    downtime_s: float
    bandwidth_bytes_per_s: float = 0.0
    channels: int = 2
    most_throttle: float = MOST_THROTTLE
    held: SwitchoverHold = NOT_HELD


@dataclass(frozen=True, slots=True)
class Forecast:
    """The forecast for one method.

    `ends` is false if it is not expected to end. `slowdown` is a fraction.

    `slow_s` is how long a post-copy fetches pages that the guest may already want.
    """

    mode: TransferMode
    ends: bool
    total_s: Band
    downtime_s: Band
    sent_bytes: Band
    slowdown: Band
    rounds: int
    slow_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """For `--json` and run records."""
        data = asdict(self)
        data["way"] = data.pop("mode")
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Band):
                data[field.name] = value.to_json()
        return data


class _Outcome(NamedTuple):
    ends: bool
    total_s: float
    downtime_s: float
    sent_bytes: float
    slowdown: float
    rounds: int
    slow_s: float = 0.0


class _Case(NamedTuple):
    mode: TransferMode
    guest: Guest
    link: LinkModel
    limits: MigrationLimits


class _Scenario(NamedTuple):
    """The unknowns: -1 for the good 10th percentile, 0 for the median, 1 for the bad one.

    `link`: the speed of pages; `guest`: how much it dirties; `switch`: how long the switchover and
    the waiting take; `around`: the time besides sending; `model`: deviations from the simulation.
    """

    link: int = 0
    guest: int = 0
    switch: int = 0
    around: int = 0
    model: int = 0


_UNKNOWNS = range(len(_Scenario._fields))


def forecast(
    mode: TransferMode, guest: Guest, link: LinkModel, limits: MigrationLimits
) -> Forecast:
    """Forecast the method `mode`. `link` was learned for its way of sending."""
    case = _Case(mode, guest, link, limits)
    tries = sorted(
        ((_play(case, load, _Scenario()), load) for load in guest.loads),
        key=lambda one: one[0].total_s,
    )
    middle, load = tries[len(tries) // 2]
    if (now := guest.load_now) is not None:
        middle, load = _play(case, now, _Scenario()), now
    # Vary each unknown by itself, good and bad: they are independent.
    pairs = [
        tuple(
            _play(case, load, _Scenario(*(scenario * (n == at) for n in _UNKNOWNS)))
            for scenario in (-1, 1)
        )
        for at in _UNKNOWNS
    ]

    def band(take: Callable[[_Outcome], float]) -> Band:
        by_moment = sorted(take(one) for one, _ in tries)
        tenths = (by_moment[len(tries) // 10], by_moment[-1 - len(tries) // 10])
        return _band(take(middle), [tenths, *(tuple(take(one) for one in pair) for pair in pairs)])

    return Forecast(
        mode=mode,
        ends=middle.ends,
        total_s=band(lambda one: one.total_s),
        downtime_s=band(lambda one: one.downtime_s),
        sent_bytes=band(lambda one: one.sent_bytes),
        # A slowdown of 100% is a stopped guest.
        slowdown=Band(*(min(part, 1.0) for part in band(lambda one: one.slowdown))),
        rounds=middle.rounds,
        slow_s=middle.slow_s,
    )


def _band(middle: float, pairs: Sequence[tuple[float, ...]]) -> Band:
    """The percentiles of a figure, given its pair of values for each unknown varied alone."""
    if math.isinf(middle):
        return Band(min(middle, *(min(pair) for pair in pairs)), middle, middle)
    below = math.hypot(*(max(middle - min(pair), 0.0) for pair in pairs))
    above = math.hypot(*(max(max(pair) - middle, 0.0) for pair in pairs))
    return Band(max(middle - below, 0.0), middle, middle + above)


def beyond_bytes_per_s(
    mode: TransferMode, guest: Guest, link: LinkModel, limits: MigrationLimits
) -> float:
    """The rate while the guest runs at the source, if above the bandwidth limit; 0: it is kept."""
    held = _wire(_Case(mode, guest, link, limits)).held_bytes_per_s
    is_kept = held <= HELD_WITHIN * limits.bandwidth_bytes_per_s
    return 0.0 if is_kept or not limits.bandwidth_bytes_per_s else held


def _wire(case: _Case, speed: float = 1.0) -> PageTimes:
    mode, guest, link, limits = case
    return wire(
        link.costs,
        limits.bandwidth_bytes_per_s,
        parts=(guest.ratio, guest.dirtied_ratio) if mode is TransferMode.ZSTD else None,
        speed=speed,
        channels=limits.channels if mode in PARALLEL else 0,
    )


def _play(case: _Case, load: Load, scenario: _Scenario) -> _Outcome:
    """Simulate one outcome."""
    mode, guest, link, limits = case
    path = _wire(case, (1 + _TENTH * link.spread) ** -scenario.link)
    switch_s = max(link.switch_s + scenario.switch * _TENTH * link.switch_spread_s, 0.0)
    # The watcher finds the end of the first pass at any moment of its interval.
    held_spread_s = math.hypot(HELD_SPREAD_S, limits.held.s / 3**0.5)
    around_spread_s = math.hypot(link.fixed_spread_s, held_spread_s, NOISE_S * link.spread)
    around_s = max(link.fixed_s + scenario.around * _TENTH * around_spread_s, 0.0)
    around_s += _copying_s(guest, link, limits)
    slower = 1 + scenario.model * _TENTH * MODEL_SPREAD
    guest_scenario = 0.4 * scenario.guest
    if mode is TransferMode.STOP:
        # QEMU does not know that no more pages will be dirtied: the bandwidth limit holds.
        took_s, sent = first_pass(guest, path)
        downtime_s = took_s * slower + switch_s
        return _Outcome(True, around_s + downtime_s, downtime_s, sent, 0.0, 1)
    if mode is TransferMode.POSTCOPY:
        took_s, sent = first_pass(guest, path)
        left = load.between(0.0, took_s, 0.5 + guest_scenario)
        # The bandwidth limit of pre-copy does not hold in post-copy.
        left_s = dirtied_s(guest, path, left, limited=False)
        sent += dirtied_bytes(guest, path, left)
        played = Played(True, took_s * slower, left_s, left, sent, 2)
        return _in_postcopy(
            played, around_s, switch_s, link.waits_s(played.left_s, scenario.switch)
        )
    played = play_precopy(
        guest,
        path,
        limits.downtime_s,
        load=load,
        scenario=guest_scenario,
        most_throttle=limits.most_throttle if mode is TransferMode.AUTO_CONVERGE else 0.0,
        until_stalled=mode is TransferMode.HYBRID,
        held=limits.held,
    )
    played = replace(played, took_s=played.took_s * slower)
    if mode is TransferMode.HYBRID and not played.ends:
        return _in_postcopy(
            played, around_s, switch_s, link.waits_s(played.left_s, scenario.switch)
        )
    return _stopped(played, around_s, switch_s, link.stopped_share)


def _stopped(played: Played, around_s: float, switch_s: float, stopped_share: float) -> _Outcome:
    if not played.ends:
        return _Outcome(False, math.inf, math.inf, math.inf, 0.0, played.rounds)
    # A throttled processor sleeps in one piece: clients of the guest see that as downtime.
    asleep_s = TIMESLICE_S * played.throttle / (1 - played.throttle) if played.throttle else 0.0
    downtime_s = played.left_s * stopped_share + switch_s
    transfer_s = played.took_s + downtime_s
    slowdown = played.slowed_s / transfer_s if transfer_s else 0.0
    stall_s = max(downtime_s, asleep_s)
    return _Outcome(
        True, around_s + transfer_s, stall_s, played.sent_bytes, slowdown, played.rounds
    )


def _in_postcopy(played: Played, around_s: float, switch_s: float, waits_s: float) -> _Outcome:
    slow_s = played.left_s
    total_s = around_s + played.took_s + switch_s + slow_s
    return _Outcome(
        True,
        total_s,
        switch_s + waits_s,
        played.sent_bytes,
        slow_s / total_s if total_s else 0.0,
        played.rounds,
        slow_s,
    )


def _copying_s(guest: Guest, link: LinkModel, limits: MigrationLimits) -> float:
    if not guest.disk_bytes:
        return 0.0
    if link.disk_bytes_per_s is None:
        return math.inf
    speed = link.disk_bytes_per_s
    if limits.bandwidth_bytes_per_s:
        speed = min(speed, limits.bandwidth_bytes_per_s)
    return guest.disk_bytes / speed


def from_json(data: Mapping[str, Any]) -> Forecast:
    """The inverse of `Forecast.to_json`. Raises ValueError, KeyError, TypeError."""
    values = dict(data)
    for name in ("total_s", "downtime_s", "sent_bytes", "slowdown"):
        values[name] = Band(*(math.inf if value is None else value for value in data[name]))
    return Forecast(mode=TransferMode(values.pop("way")), **values)
