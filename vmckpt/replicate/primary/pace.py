"""How long the guest runs between two epochs. Pure."""

SHORTEST_S, LONGEST_S = 0.025, 1.0
# With an adaptive interval, the maximum share of the guest's time for pauses.
PAUSED_SHARE = 0.10
_WEIGHT = 0.2


class EpochPace:
    """`fixed_s` if one was requested; else as short as the pauses allow."""

    def __init__(self, fixed_s: float | None) -> None:
        self._fixed_s = fixed_s
        self._pause_s = SHORTEST_S * PAUSED_SHARE

    def paused(self, pause_s: float) -> None:
        """Note the last epoch's pause."""
        self._pause_s += _WEIGHT * (pause_s - self._pause_s)

    @property
    def run_s(self) -> float:
        """How long to let the guest run before the next pause."""
        if self._fixed_s is not None:
            return self._fixed_s
        wanted_s = self._pause_s * (1 - PAUSED_SHARE) / PAUSED_SHARE
        return min(LONGEST_S, max(SHORTEST_S, wanted_s))
