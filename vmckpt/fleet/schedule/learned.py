"""What a schedule has learned: the cost of checkpoints, and how often its VM fails. Pure.

Observed run time counts: the time between two samples of one QEMU, alive in both. A failure is a
QEMU that was alive in one sample and has ended in the next with the guest running: not powered off,
stopped, moved or removed; half of the time between counts. Anything else between two samples is
ignored.
"""

from dataclasses import dataclass, replace

from vmckpt.fleet.schedule.due import ClockReading
from vmckpt.forecast.model.interval import FailureRate, best_work_s

# The weight of one checkpoint's cost in the mean does not fall below one in this many.
MOST_COSTS = 200
# The remembered maximum duration decays by this much with each faster checkpoint.
TOOK_FADES = 0.05
# The least interval, in multiples of the time that recent checkpoints took.
LEAST_TIMES_TOOK = 2.0
# Before anything is known.
DEFAULT_MTBF_S = 30 * 86400.0


@dataclass(frozen=True, slots=True)
class VmSample:
    """One sample of a VM: its QEMU, and whether that was alive or had ended while running."""

    at: ClockReading
    qemu: str
    alive: bool
    ended_running: bool = False


@dataclass(frozen=True, slots=True)
class CheckpointCost:
    """The cost of checkpoints: the pause of the guest, and the time until one is safe.

    Of several: a mean of the pause, weighted to recent ones; nearly the maximum of the time.
    """

    stall_s: float
    took_s: float


@dataclass(frozen=True, slots=True)
class LearnedCosts:
    """All learned costs."""

    up_s: float = 0.0
    failures: int = 0
    last: VmSample | None = None
    cost: CheckpointCost | None = None
    checkpoints: int = 0

    def seen(self, now: VmSample) -> "LearnedCosts":
        """With one more sample."""
        before = self.last
        if before is None or not before.alive or before.qemu != now.qemu:
            return replace(self, last=now)
        since_s = now.at.since(before.at)
        if now.alive:
            return replace(self, last=now, up_s=self.up_s + since_s)
        if now.ended_running:
            up_s = self.up_s + since_s / 2
            return replace(self, last=now, up_s=up_s, failures=self.failures + 1)
        return replace(self, last=now)

    def paid(self, cost: CheckpointCost) -> "LearnedCosts":
        """With the cost of one more checkpoint."""
        count, before = self.checkpoints + 1, self.cost or cost
        stall_s = before.stall_s + (cost.stall_s - before.stall_s) / min(count, MOST_COSTS)
        took_s = max(cost.took_s, before.took_s + (cost.took_s - before.took_s) * TOOK_FADES)
        return replace(self, cost=CheckpointCost(stall_s, took_s), checkpoints=count)

    def rate(self, assumed_mtbf_s: float) -> FailureRate:
        """The VM's failure rate, from the assumed and the observed one."""
        return FailureRate.prior(assumed_mtbf_s).observed(self.failures, self.up_s)


@dataclass(frozen=True, slots=True)
class Interval:
    """The interval, and what decided it; `mtbf_s` and `cost_s` are the rule's input."""

    every_s: float
    by: str
    cost_s: float
    mtbf_s: float


def interval(learned: LearnedCosts, mtbf_s: float | None, rpo_s: float | None) -> Interval | None:
    """The interval between checkpoints by the exact rule, within possible limits.

    A checkpoint that is lost with its VM leaves the state of the one before. So to meet `rpo_s`,
    the interval plus the time until a checkpoint is safe must not exceed it. None: the cost of a
    checkpoint is unknown until one was taken.
    """
    if learned.cost is None:
        return None
    cost_s, took_s = max(learned.cost.stall_s, 1e-6), learned.cost.took_s
    mean_s = learned.rate(mtbf_s or DEFAULT_MTBF_S).mtbf_s
    every_s, by = best_work_s(cost_s, mean_s) + cost_s, "what it costs and how often the VM fails"
    if rpo_s is not None and every_s > rpo_s - took_s:
        every_s, by = rpo_s - took_s, "--rpo"
    if every_s < (least_s := max(LEAST_TIMES_TOOK * took_s, 1.0)):
        every_s, by = least_s, "how long one takes"
        if rpo_s is not None and least_s > rpo_s - took_s:
            by = "how long one takes: --rpo cannot be kept"
    return Interval(every_s, by, cost_s, mean_s)
