"""What benchmarks/forecast tries: workloads, and the ways that each of them goes."""

from typing import NamedTuple

from vmckpt.units import parse_size_bytes

WAYS = {
    "precopy": ("--method", "precopy"),
    "auto-converge": ("--method", "precopy", "--auto-converge"),
    "multifd": ("--method", "precopy", "--parallel", "2"),
    "zstd": ("--method", "precopy", "--compress", "zstd"),
    "hybrid": ("--method", "hybrid"),
    "postcopy": ("--method", "postcopy"),
}
ALL, FEW = tuple(WAYS), ("precopy", "hybrid", "postcopy")
# For what dirties faster than its limit: nothing else ends.
WITHOUT_END = ("hybrid", "postcopy")
# The row of a run whose way the planner chose, by the cell's intent.
INTENT = "intent"


class Cell(NamedTuple):
    """One workload, and the ways it goes. `judged` cells are held out from teaching, whole.

    `intent`: constraints with which the planner shall choose the way of one more run.
    """

    memory: str
    load: str
    bandwidth: str | None
    judged: bool
    ways: tuple[str, ...] = ALL
    intent: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """As rows call it."""
        return f"{self.memory} {self.load or 'idle'} {self.bandwidth or 'unlimited'}"

    @property
    def memory_bytes(self) -> int:
        """Of its guest."""
        return parse_size_bytes(self.memory)

    @property
    def runs(self) -> tuple[str, ...]:
        """Its ways, and the one by intent."""
        return (*self.ways, INTENT) if self.intent else self.ways


def _load(rate: str, size: str, pattern: str, content: str) -> str:
    return f"rate={rate} set={size} pattern={pattern} content={content}"


def _pause(most: str, within: str) -> tuple[str, ...]:
    return ("--max-downtime", most, "--finish-within", within)


TEACHING = (
    Cell("256M", "", None, judged=False),
    Cell("512M", _load("20M", "128M", "uniform", "random"), None, judged=False),
    Cell("512M", _load("20M", "128M", "uniform", "random"), "60MB", judged=False),
    Cell("1G", _load("40M", "256M", "sequential", "text"), "200MB", judged=False),
    Cell("512M", _load("40M", "64M", "bursty", "random"), "100MB", judged=False, ways=FEW),
    Cell("1G", _load("80M", "512M", "uniform", "random"), None, judged=False),
    # Mostly holes, and what is none compresses: what each costs.
    Cell("1G", _load("30M", "96M", "uniform", "text"), None, judged=False),
    # Much is missing at the switch: how long a guest waits then.
    Cell("1G", _load("90M", "384M", "uniform", "random"), "80MB", judged=False, ways=WITHOUT_END),
)
JUDGED = (
    Cell("512M", _load("10M", "256M", "zipf", "random"), None, judged=True,
         intent=_pause("500ms", "20s")),
    Cell("1G", _load("100M", "512M", "uniform", "random"), "60MB", judged=True,
         intent=_pause("400ms", "60s")),
    Cell("512M", _load("30M", "64M", "bursty", "random"), "60MB", judged=True,
         intent=_pause("200ms", "30s")),
    Cell("512M", _load("20M", "128M", "phases", "text"), "100MB", judged=True,
         intent=_pause("300ms", "20s")),
    Cell("2G", _load("20M", "1G", "sequential", "text"), "200MB", judged=True,
         intent=_pause("1s", "30s")),
    Cell("1G", _load("50M", "512M", "zipf", "zero"), "500MB", judged=True,
         intent=_pause("150ms", "20s")),
    Cell("1G", _load("80M", "16M", "uniform", "random"), "60MB", judged=True,
         intent=_pause("250ms", "30s")),
    Cell("256M", _load("5M", "2M", "uniform", "random"), "20MB", judged=True,
         intent=_pause("100ms", "15s")),
    Cell("512M", _load("10M", "256M", "zipf", "text"), "100MB", judged=True,
         intent=_pause("400ms", "10s")),
    Cell("512M", "", "300MB", judged=True, ways=FEW),
    Cell("512M", _load("60M", "384M", "sequential", "random"), None, judged=True,
         intent=_pause("1s", "10s")),
)  # fmt: skip
CELLS = (*TEACHING, *JUDGED)
