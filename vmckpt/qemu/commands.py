"""One function per QMP command that vmckpt uses; names and meanings are QEMU's (qapi/*.json)."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from vmckpt.qemu import shapes
from vmckpt.qemu.monitor import REPLY_TIMEOUT_S, CommandRefusedError, Monitor
from vmckpt.qemu.replies import (
    BlockNode,
    Cpu,
    MachineType,
    MigrationStatus,
    QemuJob,
    QemuVersion,
    RunState,
    Snapshot,
)

SENT_PACKETS_WRAP = 1 << 16
T = TypeVar("T")


async def query_version(monitor: Monitor) -> QemuVersion:
    """The version of this QEMU."""
    return QemuVersion(**(await monitor.ask("query-version", shapes.VersionInfo))["qemu"])


async def query_status(monitor: Monitor, timeout_s: float = 10.0) -> RunState:
    """Whether the vCPUs run, and QEMU's name for the state."""
    state = await monitor.ask("query-status", shapes.StatusInfo, timeout_s=timeout_s)
    return RunState(state["status"], state["running"])


async def stop(monitor: Monitor) -> None:
    """Stop the vCPUs and drain the block layer."""
    await monitor.tell("stop")


async def cont(monitor: Monitor) -> None:
    """Run the vCPUs. Legal from paused, prelaunch and postmigrate (which takes the disks back)."""
    await monitor.tell("cont")


async def system_powerdown(monitor: Monitor) -> None:
    """Press the guest's power button."""
    await monitor.tell("system_powerdown")


async def system_reset(monitor: Monitor) -> None:
    """Reset the machine, like its reset button; the guest boots."""
    await monitor.tell("system_reset")


async def quit_(monitor: Monitor) -> None:
    """End QEMU, which removes its sockets and its pid file; the guest goes with it."""
    await monitor.tell("quit")


async def query_cpus(monitor: Monitor) -> list[Cpu]:
    """The vCPUs, by index."""
    cpus = await monitor.ask("query-cpus-fast", list[shapes.CpuInfo])
    if not cpus:
        raise monitor.malformed("query-cpus-fast", "the machine has no processor")
    return [Cpu(cpu["thread-id"], cpu["qom-path"]) for cpu in cpus]


async def query_pci_ids(monitor: Monitor) -> dict[str, str]:
    """The ids of PCI functions, by address (`0000:00:03.0`); "" for those without one."""
    buses = await monitor.ask("query-pci", list[shapes.PciBus])
    return {
        f"0000:{device['bus']:02x}:{device['slot']:02x}.{device['function']}": device["qdev_id"]
        for bus in buses
        for device in _pci_functions(bus["devices"])
    }


def _pci_functions(devices: Iterable[shapes.PciFunction]) -> Iterator[shapes.PciFunction]:
    for device in devices:
        yield device
        yield from _pci_functions(device.get("pci_bridge", {}).get("devices", ()))


async def qom_children(monitor: Monitor, path: str) -> dict[str, str]:
    """The children of an object in QEMU's object tree, with their types; empty if it is missing.

    Types are as in `child<virtio-net-pci>`.
    """
    try:
        listed = await monitor.ask("qom-list", list[shapes.Child], {"path": path})
    except CommandRefusedError:
        return {}
    return {
        item["name"]: item["type"][len("child<") : -1]
        for item in listed
        if item["type"].startswith("child<")
    }


async def qom_get(monitor: Monitor, path: str, name: str, kind: type[T]) -> T:
    """Read a property, of that type, of an object in QEMU's object tree."""
    return await monitor.ask("qom-get", kind, {"path": path, "property": name})


async def qom_set(monitor: Monitor, path: str, name: str, value: Any) -> None:
    """Change a property of an object in QEMU's object tree."""
    await monitor.tell("qom-set", {"path": path, "property": name, "value": value})


async def trace(monitor: Monitor, event: str, *, enabled: bool) -> None:
    """Switch a trace event on or off."""
    await monitor.tell("trace-event-set-state", {"name": event, "enable": enabled})


async def query_machines(monitor: Monitor) -> list[MachineType]:
    """The machine types this QEMU can start."""
    machines = await monitor.ask("query-machines", list[shapes.MachineInfo])
    return [MachineType(machine["name"], machine.get("alias")) for machine in machines]


async def query_cpu_models(monitor: Monitor) -> list[str]:
    """Names of the CPU models this QEMU knows (whether they run depends on the accelerator)."""
    models = await monitor.ask("query-cpu-definitions", list[shapes.Named])
    return [model["name"] for model in models]


async def query_kvm(monitor: Monitor) -> bool:
    """True when this QEMU runs on KVM."""
    return (await monitor.ask("query-kvm", shapes.KvmInfo))["enabled"]


