"""From samples to figures: medians, percentiles, ratios with their uncertainty, verdicts."""

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

_RESAMPLES = 2000
_SEED = 1


@dataclass(frozen=True, slots=True)
class Spread:
    """How a quantity was distributed over `count` measurements."""

    count: int
    least: float
    median: float
    p90: float
    most: float


@dataclass(frozen=True, slots=True)
class Ratio:
    """The ratio of two medians; `low` and `high` bound it with 95 % (bootstrap over rounds)."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """A figure held against what was promised."""

    promise: str
    measured: float
    limit: float

    @property
    def met(self) -> bool:
        """Whether the promise holds."""
        return self.measured <= self.limit


def spread(values: Sequence[float]) -> Spread:
    """The distribution of `values`, of which there is at least one."""
    ordered = sorted(values)
    return Spread(
        count=len(ordered),
        least=ordered[0],
        median=statistics.median(ordered),
        p90=ordered[min(len(ordered) - 1, round(0.9 * (len(ordered) - 1)))],
        most=ordered[-1],
    )


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """median(ours) / median(theirs); ours[i] and theirs[i] are of the same round."""
    pairs = list(zip(ours, theirs, strict=True))
    chance = random.Random(_SEED)  # the same samples give the same figures
    values = sorted(_ratio(chance.choices(pairs, k=len(pairs))) for _ in range(_RESAMPLES))
    return Ratio(_ratio(pairs), values[_RESAMPLES // 40], values[-_RESAMPLES // 40])


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    return statistics.median(a for a, _ in pairs) / statistics.median(b for _, b in pairs)


def verdicts_as_json(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """For a results file."""
    return [asdict(verdict) | {"met": verdict.met} for verdict in verdicts]


def spread_lines(spreads: Mapping[str, Spread], unit: str) -> list[str]:
    """One line a quantity, for people."""
    return [
        f"  {name:<38} median {s.median:9.1f} {unit}   p90 {s.p90:9.1f} {unit}   n {s.count}"
        for name, s in spreads.items()
    ]


def verdict_lines(verdicts: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line a verdict of a results file, for people."""
    return [
        f"{'met' if one['met'] else 'MISSED'}: {one['promise']} {one['measured']:.2f} <= "
        f"{one['limit']:.2f}"
        for one in verdicts
    ]
