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
ALL = tuple(WAYS)
# The row of a run whose way the planner chose, by the cell's intent.
INTENT = "intent"


class Cell(NamedTuple):
    """One workload, and the ways it goes. `judged` cells are held out from teaching, whole.

    `intent`: wishes with which the planner shall choose the way of one more run.
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
    def look(self) -> str:
        """For how long its guest is measured: what comes and goes wants to be seen to do so."""
        return "8s" if "bursty" in self.load or "phases" in self.load else "5s"

    @property
    def runs(self) -> tuple[str, ...]:
        """Its ways, and the one by intent."""
        return (*self.ways, INTENT) if self.intent else self.ways


def _load(rate: str, size: str, pattern: str, content: str) -> str:
    return f"rate={rate} set={size} pattern={pattern} content={content}"


def _pause(most: str, within: str) -> tuple[str, ...]:
    return ("--max-pause", most, "--finish-within", within)


SOME = ("precopy", "multifd", "zstd", "postcopy")
TEACHING = (
    Cell("256M", "", None, judged=False, ways=SOME),
    Cell("512M", _load("20M", "128M", "uniform", "random"), None, judged=False,
         ways=("precopy", "zstd", "postcopy")),
    Cell("1G", _load("80M", "256M", "uniform", "random"), None, judged=False,
         ways=("precopy", "multifd", "zstd")),
    Cell("1G", _load("40M", "192M", "sequential", "text"), "200MB", judged=False,
         ways=("precopy", "multifd", "postcopy")),
)  # fmt: skip
JUDGED = (
    Cell("512M", _load("15M", "192M", "zipf", "random"), "200MB", judged=True,
         intent=_pause("500ms", "20s")),
    Cell("512M", _load("20M", "48M", "bursty", "random"), "80MB", judged=True,
         intent=_pause("200ms", "30s")),
    Cell("1G", _load("40M", "384M", "zipf", "zero"), "500MB", judged=True),
    Cell("512M", _load("30M", "160M", "phases", "text"), "150MB", judged=True),
    Cell("1G", _load("60M", "10M", "uniform", "random"), "100MB", judged=True),
    Cell("512M", _load("60M", "320M", "sequential", "random"), "250MB", judged=True),
    Cell("256M", _load("100M", "128M", "uniform", "random"), "60MB", judged=True,
         ways=("precopy", "zstd", "hybrid", "postcopy")),
    Cell("2G", _load("30M", "512M", "sequential", "text"), "300MB", judged=True,
         ways=("precopy", "multifd", "zstd", "hybrid", "postcopy")),
    Cell("512M", _load("10M", "192M", "zipf", "text"), "120MB", judged=True),
    Cell("768M", "", "400MB", judged=True, ways=("precopy", "multifd", "hybrid", "postcopy")),
    Cell("256M", _load("10M", "192M", "uniform", "text"), "150MB", judged=True),
    Cell("256M", _load("4M", "3M", "uniform", "random"), "20MB", judged=True, ways=SOME),
)  # fmt: skip
CELLS = (*TEACHING, *JUDGED)
