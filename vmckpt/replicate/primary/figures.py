"""The figures of a replication: counts, and the pauses of the last few seconds."""

import time
from collections import deque
from dataclasses import dataclass, field, replace

from vmckpt.epoch.epoch import Epoch
from vmckpt.replicate.status import ReplicaStatus

WINDOW = 512


@dataclass(slots=True)
class PrimaryFigures:
    """Kept by the primary; times on the monotonic clock.

    `acknowledged`: the last epoch that the standby has reported as complete, at
    `acknowledged_s`; `safe_until_s`: when that epoch's pause began.
    """

    epochs: int = 0
    pages: int = 0
    raw_bytes: int = 0
    acknowledged: int = 0
    acknowledged_s: float = 0.0
    safe_until_s: float | None = None
    slowed_share: float = 0.0
    _ends_s: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _pauses_s: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _held_s: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _output_s: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def taken(self, epoch: Epoch) -> None:
        """An epoch has been captured."""
        self.epochs += 1
        self.pages += epoch.pages.count + epoch.early_pages
        self.raw_bytes += len(epoch.pages.data) + len(epoch.device_state)
        self._ends_s.append(time.monotonic())
        self._pauses_s.append(epoch.pause.total_s)
        self._pauses_s.extend(epoch.early_pauses_s)

    def slowed(self, share: float) -> None:
        """The share of the last epoch's time for which the guest was stopped to slow it."""
        self.slowed_share += 0.3 * (share - self.slowed_share)

    def safe(self, number: int, captured_s: float) -> None:
        """The standby has epoch `number`, whose pause began at `captured_s`."""
        now_s = time.monotonic()
        self.acknowledged, self.acknowledged_s = number, now_s
        self._held_s.append(now_s - captured_s)
        if self.safe_until_s is not None:
            # Output waits for the epoch's end, on average half of it, and then until it is safe.
            self._output_s.append(now_s - (self.safe_until_s + captured_s) / 2)
        self.safe_until_s = captured_s

    def added_to(self, status: ReplicaStatus) -> ReplicaStatus:
        """The status with these figures."""
        now_s = time.monotonic()
        pauses = sorted(self._pauses_s)
        spread_s = self._ends_s[-1] - self._ends_s[0] if len(self._ends_s) > 1 else 0.0
        held, output = sorted(self._held_s), sorted(self._output_s)
        safe_until_s = self.safe_until_s
        return replace(
            status,
            epochs=self.epochs,
            epochs_per_s=round((len(self._ends_s) - 1) / spread_s, 1) if spread_s else 0.0,
            pause_p50_ms=_ms(pauses, 0.50),
            pause_p99_ms=_ms(pauses, 0.99),
            pause_worst_ms=_ms(pauses, 1.0),
            safe_after_p50_ms=_ms(held, 0.50),
            output_latency_p50_ms=_ms(output, 0.50),
            output_latency_p99_ms=_ms(output, 0.99),
            slowed_percent=round(100 * self.slowed_share),
            dirty_pages=self.pages,
            raw_bytes=self.raw_bytes,
            acknowledged_epoch=self.acknowledged,
            lag_ms=round((now_s - self.acknowledged_s) * 1e3, 1) if self.acknowledged else None,
            rpo_now_ms=None if safe_until_s is None else round((now_s - safe_until_s) * 1e3, 1),
        )


def _ms(ascending: list[float], part: float) -> float | None:
    if not ascending:
        return None
    return round(ascending[min(len(ascending) - 1, int(part * len(ascending)))] * 1e3, 2)
