"""Hosts, VMs and how fast these dirtied memory when that was last measured, as metrics. Pure."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from vmckpt.forecast.measure.dirty_rate import DirtyRate
from vmckpt.metrics.exposition import Family, Kind

# Within so long: what a pre-copy's later rounds have to send.
WITHIN_S = 1.0
PAGE_BYTES = 4096


class Measured(NamedTuple):
    """The last measurement of a VM's dirty rate, and when it ended."""

    vm: str
    at_unix_s: float
    rate: DirtyRate


def hosts(answers: Mapping[str, bool]) -> list[Family]:
    """Which hosts of the inventory gave an answer."""
    up = Family("vmckpt_host_up", Kind.GAUGE, "Whether the host answered (1) or not (0).")
    for name, answered in sorted(answers.items()):
        up.add(answered, host=name)
    return [up]


def vms(facts: Iterable[Mapping[str, Any]]) -> list[Family]:
    """Every VM, from what `vm list --json` says of each."""
    info = Family("vmckpt_vm_info", Kind.GAUGE, "1 for every VM; what it is stands in the labels.")
    running = Family("vmckpt_vm_running", Kind.GAUGE, "Whether the VM runs (1) or not (0).")
    busy = Family("vmckpt_vm_busy", Kind.GAUGE, "Whether an operation holds the VM (1) or not (0).")
    memory = Family("vmckpt_vm_memory_bytes", Kind.GAUGE, "Memory that the guest has.")
    vcpus = Family("vmckpt_vm_vcpus", Kind.GAUGE, "Processors that the guest has.")
    for one in facts:
        place = {"vm": str(one["name"]), "host": str(one["host"])}
        words = {key: str(one[key]) for key in ("driver", "machine", "accel")}
        info.add(1, **place, **words)
        running.add(one["state"] == "running", **place)
        busy.add(one["operation"] is not None, **place)
        memory.add(one["memory_bytes"], **place)
        vcpus.add(one["vcpus"], **place)
    return [info, running, busy, memory, vcpus]


def dirty_rates(measured: Iterable[Measured]) -> list[Family]:
    """What was last measured of each VM; how old that is stands beside it."""
    rate = Family(
        "vmckpt_vm_dirty_rate_bytes_per_second",
        Kind.GAUGE,
        "Distinct memory dirtied within a second, when it was last measured.",
    )
    working_set = Family(
        "vmckpt_vm_working_set_bytes",
        Kind.GAUGE,
        "Distinct memory dirtied in the whole of the last measurement.",
    )
    took = Family(
        "vmckpt_vm_dirty_rate_measured_seconds", Kind.GAUGE, "How long it was measured for."
    )
    when = Family("vmckpt_vm_dirty_rate_measured_timestamp_seconds", Kind.GAUGE, "When that ended.")
    for one in measured:
        labels = {"vm": one.vm, "source": one.rate.source}
        rate.add(one.rate.curve.within(WITHIN_S) * PAGE_BYTES / WITHIN_S, **labels)
        working_set.add(one.rate.working_set_bytes, **labels)
        took.add(one.rate.took_s, **labels)
        when.add(one.at_unix_s, **labels)
    return [rate, working_set, took, when]
