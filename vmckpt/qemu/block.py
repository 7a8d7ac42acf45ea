"""QMP commands that copy disks between two QEMUs: NBD exports and mirrors (qapi/block*.json)."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from vmckpt.qemu import shapes
from vmckpt.qemu.commands import query_jobs, query_yank
from vmckpt.qemu.monitor import CommandRefusedError, Monitor
from vmckpt.qemu.replies import QemuJob

# Error descriptions for a stopped block job, by its io-status.
STOPPED_BY = {"nospace": "No space left on device", "failed": "reading or writing failed"}


class DiskImage(NamedTuple):
    """The image of one block node. `allocated_bytes` includes its backing files (`backing`)."""

    node_name: str
    virtual_size_bytes: int
    allocated_bytes: int
    snapshots: tuple[str, ...]
    backing: tuple[str, ...] = ()


async def query_disk_images(monitor: Monitor) -> dict[str, DiskImage]:
    """The images of all named nodes, by node name."""
    return {
        item["node-name"]: DiskImage(
            item["node-name"],
            item["image"]["virtual-size"],
            _allocated_bytes(item["image"]),
            tuple(snapshot["name"] for snapshot in item["image"].get("snapshots", ())),
            tuple(_backing_files(item["image"])),
        )
        for item in await monitor.ask("query-named-block-nodes", list[shapes.NamedNode])
    }


def _allocated_bytes(image: shapes.Image) -> int:
    below = image.get("backing-image")
    return image.get("actual-size", 0) + (_allocated_bytes(below) if below else 0)


def _backing_files(image: shapes.Image) -> Iterator[str]:
    if below := image.get("backing-image"):
        yield below["filename"]
        yield from _backing_files(below)


async def blockdev_add(monitor: Monitor, options: Mapping[str, Any]) -> None:
    """Open a block node."""
    await monitor.tell("blockdev-add", options)


async def blockdev_del(monitor: Monitor, node: str) -> None:
    """Close a block node that nothing uses."""
    await monitor.tell("blockdev-del", {"node-name": node})


async def nbd_server_start(
    monitor: Monitor, host: str, port: int, tls: Mapping[str, str] | None = None
) -> None:
    """Serve exports at an address; `tls` has tls-creds and tls-authz. A QEMU has one server."""
    address = {"type": "inet", "data": {"host": host, "port": str(port)}}
    await monitor.tell("nbd-server-start", {"addr": address} | dict(tls or {}))


async def nbd_server_stop(monitor: Monitor) -> None:
    """Close the server and every export, with or without clients, and flush all their writes."""
    await monitor.tell("nbd-server-stop")


async def block_export_add(monitor: Monitor, export: str, node: str) -> None:
    """Let NBD clients write `node` under the name `export`."""
    await monitor.tell(
        "block-export-add",
        {"type": "nbd", "id": export, "name": export, "node-name": node, "writable": True},
    )


async def blockdev_mirror(
    monitor: Monitor,
    job: str,
    device: str,
    target: str,
    speed_bytes_per_s: int,
    *,
    write_through: bool = False,
    sync: str = "full",
) -> None:
    """Copy all of `device` to the node `target`, and every write to it from then on.

    `sync` of "top": only the content of the device itself, without its backing files. With
    `write_through` a write completes only when it is on both. An error stops the job, and the guest
    continues: see `query_mirrors`. The job then waits to be cancelled, and to be dismissed once it
    has ended. The granularity is 4 KiB: with 64 KiB a guest that writes at random is never caught
    up with, except with write-through.

    A mirror that is cancelled, or ends on an error, frees its map of the writes in flight before it
    waits for them (QEMU 7.2 to 10.0, block/mirror.c, immediate_exit): they then write to freed
    memory. So use `block_job_cancel` with force only while nothing writes.
    """
    await monitor.tell(
        "blockdev-mirror",
        {
            "job-id": job,
            "device": device,
            "target": target,
            "sync": sync,
            "granularity": 65536 if write_through else 4096,
            **({"copy-mode": "write-blocking"} if write_through else {}),
            "speed": speed_bytes_per_s,
            "on-source-error": "stop",
            "on-target-error": "stop",
            "auto-dismiss": False,
        },
    )


async def query_mirrors(monitor: Monitor, prefix: str) -> list[QemuJob]:
    """The jobs with these names; `error` is also set for one that an error stopped but did not end.

    QEMU reports only the kind of such an error, without a file, and forgets it when the guest is
    resumed.
    """
    jobs = [job for job in await query_jobs(monitor) if job.id.startswith(prefix)]
    jobs_found = await monitor.ask("query-block-jobs", list[shapes.BlockJob]) if jobs else []
    stopped = {item["device"]: STOPPED_BY.get(item["io-status"]) for item in jobs_found}
    return [job._replace(error=job.error or stopped.get(job.id)) for job in jobs]


async def job_complete(monitor: Monitor, job: str) -> None:
    """End a mirror that is ready: users of its device use its target from then on."""
    await monitor.tell("job-complete", {"id": job})


async def block_job_resume(monitor: Monitor, job: str) -> None:
    """Retry a job that an error stopped. Raises CommandRefusedError: there is none."""
    await monitor.tell("block-job-resume", {"device": job})


async def block_job_set_speed(monitor: Monitor, job: str, speed_bytes_per_s: int) -> None:
    """Limit a block job; 0 means no limit."""
    await monitor.tell("block-job-set-speed", {"device": job, "speed": speed_bytes_per_s})


async def block_job_write_through(monitor: Monitor, job: str) -> None:
    """Complete a guest's writes only when they are on both sides, from now on (QEMU >= 8.2)."""
    await monitor.tell(
        "block-job-change", {"id": job, "type": "mirror", "copy-mode": "write-blocking"}
    )


