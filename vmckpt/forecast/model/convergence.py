"""Whether a pre-copy will converge, judged by what each round had left to send."""

from collections.abc import Sequence
from dataclasses import dataclass, field

# KubeVirt's figure: a round that leaves 96 % of the best earlier one has made no progress.
NO_GAIN = 0.96
PATIENCE_ROUNDS = 2


@dataclass(slots=True)
class Rounds:
    """What each round of a pre-copy had left to send at its start, oldest first.

    Rounds that begin while the switchover is held back do not count: they do not show whether the
    pre-copy would end.
    """

    left_bytes: list[int] = field(default_factory=list)
    _held: int = 0

    def see(self, number: int, left_bytes: int, *, held: bool = False) -> bool:
        """Whether round `number` (the first is 1) is new; only its first observation counts."""
        new = number > len(self.left_bytes)
        while len(self.left_bytes) < number:
            self.left_bytes.append(left_bytes)
        if held:
            self._held = len(self.left_bytes)
        return new

    @property
    def counting(self) -> Sequence[int]:
        """The rounds that count, preceded by one that does not: the first, or the last held one."""
        return self.left_bytes[max(self._held - 1, 0) :]


@dataclass(slots=True)
class Passes:
    """The duration of a pre-copy, in multiples of the time that sending all of memory once took."""

    _began_s: float | None = None
    _pass_s: float | None = None

    def see(self, round_number: int, at_s: float) -> None:
        """Note the current round (the first is 1)."""
        if self._began_s is None:
            if round_number > 0:
                self._began_s = at_s
        elif self._pass_s is None and round_number > 1:
            self._pass_s = at_s - self._began_s

    def gone(self, at_s: float) -> float | None:
        """The current multiple; None until all of memory was sent once."""
        if self._began_s is None or not self._pass_s:
            return None
        return (at_s - self._began_s) / self._pass_s


def has_stalled(round_bytes: Sequence[int]) -> bool:
    """Whether the last rounds of a pre-copy made no progress over the best before them.

    `round_bytes`: what remained to be sent at the start of each round, oldest first. The first
    round (all of RAM) says nothing about dirtying and is never the best.
    """
    later = round_bytes[1:]
    if len(later) <= PATIENCE_ROUNDS:
        return False
    best = min(later[:-PATIENCE_ROUNDS])
    return all(left >= NO_GAIN * best for left in later[-PATIENCE_ROUNDS:])


def eta_s(
    remaining_bytes: int, throughput_bytes_per_s: float, dirty_rate_bytes_per_s: float
) -> float | None:
    """Seconds until a pre-copy has caught up with the guest; None if it never will at this rate."""
    gain_bytes_per_s = throughput_bytes_per_s - dirty_rate_bytes_per_s
    if gain_bytes_per_s <= 0:
        return None
    return remaining_bytes / gain_bytes_per_s
