"""Metric families of prometheus-client, filled from plain values. Pure."""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from prometheus_client import Metric, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)


class KnownMetrics(NamedTuple):
    """The interface that an exposition expects: those of `families` that have samples."""

    families: Callable[[], Iterable[Metric]]

    def collect(self) -> Iterable[Metric]:
        """The current samples."""
        return [family for family in self.families() if family.samples]


def add(
    family: GaugeMetricFamily | CounterMetricFamily, labels: Sequence[str], value: float | None
) -> None:
    """Add a sample, its labels in the family's order; ignores None (unknown)."""
    if value is not None:
        family.add_metric([_encodable(label) for label in labels], value)


def observe(
    family: HistogramMetricFamily,
    labels: Sequence[str],
    values: Sequence[float],
    bounds: Sequence[float],
) -> None:
    """Add the histogram of `values`; `bounds` ascend."""
    counts = [(f"{bound:g}", float(sum(value <= bound for value in values))) for bound in bounds]
    buckets = [*counts, ("+Inf", float(len(values)))]
    family.add_metric([_encodable(label) for label in labels], buckets, sum(values))


def render(families: Iterable[Metric]) -> str:
    """The families in Prometheus' text format, in the given order."""
    return generate_latest(KnownMetrics(lambda: families)).decode()


def _encodable(label: str) -> str:
    """Replace half surrogate pairs: a label without UTF-8 would fail the whole scrape."""
    return label.encode(errors="replace").decode()