async def query_qmp_schema(monitor: Monitor) -> list[shapes.SchemaInfo]:
    """The whole QAPI schema: about 210 kB and 50 ms; cache what you learn from it."""
    return await monitor.ask("query-qmp-schema", list[shapes.SchemaInfo])


async def query_migrate_capabilities(monitor: Monitor) -> dict[str, bool]:
    """Every migration capability this QEMU knows, and whether it is on."""
    states = await monitor.ask("query-migrate-capabilities", list[shapes.Capability])
    return {item["capability"]: item["state"] for item in states}


async def migrate_set_capabilities(monitor: Monitor, states: Mapping[str, bool]) -> None:
    """Switch migration capabilities; QEMU takes all of them or none."""
    await monitor.tell(
        "migrate-set-capabilities",
        {"capabilities": [{"capability": name, "state": state} for name, state in states.items()]},
    )


async def query_migrate_parameters(monitor: Monitor) -> dict[str, Any]:
    """Every migration parameter this QEMU has, with its value."""
    return await monitor.ask("query-migrate-parameters", dict[str, Any])


async def migrate_set_parameters(monitor: Monitor, values: Mapping[str, Any]) -> None:
    """Set migration parameters; a refused call leaves all of them as they were."""
    await monitor.tell("migrate-set-parameters", dict(values))


async def migrate_incoming(monitor: Monitor, uri: str) -> None:
    """Listen for a migration at `uri`; for port 0 MigrationStatus.port says which it became."""
    await monitor.tell("migrate-incoming", {"uri": uri})


async def migrate(monitor: Monitor, uri: str) -> None:
    """Start migrating to `uri`; progress is in query-migrate."""
    await monitor.tell("migrate", {"uri": uri})


async def migrate_start_postcopy(monitor: Monitor) -> None:
    """Let the destination run now and fetch what is missing."""
    await monitor.tell("migrate-start-postcopy")


async def migrate_cancel(monitor: Monitor, timeout_s: float = 10.0) -> None:
    """Cancel a migration; no effect in post-copy and after the end."""
    await monitor.tell("migrate_cancel", timeout_s=timeout_s)


async def query_migrate(monitor: Monitor, timeout_s: float = 10.0) -> MigrationStatus:
    """The status of the current or last migration."""
    info = await monitor.ask("query-migrate", shapes.MigrationInfo, timeout_s=timeout_s)
    return MigrationStatus.parse(info)


async def migrate_pause(monitor: Monitor) -> None:
    """Out of band: tell a post-copy that its link is broken, which it does not notice by itself."""
    await monitor.tell("migrate-pause", timeout_s=5.0, oob=True)


async def migrate_recover(monitor: Monitor, uri: str) -> None:
    """Out of band, on the destination of a paused post-copy: listen at `uri` for the source."""
    await monitor.tell("migrate-recover", {"uri": uri}, timeout_s=5.0, oob=True)


async def migrate_resume(monitor: Monitor, uri: str) -> None:
    """On the source of a paused post-copy: continue via `uri`."""
    await monitor.tell("migrate", {"uri": uri, "resume": True})


async def calc_dirty_rate(monitor: Monitor, length_s: int, sample_pages: int) -> None:
    """Have QEMU measure the dirty rate by sampling that many pages per GiB.

    Sampling is the only mode that is correct under TCG; dirty-bitmap crashes 7.2.
    """
    await monitor.tell(
        "calc-dirty-rate",
        {"calc-time": length_s, "sample-pages": sample_pages, "mode": "page-sampling"},
    )


async def query_dirty_rate(monitor: Monitor) -> float | None:
    """Bytes per second (a multiple of 1 MiB/s) of the last measurement; None while it runs."""
    reply = await monitor.ask("query-dirty-rate", shapes.DirtyRate)
    return float(reply.get("dirty-rate", 0) << 20) if reply["status"] == "measured" else None


async def announce_self(monitor: Monitor) -> None:
    """Announce the location of the guest's NICs to the network, ten times within 3 s."""
    rounds = {"initial": 50, "max": 550, "rounds": 10, "step": 50}
    await monitor.tell("announce-self", rounds)


async def query_yank(
    monitor: Monitor, timeout_s: float = 5.0, *, oob: bool = True
) -> list[shapes.Yankable]:
    """What can be yanked now; out of band, so it works while the main loop is stuck."""
    kind = list[shapes.Yankable]
    found: list[shapes.Yankable] = await monitor.tell(
        "query-yank", timeout_s=timeout_s, oob=oob, kind=kind
    )
    return found


