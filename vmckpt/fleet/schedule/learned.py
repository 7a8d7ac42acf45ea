"""What a schedule has learned: what its checkpoints cost, and how often its VM fails. Pure.

Time counts in which the VM was seen to run: two looks at one QEMU, both alive, and all the time
between them. A failure is a QEMU that was alive at one look and at the next has ended with the
guest running: not powered off, stopped, moved or removed; half of the time between counts. Whatever
else came between two looks counts neither way.
"""

from dataclasses import dataclass, replace

from vmckpt.fleet.schedule.due import ClockReading
from vmckpt.forecast.model.interval import FailureRate, best_work_s

# What one checkpoint costs counts for this much of the mean, once there were so many.
MOST_COSTS = 200
# How long one may take is forgotten by this much with each that takes less.
TOOK_FADES = 0.05
# A checkpoint is not begun before twice the time has passed that the last ones took.
LEAST_TIMES_TOOK = 2.0
# Before anything is known.
DEFAULT_MTBF_S = 30 * 86400.0


@dataclass(frozen=True, slots=True)
class VmSample:
    """One look at a VM: which QEMU it has, and whether that was alive or had ended running."""

    at: ClockReading
    qemu: str
    alive: bool
    ended_running: bool = False


@dataclass(frozen=True, slots=True)
class CheckpointCost:
    """Cost of checkpoints: the pause of the guest, and the time until one is safe.

    Of several: a weighted mean of the former, recent ones more; nearly the maximum of the latter.
    """

    stall_s: float
    took_s: float


@dataclass(frozen=True, slots=True)
class LearnedCosts:
    """All of it."""

    up_s: float = 0.0
    failures: int = 0
    last: VmSample | None = None
    cost: CheckpointCost | None = None
    checkpoints: int = 0

    def seen(self, now: VmSample) -> "LearnedCosts":
        """After one more look."""
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
        """After one more checkpoint."""
        count, before = self.checkpoints + 1, self.cost or cost
        stall_s = before.stall_s + (cost.stall_s - before.stall_s) / min(count, MOST_COSTS)
        took_s = max(cost.took_s, before.took_s + (cost.took_s - before.took_s) * TOOK_FADES)
        return replace(self, cost=CheckpointCost(stall_s, took_s), checkpoints=count)

    def rate(self, assumed_mtbf_s: float) -> FailureRate:
        """How often the VM fails, by what was assumed and what was seen."""
        return FailureRate.prior(assumed_mtbf_s).observed(self.failures, self.up_s)


@dataclass(frozen=True, slots=True)
class Interval:
    """How often, and what decided it; `mtbf_s` and `cost_s` are what the rule was given."""

    every_s: float
    by: str
    cost_s: float
    mtbf_s: float


def interval(learned: LearnedCosts, mtbf_s: float | None, rpo_s: float | None) -> Interval | None:
    """The exact rule's interval from one checkpoint to the next, held within what is possible.

    A checkpoint that is lost with its VM leaves the state of the one before: to keep to `rpo_s` the
    interval and the time until a checkpoint is safe come to no more. None: nothing is known of what
    a checkpoint costs, until one was taken.
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
