"""What the real QEMUs answer is of the shapes that are required of it; no guest runs."""

import asyncio
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.qemu.world import qemu
from tests.waiting import eventually
from vmckpt.qemu import block, commands, device_state, inside, shapes
from vmckpt.qemu.abilities import learn
from vmckpt.qemu.compare import describe
from vmckpt.qemu.monitor import Monitor, session

pytestmark = pytest.mark.qemu

ASKED = (
    commands.query_version, commands.query_status, commands.query_cpus, commands.query_pci_ids,
    commands.query_machines, commands.query_cpu_models, commands.query_kvm, commands.query_jobs,
    commands.query_migrate_capabilities, commands.query_migrate, commands.query_yank,
    commands.query_named_block_nodes, commands.query_migrate_parameters, block.query_disk_images,
    block.query_bitmaps, block.query_drives, inside.query_drives, inside.query_chardev_labels,
    inside.query_memory_bytes, inside.query_architecture, inside.query_networks, learn, describe,
    device_state.query_ram_blocks,
)  # fmt: skip
# Without arguments, and not asked by any of these.
PLAIN: dict[str, type] = {
    "query-block-jobs": list[shapes.BlockJob],
    "query-commands": list[shapes.Named],
    "query-dirty-rate": shapes.DirtyRate,
    "x-debug-query-block-graph": shapes.BlockGraph,
}


@pytest.fixture(params=["7.2", "10.0"])
def monitor_path(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    program, path = qemu(request.param), tmp_path / "qmp"
    images = [str(Path(program).with_name("qemu-img")), "create", "-q", "-f", "qcow2"]
    below, disk = tmp_path / "below.qcow2", tmp_path / "disk.qcow2"
    subprocess.run([*images, below, "64M"], check=True)
    subprocess.run([*images, "-b", below, "-F", "qcow2", disk], check=True)
    words = [
        "-S",
        "-machine",
        "q35",
        "-nodefaults",
        "-display",
        "none",
        "-m",
        "64M",
        "-qmp",
        f"unix:{path},server=on,wait=off",
        "-netdev",
        "user,id=n0",
        "-blockdev",
        f"driver=qcow2,node-name=disk0,file.driver=file,file.filename={disk}",
        "-device",
        "virtio-blk-pci,drive=disk0,id=vd0",
        "-device",
        "virtio-net-pci,netdev=n0,id=nic0",
        "-chardev",
        "null,id=c0",
        "-cdrom",
        os.devnull,
    ]
    with subprocess.Popen([program, *words]) as process:
        try:
            eventually(path.exists, 30, "its monitor is there")
            yield path
        finally:
            process.kill()


async def _ask(monitor: Monitor) -> None:
    for question in ASKED:
        await question(monitor)
    for command, kind in PLAIN.items():
        await monitor.ask(command, kind)
    for device, driver in (("nic0", "virtio-net-pci"), ("vd0", "virtio-blk-pci")):
        assert (await inside.device_settings(monitor, device, driver))["bus"] == "pcie.0"
    target = {"driver": "null-co", "node-name": "t", "size": 64 << 20}
    await block.blockdev_add(monitor, target)
    with monitor.events("JOB_STATUS_CHANGE", "MIGRATION", "SHUTDOWN") as events:
        mirror = {"job-id": "j", "device": "disk0", "target": "t", "sync": "full"}
        await monitor.tell("blockdev-mirror", mirror)
        await commands.migrate_set_capabilities(monitor, {"events": True})
        await commands.migrate(monitor, "exec:cat >/dev/null")
        while (await commands.query_migrate(monitor)).status != "completed":  # noqa: ASYNC110 - it tells by events that are drained below
            await asyncio.sleep(0.05)
        assert len(await monitor.ask("query-block-jobs", list[shapes.BlockJob])) == 1
        assert await block.file_of(monitor, "disk0")
        assert {event["event"] for event in events.drain()} == {"JOB_STATUS_CHANGE", "MIGRATION"}


def test_real_answers_are_of_their_shapes(monitor_path: Path) -> None:
    async def work() -> None:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(str(monitor_path))
        async with session(sock, "web on a") as monitor:
            async with asyncio.timeout(60):
                await _ask(monitor)

    asyncio.run(work())
