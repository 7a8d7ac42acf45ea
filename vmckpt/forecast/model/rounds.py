"""Simulation of a pre-copy, round by round as QEMU does it.

QEMU sends the pages that it knows to be dirty until less than a threshold (speed x downtime-limit)
is left, then asks which pages were dirtied meanwhile, and stops the guest if all that is left is
below the threshold. It checks only a few times a second. (migration.c, migration_iteration_run;
ram.c, migration_bitmap_sync and migration_trigger_throttle.)
"""

from dataclasses import dataclass, field
from math import sqrt
from typing import NamedTuple

from vmckpt.forecast.model.convergence import has_stalled
from vmckpt.forecast.model.course import Load, OnAverage, Slowed
from vmckpt.forecast.model.first_pass import WINDOW_S, BandwidthLimit, TransferPace, play
from vmckpt.forecast.model.guest import PAGE_BYTES, SENT_PAGE_BYTES, SENT_ZERO_BYTES, Guest
from vmckpt.forecast.model.link import PageCosts

# How long QEMU sends between two checks of what is left.
CHECK_S = 0.05
# It recalculates the threshold ten times a second; under a bandwidth limit a window's bytes go at
# its start, and QEMU sleeps until the next one (migration_rate_limit).
HELD_S, HELD_SPREAD_S = WINDOW_S / 2, WINDOW_S / 12**0.5
# QEMU writes 32 pages at once (QEMUFile: 64 pieces, each page and its header), a multifd channel
# 128; it checks the window's bytes after that. The data then in the channels is sent too: for each
# between nothing and all but the last of a packet, more often much than little.
BATCH_BYTES, PACKET_BYTES, IN_HAND = 32 * 4104, 128 * 4104, 0.75
# The number of rounds without change after which a pre-copy is given up, and the maximum.
PATIENCE_ROUNDS, MOST_ROUNDS, MOST_S = 40, 3000, 7 * 86400.0
SAME_WITHIN = 1e-3
# Auto-converge: periods of at least 1 s; every second period in which more than half of the bytes
# sent were dirtied raises the throttle.
PERIOD_S, HIGH_PART, FIRST_THROTTLE, MORE_THROTTLE, MOST_THROTTLE = 1.0, 0.5, 0.2, 0.1, 0.99
# The least time per page, whatever was learned: each is checked once.
LEAST_PAGE_S = 5e-8
# How long a throttled processor may run between two sleeps.
TIMESLICE_S = 0.01


class SwitchoverHold(NamedTuple):
    """A switchover that is held back by who watches the migration, not by QEMU.

    For `s` seconds on average after the first pass, unless fewer than `pages` are left by then.
    """

    s: float
    pages: float