async def block_job_cancel(monitor: Monitor, job: str, *, force: bool) -> None:
    """End a mirror: if ready and not forced, both sides are identical; forced, immediately.

    If forced or not ready, the guest must be paused: see `blockdev_mirror`.
    """
    await monitor.tell("block-job-cancel", {"device": job, "force": force})


async def migrate_continue(monitor: Monitor) -> None:
    """Continue a migration that waits before its switchover."""
    await monitor.tell("migrate-continue", {"state": "pre-switchover"})


async def yank_nodes(monitor: Monitor, prefix: str) -> None:
    """Cut the connections of these block nodes, out of band: works even if QEMU is stuck."""
    for item in await query_yank(monitor):
        if item["type"] == "block-node" and item["node-name"].startswith(prefix):
            with suppress(CommandRefusedError):  # it was closed meanwhile
                await monitor.tell("yank", {"instances": [item]}, timeout_s=5.0, oob=True)


class DiskDevice(NamedTuple):
    """A device that has a disk: its path in QEMU's object tree, and the disk's node.

    `file`: the disk's image, as QEMU names it.
    """

    path: str
    node: str
    file: str
    read_only: bool


async def query_drives(monitor: Monitor) -> list[DiskDevice]:
    """Every device with a disk in it."""
    found = []
    for item in await monitor.ask("query-block", list[shapes.BlockInfo]):
        device = item.get("qdev", "")
        inserted: shapes.Inserted = item.get("inserted", {})
        if device and inserted.get("node-name"):
            path = device if device.startswith("/") else f"/machine/peripheral/{device}"
            file, read_only = inserted.get("file", ""), inserted.get("ro", False)
            found.append(DiskDevice(path, inserted["node-name"], file, read_only))
    return found


async def set_drive(monitor: Monitor, drive: DiskDevice, node: str) -> None:
    """Change the node of a running device's disk (QEMU >= 6.1)."""
    await monitor.tell("qom-set", {"path": drive.path, "property": "drive", "value": node})


async def file_of(monitor: Monitor, node: str) -> str:
    """The node below a filter."""
    graph = await monitor.ask("x-debug-query-block-graph", shapes.BlockGraph)
    names = {item["id"]: item["name"] for item in graph["nodes"]}
    found = [
        names.get(edge["child"])
        for edge in graph["edges"]
        if edge["name"] == "file" and names.get(edge["parent"]) == node
    ]
    if not found or found[0] is None:
        raise monitor.malformed("x-debug-query-block-graph", f"there is no node below {node}")
    return str(found[0])


async def query_bitmaps(monitor: Monitor) -> dict[str, dict[str, bool]]:
    """The usable dirty bitmaps of each named node, and whether each still records writes."""
    return {
        item["node-name"]: {
            bitmap["name"]: bitmap["recording"]
            for bitmap in item.get("dirty-bitmaps", ())
            if bitmap.get("name") and not bitmap.get("inconsistent")
        }
        for item in await monitor.ask("query-named-block-nodes", list[shapes.NamedNode])
    }


def bitmap_add(node: str, name: str) -> dict[str, Any]:
    """For a transaction: add a bitmap that records writes from now on; 64 KiB per bit."""
    data = {"node": node, "name": name, "granularity": 65536, "persistent": False}
    return {"type": "block-dirty-bitmap-add", "data": data}


def bitmap_disable(node: str, name: str) -> dict[str, Any]:
    """For a transaction: stop recording in a bitmap."""
    return {"type": "block-dirty-bitmap-disable", "data": {"node": node, "name": name}}


async def bitmap_remove(monitor: Monitor, node: str, name: str) -> None:
    """Remove a bitmap that nothing uses."""
    await monitor.tell("block-dirty-bitmap-remove", {"node": node, "name": name})


async def transaction(monitor: Monitor, actions: Sequence[Mapping[str, Any]]) -> None:
    """Run all of the actions atomically, or none."""
    await monitor.tell("transaction", {"actions": list(actions)})


async def nbd_server_start_unix(monitor: Monitor, path: Path) -> None:
    """Serve exports at a Unix socket. A QEMU has one server."""
    address = {"type": "unix", "data": {"path": str(path)}}
    await monitor.tell("nbd-server-start", {"addr": address})


async def nbd_server_start_given(monitor: Monitor, name: str) -> None:
    """As `nbd_server_start_unix`, at a listening socket that QEMU was given under that name."""
    address = {"type": "fd", "data": {"str": name}}
    await monitor.tell("nbd-server-start", {"addr": address})


async def block_export_read(
    monitor: Monitor, export: str, node: str, bitmap: tuple[str, str] | None
) -> None:
    """Let NBD clients read `node` as `export`; a bitmap (node, name) shows what is dirty.

    The export is known by the name of the node, which is vmckpt's. `export` may be a name that QEMU
    itself made ("#block1"), which it does not accept there.
    """
    options: dict[str, Any] = {"type": "nbd", "id": node, "name": export, "node-name": node}
    if bitmap:
        options["bitmaps"] = [{"node": bitmap[0], "name": bitmap[1]}]
    await monitor.tell("block-export-add", options)


async def has_blockdev_set_active(monitor: Monitor) -> bool:
    """Whether this QEMU knows `blockdev-set-active` (QEMU >= 10.0)."""
    names = await monitor.ask("query-commands", list[shapes.Named])
    return any(item["name"] == "blockdev-set-active" for item in names)


async def blockdev_set_active(monitor: Monitor) -> None:
    """Reactivate all disks that were given up for a migration; `cont` would do it too."""
    await monitor.tell("blockdev-set-active", {"active": True})
