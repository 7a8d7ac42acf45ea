"""Choose the method that meets the constraints; if none does, the smallest change that helps."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from vmckpt.forecast.model.forecast import POSTCOPIES, Forecast, TransferMode
from vmckpt.units import format_duration


@dataclass(frozen=True, slots=True)
class Intent:
    """The operator's constraints; None: none. `gone_s` of `finish_within_s` have already passed."""

    max_downtime_s: float | None = None
    finish_within_s: float | None = None
    max_slowdown: float | None = None
    never_risk_postcopy: bool = False
    gone_s: float = 0.0

    @property
    def is_given(self) -> bool:
        """Whether any constraint is set."""
        return replace(self, gone_s=0.0) != Intent()

    @property
    def left_s(self) -> float | None:
        """How long a migration that begins now may take."""
        return None if self.finish_within_s is None else self.finish_within_s - self.gone_s


class Offer(NamedTuple):
    """A possible method with its forecast; `misses`: the constraints that it violates."""

    forecast: Forecast
    misses: tuple["Miss", ...]

    @property
    def keeps(self) -> bool:
        """Whether it satisfies every constraint."""
        return not self.misses


class Miss(NamedTuple):
    """A violated constraint: the option, the value it would need, and the difference."""

    option: str
    needed: str
    times: float


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen method and why; without one, `change` is the smallest change that allows one."""

    mode: TransferMode | None
    reason: str
    change: str = ""


MAX_DOWNTIME, MAX_SLOWDOWN = "--max-downtime", "--max-slowdown"
# The longest downtime that can be requested: QEMU's maximum.
MOST_DOWNTIME_S = 2000.0
# Of methods that differ by less than this fraction, choose the gentler one.
ALIKE = 0.1
# Accept up to LITTLE_MORE times the change for a downtime that is FAR_SHORTER times shorter.
LITTLE_MORE, FAR_SHORTER = 1.5, 3
# The gentler a method is on the guest, the earlier it comes.
_GENTLE = (
    TransferMode.PRECOPY, TransferMode.MULTIFD, TransferMode.ZSTD, TransferMode.AUTO_CONVERGE,
    TransferMode.STOP, TransferMode.HYBRID, TransferMode.POSTCOPY,
)  # fmt: skip


def judge(forecast: Forecast, intent: Intent) -> Offer:
    """Compare the forecast with the intent, by what nine of ten outcomes meet."""
    return Offer(forecast, tuple(_misses(forecast, intent)))


def choose(offers: Sequence[Offer], intent: Intent) -> Choice:
    """Choose the fastest of the methods that meet the intent.

    Post-copy, in which a broken link can cost the guest, only if nothing safer meets it. Stopping
    the guest comes before all others only if a pause is explicitly allowed.
    """
    if not offers:
        return Choice(None, "no method is possible between these hosts", "see `vmckpt check`")
    good = [offer for offer in offers if offer.keeps and offer.forecast.ends]
    if not good:
        return Choice(None, _against(offers), _least_change(offers))
    pause_allowed = intent.max_downtime_s is not None
    least = min(_danger(offer.forecast.mode, pause_allowed=pause_allowed) for offer in good)
    good = [o for o in good if _danger(o.forecast.mode, pause_allowed=pause_allowed) == least]
    fastest = min(offer.forecast.total_s.p50 for offer in good)
    alike = [offer for offer in good if offer.forecast.total_s.p50 <= fastest * (1 + ALIKE)]
    best = min(alike, key=lambda offer: _GENTLE.index(offer.forecast.mode)).forecast
    others = sum(not (offer.keeps and offer.forecast.ends) for offer in offers)
    verb = "meets all constraints" if intent.is_given else "completes"
    reason = f"{best.mode} {verb} in {format_duration(best.total_s.p50)}"
    reason += f"; {others} of {len(offers)} methods do not" if others else ""
    if len(alike) > 1:
        reason += "; others are as fast, but affect the guest more"
    elif len(good) > 1:
        reason += "; it is the fastest"
    return Choice(best.mode, reason)


def _danger(mode: TransferMode, *, pause_allowed: bool) -> int:
    if mode is TransferMode.STOP:
        return 0 if pause_allowed else 2
    return 1 if mode in POSTCOPIES else 0


def _misses(forecast: Forecast, intent: Intent) -> Iterable[Miss]:
    if not forecast.ends:
        yield Miss("method", "another method: this one does not complete", math.inf)
        return
    pause_s, total_s = forecast.downtime_s.p90, forecast.total_s.p90
    if math.isinf(total_s):
        yield Miss("method", "another method: this one fails to complete one time in ten", math.inf)
        return
    if intent.max_downtime_s is not None and pause_s > intent.max_downtime_s:
        is_possible = math.ceil(pause_s / 60) * 60 <= MOST_DOWNTIME_S
        needed = f"--max-downtime {_rounded_up(pause_s)}" if is_possible else "no --max-downtime"
        yield Miss(MAX_DOWNTIME, needed, pause_s / intent.max_downtime_s)
    over_s = intent.gone_s + total_s
    if intent.finish_within_s is not None and over_s > intent.finish_within_s:
        needed = f"--finish-within {_rounded_up(over_s)}"
        yield Miss("--finish-within", needed, over_s / intent.finish_within_s)
    if intent.max_slowdown is not None and forecast.slowdown.p90 > intent.max_slowdown:
        yield missed_slowdown(intent.max_slowdown, forecast.slowdown.p90)
    if intent.never_risk_postcopy and forecast.mode in POSTCOPIES:
        yield Miss("--never-risk-postcopy", "no --never-risk-postcopy", 2.0)


def change(offer: Offer) -> tuple[bool, int, float]:
    """A sort key for violations: the number of violated constraints, then the smallest violation;
    methods that may not finish come last.
    """
    endless = not math.isfinite(offer.forecast.total_s.p90)
    return endless, len(offer.misses), math.prod(miss.times for miss in offer.misses)


def missed_slowdown(most: float, slowdown: float) -> Miss:
    """The violation that the guest has to be slowed more than allowed."""
    percent = math.ceil(100 * slowdown)
    return Miss(MAX_SLOWDOWN, f"{MAX_SLOWDOWN} {percent}%", slowdown / max(most, 1e-3))


def _least_change(offers: Sequence[Offer]) -> str:
    able = [offer for offer in offers if math.isfinite(offer.forecast.total_s.p90)]
    if not able:
        return "reduce the load of the guest, or allow more bandwidth: no method completes"
    least = min(able, key=change)
    gentle = _gentler(able, least)
    needed = " and ".join(miss.needed for miss in gentle.misses)
    advice = f"{needed} would be enough for {gentle.forecast.mode}"
    if gentle is not least:
        pauses = [format_duration(one.forecast.downtime_s.p90) for one in (gentle, least)]
        advice += (
            f", with a downtime of {pauses[0]}; {least.forecast.mode}, with {pauses[1]}, would "
        )
        advice += f"need {' and '.join(miss.needed for miss in least.misses)}"
    return advice


def _gentler(able: Iterable[Offer], least: Offer) -> Offer:
    """An alternative to the smallest change that costs little more for a much shorter downtime.

    It is no riskier, and violates no more constraints.
    """
    most_times, most_pause_s = change(least)[2] * LITTLE_MORE, least.forecast.downtime_s.p90

    def danger(offer: Offer) -> int:
        return _danger(offer.forecast.mode, pause_allowed=False)

    good = [
        offer
        for offer in able
        if change(offer)[:2] == change(least)[:2]
        and change(offer)[2] <= most_times
        and offer.forecast.downtime_s.p90 * FAR_SHORTER <= most_pause_s
        and danger(offer) <= danger(least)
    ]
    return min(good, key=lambda offer: (danger(offer), change(offer)), default=least)


def _against(offers: Sequence[Offer]) -> str:
    parts = []
    for offer in offers:
        misses = " and ".join(miss.needed for miss in offer.misses)
        parts.append(f"{offer.forecast.mode} needs {misses}")
    return "; ".join(parts)


def _rounded_up(duration_s: float) -> str:
    """Rounded up to the form of an option, never less: 210ms, 4.3s, 12m."""
    if duration_s < 1:
        return f"{math.ceil(duration_s * 100) * 10}ms"
    if duration_s < 60:
        return f"{math.ceil(duration_s * 10) / 10:g}s"
    return f"{math.ceil(duration_s / 60)}m"
