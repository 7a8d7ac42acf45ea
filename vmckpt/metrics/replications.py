"""Replications, as `vmckpt replicate status --json` has them, as metrics. Pure."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from vmckpt.metrics.families import add

Status = Mapping[str, Any]


class _ReplicationFamily(NamedTuple):
    """One family, and what it is of a primary's status; None: not known."""

    name: str
    kind: type[GaugeMetricFamily | CounterMetricFamily]
    help: str
    of: Callable[[Status], float | None]


def _seconds(key: str) -> Callable[[Status], float | None]:
    def of(status: Status) -> float | None:
        value = status.get(f"{key}_ms")
        return None if value is None else value / 1e3

    return of


def _plain(key: str) -> Callable[[Status], float | None]:
    return lambda status: status.get(key)


def _share(key: str) -> Callable[[Status], float | None]:
    def of(status: Status) -> float | None:
        value = status.get(f"{key}_percent")
        return None if value is None else value / 100

    return of


def _sum(*parts: float | None) -> float | None:
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def _rpo_s(status: Status) -> float | None:
    """As it says itself; else the last epoch came to be safe so long ago, and was taken before."""
    told = _seconds("rpo_now")(status)
    return (
        told
        if told is not None
        else _sum(_seconds("lag")(status), _seconds("safe_after_p50")(status))
    )


def _held_s(status: Status) -> float | None:
    """As it says itself; else half the time between two epochs' ends, and then for the epoch."""
    if not status.get("output_commit"):
        return 0.0
    told = _seconds("output_latency_p50")(status)
    if told is not None:
        return told
    epoch_s = _seconds("epoch")(status)
    return _sum(None if epoch_s is None else epoch_s / 2, _seconds("safe_after_p50")(status))


_PREFIX = "vmckpt_replication_"
_SIDE = ("vm", "role", "host")
_PRIMARY = ("vm", "host")
_FIGURES = (
    _ReplicationFamily("epochs_total", CounterMetricFamily, "Epochs taken.", _plain("epochs")),
    _ReplicationFamily(
        "epochs_per_second", GaugeMetricFamily, "Epochs taken a second.", _plain("epochs_per_s")
    ),
    _ReplicationFamily(
        "sent_bytes_total", CounterMetricFamily, "What went to the standby.", _plain("sent_bytes")
    ),
    _ReplicationFamily(
        "raw_bytes_total",
        CounterMetricFamily,
        "What was dirtied, whole pages.",
        _plain("raw_bytes"),
    ),
    _ReplicationFamily(
        "dirty_pages_total", CounterMetricFamily, "Pages that were dirtied.", _plain("dirty_pages")
    ),
    _ReplicationFamily(
        "lag_seconds",
        GaugeMetricFamily,
        "How long ago the last epoch came to be safe.",
        _seconds("lag"),
    ),
    _ReplicationFamily(
        "rpo_seconds",
        GaugeMetricFamily,
        "How old the state is that the standby would go on from now.",
        _rpo_s,
    ),
    _ReplicationFamily(
        "output_latency_seconds",
        GaugeMetricFamily,
        "How long what the guest sends is held back, on average.",
        _held_s,
    ),
    _ReplicationFamily(
        "slowed_ratio",
        GaugeMetricFamily,
        "For which part of its time the guest is stopped, so that the link can follow.",
        _share("slowed"),
    ),
    _ReplicationFamily(
        "term", GaugeMetricFamily, "The primary's term with the arbiter.", _plain("term")
    ),
)
_QUANTILES = {"0.5": "pause_p50", "0.99": "pause_p99", "1": "pause_worst"}


def replications(sides: Iterable[Status]) -> list[Metric]:
    """All that are known; `sides` are statuses with `host` and `answers`, as `status` has them."""
    up = GaugeMetricFamily(
        _PREFIX + "up",
        "Whether the service of this side answers (1) or not (0).",
        labels=_SIDE,
    )
    protected = GaugeMetricFamily(
        _PREFIX + "protected", "Whether a standby could go on with the VM (1).", labels=_PRIMARY
    )
    pause = GaugeMetricFamily(
        _PREFIX + "pause_seconds",
        "How long the guest stood still for an epoch, of the last 512 or so.",
        labels=(*_PRIMARY, "quantile"),
    )
    path_up = GaugeMetricFamily(
        _PREFIX + "path_up",
        "Whether the other side is heard over this path, and hears.",
        labels=(*_SIDE, "path"),
    )
    families = [f.kind(_PREFIX + f.name, f.help, labels=_PRIMARY) for f in _FIGURES]
    for status in sides:
        vm, role, host = str(status.get("vm") or "?"), str(status["role"]), str(status["host"])
        add(up, (vm, role, host), status["answers"])
        for path, how in (status.get("paths") or {}).items():
            if status["answers"] and how != "none":
                add(path_up, (vm, role, host, path), how == "heard")
        if role != "primary":
            continue
        add(protected, (vm, host), status["answers"] and status["state"] == "protected")
        if not status["answers"]:
            continue
        for quantile, key in _QUANTILES.items():
            add(pause, (vm, host, quantile), _seconds(key)(status))
        for family, figure in zip(families, _FIGURES, strict=True):
            add(family, (vm, host), figure.of(status))
    return [up, protected, path_up, pause, *families]
