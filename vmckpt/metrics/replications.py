"""Metrics of replications, from `vmckpt replicate status --json`. Pure."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from vmckpt.metrics.families import add
from vmckpt.replicate.operator.sides import ReplicaSide, latest
from vmckpt.replicate.status import PROTECTED, ReplicaStatus


class _ReplicationFamily(NamedTuple):
    """A family, and its value in a primary's status; None: unknown."""

    name: str
    kind: type[GaugeMetricFamily | CounterMetricFamily]
    help: str
    of: Callable[[ReplicaStatus], float | None]


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def _ratio(percent: float | None) -> float | None:
    return None if percent is None else percent / 100


def _sum(*parts: float | None) -> float | None:
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def _rpo_s(status: ReplicaStatus) -> float | None:
    """As the status says; otherwise the last safe epoch's lag, plus the median time until safe."""
    seconds = _seconds(status.rpo_now_ms)
    lag_s = _sum(_seconds(status.lag_ms), _seconds(status.safe_after_p50_ms))
    return seconds if seconds is not None else lag_s


def _held_s(status: ReplicaStatus) -> float | None:
    """As the status says; otherwise half an epoch, plus the median time until it is safe."""
    if not status.output_commit:
        return 0.0
    seconds, epoch_s = _seconds(status.output_latency_p50_ms), _seconds(status.epoch_ms)
    half_s = None if epoch_s is None else epoch_s / 2
    return seconds if seconds is not None else _sum(half_s, _seconds(status.safe_after_p50_ms))


_PREFIX = "vmckpt_replication_"
_SIDE = ("vm", "role", "host")
_PRIMARY = ("vm", "host")
_FIGURES = (
    _ReplicationFamily(
        "epochs_total", CounterMetricFamily, "Epochs taken.", lambda status: status.epochs
    ),
    _ReplicationFamily(
        "epochs_per_second",
        GaugeMetricFamily,
        "Epochs taken a second.",
        lambda status: status.epochs_per_s,
    ),
    _ReplicationFamily(
        "sent_bytes_total",
        CounterMetricFamily,
        "Bytes sent to the standby.",
        lambda status: status.sent_bytes,
    ),
    _ReplicationFamily(
        "raw_bytes_total",
        CounterMetricFamily,
        "Bytes dirtied, in whole pages.",
        lambda status: status.raw_bytes,
    ),
    _ReplicationFamily(
        "dirty_pages_total",
        CounterMetricFamily,
        "Pages that were dirtied.",
        lambda status: status.dirty_pages,
    ),
    _ReplicationFamily(
        "lag_seconds",
        GaugeMetricFamily,
        "How long ago the last epoch was acknowledged.",
        lambda status: _seconds(status.lag_ms),
    ),
    _ReplicationFamily(
        "rpo_seconds",
        GaugeMetricFamily,
        "Age of the state from which the standby would continue.",
        _rpo_s,
    ),
    _ReplicationFamily(
        "output_latency_seconds",
        GaugeMetricFamily,
        "How long output of the guest is held, on average.",
        _held_s,
    ),
    _ReplicationFamily(
        "slowed_ratio",
        GaugeMetricFamily,
        "Fraction of time for which the guest is stopped so that the link can follow.",
        lambda status: _ratio(status.slowed_percent),
    ),
    _ReplicationFamily(
        "term",
        GaugeMetricFamily,
        "The primary's term with the arbiter.",
        lambda status: status.term,
    ),
)


def replications(sides: Iterable[ReplicaSide]) -> list[Metric]:
    """The metrics of all replications, from both sides of each."""
    up = GaugeMetricFamily(
        _PREFIX + "up",
        "Whether the service of this side answers (1) or not (0).",
        labels=_SIDE,
    )
    protected = GaugeMetricFamily(
        _PREFIX + "protected", "Whether a standby could take over the VM (1).", labels=_PRIMARY
    )
    pause = GaugeMetricFamily(
        _PREFIX + "pause_seconds",
        "Pauses of the guest for epochs, of about the last 512.",
        labels=(*_PRIMARY, "quantile"),
    )
    path_up = GaugeMetricFamily(
        _PREFIX + "path_up",
        "Whether the other side is heard over this path, and hears.",
        labels=(*_SIDE, "path"),
    )
    families = [f.kind(_PREFIX + f.name, f.help, labels=_PRIMARY) for f in _FIGURES]
    known = list(sides)
    for side in latest(known).values():
        is_safe = side.answers and side.status.state == PROTECTED
        add(protected, (side.status.vm or "?", side.host.name), is_safe)
    for side in known:
        status, host = side.status, side.host.name
        vm = status.vm or "?"
        add(up, (vm, status.role, host), side.answers)
        for path, how in (status.paths or {}).items():
            if side.answers and how != "none":
                add(path_up, (vm, status.role, host, path), how == "heard")
        if not (status.is_primary and side.answers):
            continue
        quantiles = {
            "0.5": status.pause_p50_ms,
            "0.99": status.pause_p99_ms,
            "1": status.pause_worst_ms,
        }
        for quantile, pause_ms in quantiles.items():
            add(pause, (vm, host, quantile), _seconds(pause_ms))
        for family, figure in zip(families, _FIGURES, strict=True):
            add(family, (vm, host), figure.of(status))
    return [up, protected, path_up, pause, *families]
