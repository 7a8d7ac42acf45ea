"""How often to take checkpoints: what they cost against what a failure would lose. Pure.

A checkpoint stalls its guest for d; the guest fails after M on average, memoryless (a Poisson
process), and returns to its last checkpoint. The work time tau between two checkpoints that
minimises the expected wall time M (e^((tau + d)/M) - 1) / tau of a piece of work is M (1 +
W0(-e^(-1 - d/M))): Young 1974 and Daly 2006 are its first terms for d << M.
"""

import math
from typing import NamedTuple

# Newton's iteration ends here: from three correct digits on, each step doubles them.
_STEPS = 8
# Up to here the series is a good starting value.
_NEAR = 0.5
# Beyond it only the first term of the series remains.
_LARGE = 30.0
# Below this, u + log(1 - u) loses its digits; the series is exact to 1e-10 of u.
_SMALL = 0.02


class FailureRate(NamedTuple):
    """The knowledge about a failure rate: Gamma(`failures`, `time_s`).

    The prior is one failure within the assumed mean time; observations are added. Plan with the
    mean of the rate: an interval's mean loss is linear in the rate.
    """

    failures: float
    time_s: float

    @classmethod
    def prior(cls, mtbf_s: float) -> "FailureRate":
        """The prior: as much information as one failure within `mtbf_s`."""
        return cls(1.0, mtbf_s)

    def observed(self, failures: int, up_s: float) -> "FailureRate":
        """The posterior after that many failures in that much running time."""
        return FailureRate(self.failures + failures, self.time_s + up_s)

    @property
    def mtbf_s(self) -> float:
        """The reciprocal of the mean rate."""
        return self.time_s / self.failures


def best_work_s(cost_s: float, mtbf_s: float) -> float:
    """The work time between two checkpoints that loses least, exactly. ValueError: not positive."""
    if cost_s <= 0 or mtbf_s <= 0:
        raise ValueError(f"a cost of {cost_s} s and a mean time of {mtbf_s} s have no optimum")
    return mtbf_s * _one_plus_w(cost_s / mtbf_s)


def wall_time_ratio(work_s: float, cost_s: float, mtbf_s: float) -> float:
    """Wall time with failures and a checkpoint after each `work_s`, relative to none of both.

    Restarting is free here: it does not change which interval is best.
    """
    return mtbf_s * math.expm1((work_s + cost_s) / mtbf_s) / work_s


def _one_plus_w(ratio: float) -> float:
    """The u = 1 + W0(-e^(-1 - ratio)), which solves u + log(1 - u) = -ratio."""
    if ratio > _LARGE:
        return 1 - math.exp(-1 - ratio)
    p = math.sqrt(-2 * math.expm1(-ratio))
    # Around the branch point; DLMF 4.13.6 gives it for W.
    u = p - p * p / 3 + 11 * p**3 / 72 - 43 * p**4 / 540 + 769 * p**5 / 17280
    if u < _SMALL:
        return u
    if ratio > _NEAR:
        # Above the root: from there Newton's iteration descends and never exceeds 1.
        u = 1 - math.exp(-1 - ratio)
    for _ in range(_STEPS):
        # The derivative of u + log(1 - u) is -u / (1 - u).
        u += (u + math.log1p(-u) + ratio) * (1 - u) / u
    return u