async def yank_migration(monitor: Monitor) -> bool:
    """Cut the migration's sockets, out of band; False if there are none."""
    try:
        await monitor.tell("yank", {"instances": [{"type": "migration"}]}, timeout_s=5.0, oob=True)
    except CommandRefusedError:
        return False
    return True


async def snapshot_save(
    monitor: Monitor, job: str, tag: str, vmstate: str, nodes: Iterable[str]
) -> None:
    """Start saving RAM, devices and `nodes` as snapshot `tag`; the VM is stopped meanwhile.

    QEMU 9 and later answer this and the next two only when they are done.
    """
    await monitor.tell(
        "snapshot-save",
        {"job-id": job, "tag": tag, "vmstate": vmstate, "devices": list(nodes)},
        timeout_s=None,
    )


async def snapshot_load(
    monitor: Monitor, job: str, tag: str, vmstate: str, nodes: Iterable[str]
) -> None:
    """Start returning to internal snapshot `tag`; a running VM is stopped and continues."""
    await monitor.tell(
        "snapshot-load",
        {"job-id": job, "tag": tag, "vmstate": vmstate, "devices": list(nodes)},
        timeout_s=None,
    )


async def snapshot_delete(monitor: Monitor, job: str, tag: str, nodes: Iterable[str]) -> None:
    """Start deleting internal snapshot `tag`; QEMU does not treat a missing one as an error."""
    arguments = {"job-id": job, "tag": tag, "devices": list(nodes)}
    await monitor.tell("snapshot-delete", arguments, timeout_s=None)


async def query_jobs(monitor: Monitor, timeout_s: float | None = REPLY_TIMEOUT_S) -> list[QemuJob]:
    """All jobs that are not dismissed yet. A time limit of None waits as long as QEMU lives."""
    return [
        QemuJob(
            item["id"],
            item["type"],
            item["status"],
            item["current-progress"],
            item["total-progress"],
            item.get("error"),
        )
        for item in await monitor.ask("query-jobs", list[shapes.JobInfo], timeout_s=timeout_s)
    ]


async def job_dismiss(monitor: Monitor, job: str) -> None:
    """Dismiss a concluded job."""
    await monitor.tell("job-dismiss", {"id": job})


async def query_named_block_nodes(monitor: Monitor) -> list[BlockNode]:
    """The block nodes, each with the internal snapshots of its image."""
    return [
        BlockNode(
            item["node-name"],
            tuple(_snapshot(snapshot) for snapshot in item["image"].get("snapshots", [])),
        )
        for item in await monitor.ask("query-named-block-nodes", list[shapes.NamedNode])
    ]


def _snapshot(item: shapes.SnapshotInfo) -> Snapshot:
    clock_s = item["vm-clock-sec"] + item["vm-clock-nsec"] / 1e9
    return Snapshot(item["name"], item["id"], item["vm-state-size"], item["date-sec"], clock_s)


async def object_add(monitor: Monitor, kind: str, name: str, values: Mapping[str, Any]) -> None:
    """Create a user-creatable object of QOM type `kind` with the id `name`."""
    await monitor.tell("object-add", {"qom-type": kind, "id": name, **values})


async def object_del(monitor: Monitor, name: str) -> None:
    """Remove an object made by `object_add`; refused while something uses it."""
    await monitor.tell("object-del", {"id": name})


async def query_virtio_nics(monitor: Monitor) -> list[str]:
    """The QOM paths of all virtio NICs (QEMU >= 7.2)."""
    found = await monitor.ask("x-query-virtio", list[shapes.VirtioInfo])
    return [item["path"] for item in found if item["name"] == "virtio-net"]


async def query_sent_packets(monitor: Monitor, nic: str) -> int:
    """How many packets the virtio NIC `nic`, a QOM path, has sent, modulo SENT_PACKETS_WRAP.

    This is what QEMU has returned of the NIC's first transmit queue, one buffer per packet.
    """
    where = {"path": nic, "queue": 1}
    found = await monitor.ask("x-query-virtio-queue-status", shapes.QueueStatus, where)
    return found["used-idx"]


async def chardev_add(monitor: Monitor, kind: str, name: str) -> None:
    """Create a character device that takes no options."""
    backend = {"type": kind, "data": {}}
    await monitor.tell("chardev-add", {"id": name, "backend": backend})


async def chardev_remove(monitor: Monitor, name: str) -> None:
    """Remove a character device; refused while something uses it."""
    await monitor.tell("chardev-remove", {"id": name})


async def query_objects(monitor: Monitor) -> list[str]:
    """The ids of all user-creatable objects."""
    children = await monitor.ask("qom-list", list[shapes.Child], {"path": "/objects"})
    return [item["name"] for item in children if item["type"].startswith("child<")]
