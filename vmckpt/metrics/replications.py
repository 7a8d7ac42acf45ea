"""Replications, as `vmckpt replicate status --json` has them, as metrics. Pure."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from vmckpt.metrics.exposition import Family, Kind

Status = Mapping[str, Any]


class _Figure(NamedTuple):
    """One family, and what it is of a primary's status; None: not known."""

    name: str
    kind: Kind
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
_FIGURES = (
    _Figure("epochs_total", Kind.COUNTER, "Epochs taken.", _plain("epochs")),
    _Figure("epochs_per_second", Kind.GAUGE, "Epochs taken a second.", _plain("epochs_per_s")),
    _Figure("sent_bytes_total", Kind.COUNTER, "What went to the standby.", _plain("sent_bytes")),
    _Figure("raw_bytes_total", Kind.COUNTER, "What was dirtied, whole pages.", _plain("raw_bytes")),
    _Figure("dirty_pages_total", Kind.COUNTER, "Pages that were dirtied.", _plain("dirty_pages")),
    _Figure(
        "lag_seconds", Kind.GAUGE, "How long ago the last epoch came to be safe.", _seconds("lag")
    ),
    _Figure(
        "rpo_seconds",
        Kind.GAUGE,
        "How old the state is that the standby would go on from now.",
        _rpo_s,
    ),
    _Figure(
        "output_latency_seconds",
        Kind.GAUGE,
        "How long what the guest sends is held back, on average.",
        _held_s,
    ),
    _Figure(
        "slowed_ratio",
        Kind.GAUGE,
        "For which part of its time the guest is stopped, so that the link can follow.",
        _share("slowed"),
    ),
    _Figure("term", Kind.GAUGE, "The primary's term with the arbiter.", _plain("term")),
)
_QUANTILES = {"0.5": "pause_p50", "0.99": "pause_p99", "1": "pause_worst"}


def replications(sides: Iterable[Status]) -> list[Family]:
    """All that are known; `sides` are statuses with `host` and `answers`, as `status` has them."""
    up = Family(
        _PREFIX + "up", Kind.GAUGE, "Whether the service of this side answers (1) or not (0)."
    )
    protected = Family(
        _PREFIX + "protected", Kind.GAUGE, "Whether a standby could go on with the VM (1)."
    )
    pause = Family(
        _PREFIX + "pause_seconds",
        Kind.GAUGE,
        "How long the guest stood still for an epoch, of the last 512 or so.",
    )
    path_up = Family(
        _PREFIX + "path_up",
        Kind.GAUGE,
        "Whether the other side is heard over this path, and hears.",
    )
    families = [Family(_PREFIX + f.name, f.kind, f.help) for f in _FIGURES]
    for status in sides:
        vm, role = str(status.get("vm") or "?"), str(status["role"])
        up.add(status["answers"], vm=vm, role=role, host=str(status["host"]))
        for path, how in (status.get("paths") or {}).items():
            if status["answers"] and how != "none":
                path_up.add(how == "heard", vm=vm, role=role, host=str(status["host"]), path=path)
        if role != "primary":
            continue
        labels = {"vm": vm, "host": str(status["host"])}
        protected.add(status["answers"] and status["state"] == "protected", **labels)
        if not status["answers"]:
            continue
        for quantile, key in _QUANTILES.items():
            pause.add(_seconds(key)(status), **labels, quantile=quantile)
        for family, figure in zip(families, _FIGURES, strict=True):
            family.add(figure.of(status), **labels)
    return [up, protected, path_up, pause, *families]