NOT_HELD = SwitchoverHold(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class PageTimes:
    """Seconds per page, per zero page, and for the start.

    With `compresses`, `sent_part` is the fraction of a page's bytes that goes over the link,
    `dirtied_part` that of a dirtied page; a page of which nothing is left takes `squeezed_s` more.
    `bandwidth_bytes_per_s` (0: no limit) applies while the guest runs and post-copy has not begun;
    over `channels` of multifd (0: without) more is sent.
    """

    page_s: float
    zero_page_s: float
    start_s: float
    hole_s: float = 0.0
    look_s: float = 0.0
    squeezed_s: float = 0.0
    compresses: bool = False
    sent_part: float = 1.0
    dirtied_part: float = 1.0
    bandwidth_bytes_per_s: float = 0.0
    channels: int = 0

    @property
    def held(self) -> BandwidthLimit:
        """The model of the bandwidth limit as QEMU applies it."""
        if self.channels:
            return BandwidthLimit(self.bandwidth_bytes_per_s, PACKET_BYTES, IN_HAND * self.channels)
        return BandwidthLimit(self.bandwidth_bytes_per_s, BATCH_BYTES, 0.0)

    @property
    def held_bytes_per_s(self) -> float:
        """The real throughput under the bandwidth limit, in the first pass and on average."""
        return self.held.window_bytes(self.sent_part) / WINDOW_S

    def dirtied_s(self, pages: float, zero_pages: float, *, limited: bool = True) -> float:
        """How long so many dirtied pages take. The destination works on while the link is held
        back.
        """
        page_s = self.page_s + self.squeezed_s * (1 - self.dirtied_part)
        busy_s = pages * page_s + zero_pages * self.zero_page_s
        if not limited or not self.bandwidth_bytes_per_s:
            return busy_s
        held_bytes_per_s = self.held.window_bytes(self.dirtied_part) / WINDOW_S
        return max(busy_s, self.dirtied_bytes(pages, zero_pages) / held_bytes_per_s)

    @property
    def pace(self) -> TransferPace:
        """The first pass. A non-zero page takes the destination as long as both together."""
        return TransferPace(
            sent_s=0.0,
            taken_s=self.page_s,
            scanned_s=self.look_s,
            zero_s=self.zero_page_s,
            # A page that the source's kernel has to allocate first delays both.
            hole_s=self.zero_page_s - self.look_s + self.hole_s,
            page_bytes=SENT_PAGE_BYTES,
            zero_bytes=SENT_ZERO_BYTES,
            held=self.held if self.bandwidth_bytes_per_s else None,
            squeezed_s=self.squeezed_s,
            compresses=self.compresses,
        )

    def first_pass_bytes(self, pages: float, zero_pages: float) -> float:
        """The bytes that go over the link for all of memory, once."""
        return pages * SENT_PAGE_BYTES * self.sent_part + zero_pages * SENT_ZERO_BYTES

    def dirtied_bytes(self, pages: float, zero_pages: float) -> float:
        """The bytes that go over the link for dirtied pages."""
        return pages * SENT_PAGE_BYTES * self.dirtied_part + zero_pages * SENT_ZERO_BYTES


def wire(
    costs: PageCosts,
    bandwidth_bytes_per_s: float = 0.0,
    *,
    parts: tuple[float, float] | None = None,
    speed: float = 1.0,
    channels: int = 0,
) -> PageTimes:
    """The costs under a bandwidth limit (0: none), with all at `speed` times the usual speed.

    `parts`: the fractions that compression leaves of a page and of a dirtied one; None: no
    compression.
    """
    sent_part, dirtied_part = parts or (1.0, 1.0)
    return PageTimes(
        channels=channels,
        page_s=max(costs.page_s, LEAST_PAGE_S) / speed,
        squeezed_s=costs.squeezed_s / speed,
        zero_page_s=max(costs.zero_page_s, LEAST_PAGE_S) / speed,
        hole_s=costs.hole_s / speed,
        look_s=costs.look_s / speed,
        start_s=costs.start_s / speed,
        compresses=parts is not None,
        sent_part=sent_part,
        dirtied_part=dirtied_part,
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
    )


@dataclass(frozen=True, slots=True)
class Played:
    """A simulated transfer. `left_s`: time to send the rest at full speed with the guest stopped.

    `ends`: false if it would never converge; `throttle`: the last throttle; `slowed_s`: the guest's
    time lost by throttling.
    """

    ends: bool
    took_s: float
    left_s: float
    left_pages: float
    sent_bytes: float
    rounds: int
    throttle: float = 0.0
    slowed_s: float = 0.0


@dataclass(slots=True)
class _Throttle:
    """QEMU's auto-converge, up to `most`; 0: off."""

    most: float
    guest: Guest
    now: float = 0.0
    high_periods: int = 0
    dirtied_pages: float = 0.0
    period_s: float = 0.0
    sent_pages: float = 0.0
    slowed_s: float = 0.0

    def round_over(self, took_s: float, sent_pages: float, dirtied_pages: float) -> bool:
        """A round is over; whether the guest is slowed more from here on."""
        self.slowed_s += took_s * (1 - self.guest.speed(self.now))
        self.period_s += took_s
        self.sent_pages += sent_pages
        self.dirtied_pages += dirtied_pages
        if not self.may_rise or self.period_s < PERIOD_S:
            return False
        self.high_periods += self.dirtied_pages > HIGH_PART * self.sent_pages
        self.period_s = self.sent_pages = self.dirtied_pages = 0.0
        if self.high_periods < 2:
            return False
        self.high_periods = 0
        more = self.now + MORE_THROTTLE if self.now else FIRST_THROTTLE
        self.now = min(more, self.most)
        return True

    @property
    def may_rise(self) -> bool:
        """Whether the guest can be slowed more than it is."""
        return self.now < self.most


@dataclass(slots=True)
class _Course:
    """The state of a pre-copy: pages left, and the time in which they were dirtied."""

    left: float
    age_s: float
    took_s: float
    sent_bytes: float
    rounds: int = 1
    unchanged: int = 0
    bytes_by_round: list[int] = field(default_factory=list)


def first_pass(guest: Guest, times: PageTimes) -> tuple[float, float]:
    """Seconds and bytes for sending all of memory once."""
    pages, zero_pages = guest.total_pages - guest.zero_pages, guest.zero_pages
    took_s = times.start_s + play(guest.stretches, times.pace)
    return took_s, times.first_pass_bytes(pages, zero_pages)


def play_precopy(
    guest: Guest,
    times: PageTimes,
    limit_s: float,
    *,
    load: Load | None = None,
    scenario: float = 0.0,
    most_throttle: float = 0.0,
    until_stalled: bool = False,
    held: SwitchoverHold = NOT_HELD,
) -> Played:
    """Simulate a pre-copy with the downtime limit `limit_s` for a guest that dirties by `load`.

    `scenario`: 0.4 is the worst tenth of what the guest may dirty, -0.4 the best; it averages out
    over many rounds. Auto-converge takes up to `most_throttle` of the processor time; 0: off. With
    `until_stalled` it ends when rounds make no progress (hybrid): the rest is left to post-copy.
    """
    page_s, limited = dirtied_s(guest, times, 1.0), bool(times.bandwidth_bytes_per_s)
    threshold = limit_s / page_s
    if limited:
        threshold = min(threshold, limit_s * times.bandwidth_bytes_per_s / SENT_PAGE_BYTES)
    slack = (WINDOW_S if limited else CHECK_S) / page_s / 2
    load, throttle = load or OnAverage(guest.curve), _Throttle(most_throttle, guest)
    took_s, sent = first_pass(guest, times)
    course = _Course(load.between(0.0, took_s, 0.5 + scenario), took_s, took_s, sent)
    throttle.round_over(took_s, guest.total_pages, course.left)
    soon = load.between(took_s, took_s + HELD_S, 0.5 + scenario)
    held_s = HELD_S + (held.s if soon > held.pages else 0.0)
    gone = min(course.left, held_s / page_s)
    course.sent_bytes += dirtied_bytes(guest, times, gone)
    _held_round(course, load, gone, 0.5 + scenario, held_s)
    while course.rounds < MOST_ROUNDS and course.took_s < MOST_S:
        course.bytes_by_round.append(round(course.left * PAGE_BYTES))
        if course.left <= threshold:
            return _played(course, throttle, guest, times, ends=True)
        if until_stalled and has_stalled([guest.total_pages * PAGE_BYTES, *course.bytes_by_round]):
            return _played(course, throttle, guest, times, ends=False)
        if _goes_nowhere(course, throttle):
            break
        before = course.left
        gone = min(max(course.left - threshold + slack, 2 * slack), course.left)
        round_s = gone * page_s
        dirtied = _next_round(course, load, gone, round_s, scenario / sqrt(course.rounds))
        course.sent_bytes += dirtied_bytes(guest, times, gone)
        course.unchanged += abs(course.left - before) <= SAME_WITHIN * before
        speed = guest.speed(throttle.now)
        if throttle.round_over(round_s, gone, dirtied):
            load = Slowed(load, course.took_s, guest.speed(throttle.now) / speed)
            course.unchanged = 0
    return _played(course, throttle, guest, times, ends=False)


def _held_round(course: _Course, load: Load, gone: float, quantile: float, held_s: float) -> None:
    """After the first pass: `gone` pages are sent until the threshold is recalculated."""
    course.left += load.between(course.took_s, course.took_s + held_s, quantile) - gone
    course.took_s += held_s
    course.age_s += held_s


def _next_round(course: _Course, load: Load, gone: float, round_s: float, scenario: float) -> float:
    """`gone` pages were sent in `round_s`; count those dirtied. Some were left over anyway."""
    quantile = 0.5 + scenario
    now_s = course.took_s + round_s
    dirtied = load.between(course.took_s, now_s, quantile)
    kept = course.left - gone
    course.age_s = round_s + (course.age_s if kept > 0 else 0.0)
    in_all = load.between(now_s - course.age_s, now_s, quantile)
    course.left = min(kept + dirtied, max(in_all, kept))
    course.took_s += round_s
    course.rounds += 1
    return dirtied


def _goes_nowhere(course: _Course, throttle: _Throttle) -> bool:
    return course.unchanged > PATIENCE_ROUNDS and not throttle.may_rise


def _played(
    course: _Course, throttle: _Throttle, guest: Guest, times: PageTimes, *, ends: bool
) -> Played:
    return Played(
        ends=ends,
        took_s=course.took_s,
        left_s=dirtied_s(guest, times, course.left, limited=False),
        left_pages=course.left,
        sent_bytes=course.sent_bytes + dirtied_bytes(guest, times, course.left),
        rounds=course.rounds + 1,
        throttle=throttle.now,
        slowed_s=throttle.slowed_s,
    )


def dirtied_s(guest: Guest, times: PageTimes, pages: float, *, limited: bool = True) -> float:
    """How long that many of the pages that the guest dirties take."""
    zero = guest.dirtied_zero_share
    return times.dirtied_s(pages * (1 - zero), pages * zero, limited=limited)


def dirtied_bytes(guest: Guest, times: PageTimes, pages: float) -> float:
    """The bytes that go over the link for them."""
    zero = guest.dirtied_zero_share
    return times.dirtied_bytes(pages * (1 - zero), pages * zero)
