"""Metrics of hosts, VMs and these VMs' last measured dirty rates. Pure."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily

from vmckpt.forecast.measure.dirty_rate import DirtyRate
from vmckpt.metrics.families import add

_LABELS = ("vm", "host")
_FACTS = ("driver", "machine", "accel")
_MEASURED = ("vm", "source")


class Measured(NamedTuple):
    """The last measurement of a VM's dirty rate, and when it ended."""

    vm: str
    at_unix_s: float
    rate: DirtyRate


def hosts(answers: Mapping[str, bool]) -> list[Metric]:
    """Which hosts of the inventory answered."""
    up = GaugeMetricFamily(
        "vmckpt_host_up", "Whether the host answered (1) or not (0).", labels=("host",)
    )
    for name, answered in sorted(answers.items()):
        add(up, (name,), answered)
    return [up]


def vms(facts: Iterable[Mapping[str, Any]]) -> list[Metric]:
    """Every VM, from `vm list --json`."""
    info = GaugeMetricFamily(
        "vmckpt_vm_info",
        "1 for every VM; its labels describe it.",
        labels=(*_LABELS, *_FACTS),
    )
    running = GaugeMetricFamily(
        "vmckpt_vm_running", "Whether the VM runs (1) or not (0).", labels=_LABELS
    )
    busy = GaugeMetricFamily(
        "vmckpt_vm_busy", "Whether an operation holds the VM (1) or not (0).", labels=_LABELS
    )
    memory = GaugeMetricFamily(
        "vmckpt_vm_memory_bytes", "Memory that the guest has.", labels=_LABELS
    )
    vcpus = GaugeMetricFamily("vmckpt_vm_vcpus", "Processors that the guest has.", labels=_LABELS)
    for one in facts:
        labels = (str(one["name"]), str(one["host"]))
        add(info, (*labels, *(str(one[key]) for key in _FACTS)), 1)
        add(running, labels, one["state"] == "running")
        add(busy, labels, one["operation"] is not None)
        add(memory, labels, one["memory_bytes"])
        add(vcpus, labels, one["vcpus"])
    return [info, running, busy, memory, vcpus]


def dirty_rates(measured: Iterable[Measured]) -> list[Metric]:
    """The last measurement of each VM, with its age."""
    rate = GaugeMetricFamily(
        "vmckpt_vm_dirty_rate_bytes_per_second",
        "Distinct memory dirtied within a second, when it was last measured.",
        labels=_MEASURED,
    )
    working_set = GaugeMetricFamily(
        "vmckpt_vm_working_set_bytes",
        "Distinct memory dirtied in the whole of the last measurement.",
        labels=_MEASURED,
    )
    took = GaugeMetricFamily(
        "vmckpt_vm_dirty_rate_measured_seconds", "Duration of that measurement.", labels=_MEASURED
    )
    when = GaugeMetricFamily(
        "vmckpt_vm_dirty_rate_measured_timestamp_seconds",
        "When that measurement ended.",
        labels=_MEASURED,
    )
    for one in measured:
        labels = (one.vm, one.rate.source)
        add(rate, labels, one.rate.bytes_per_s)
        add(working_set, labels, one.rate.working_set_bytes)
        add(took, labels, one.rate.took_s)
        add(when, labels, one.at_unix_s)
    return [rate, working_set, took, when]
