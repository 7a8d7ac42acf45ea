"""A migration that is held to another share of its link: what QEMU is told."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.contract.test_dropped_copies import Scripted
from tests.scripted_qmp import Server, play
from vmckpt.migrate.outcome.ends import Pair
from vmckpt.migrate.steps.disks import DiskMirrors
from vmckpt.migrate.steps.transfer import Transfer
from vmckpt.options.migration import Method, MigrationOptions
from vmckpt.preflight.migration.disks import DiskCopy
from vmckpt.qemu.monitor import Monitor

pytestmark = pytest.mark.contract


def copy(number: int) -> DiskCopy:
    path = Path(f"/images/{number}.qcow2")
    return DiskCopy(number, "qcow2", False, 1 << 20, 1 << 20, path, path, f"disk{number}", "d")


JOBS = [
    {"id": f"copy-r1-{number}", "type": "mirror", "status": "ready", "current-progress": 1,
     "total-progress": 1}
    for number in range(2)
]  # fmt: skip


@pytest.mark.parametrize("disks", [0, 2])
def test_memory_and_disks_are_held_to_it_together(tmp_path: Path, disks: int) -> None:
    told: list[tuple[str, Any]] = []

    async def script(server: Server) -> None:
        try:
            while True:
                command = await server.command()
                match name := command["execute"]:
                    case "query-jobs":
                        await server.answer(command, JOBS)
                    case "query-block-jobs":
                        await server.answer(command, [])
                    case _:
                        if name in ("block-job-set-speed", "migrate-set-parameters"):
                            told.append((name, command["arguments"]))
                        await server.answer(command, {})
        except EOFError:
            return

    async def client(monitor: Monitor) -> None:
        end = Scripted(monitor, tmp_path)
        mirrors = DiskMirrors(
            Pair(end, end, was_running=True, ram_dir=tmp_path),
            [copy(number) for number in range(disks)],
            run="r1",
            bandwidth_bytes_per_s=800,
            clock=lambda: 0.0,
            emit=lambda _: None,
            note=lambda *_: None,
        )
        options = MigrationOptions(Method.PRECOPY, bandwidth_bytes_per_s=800)
        transfer = Transfer(
            monitor, options, lambda: 0.0, lambda _: None, lambda *_: None, disks=mirrors,
            switchover=None,
        )  # fmt: skip
        await mirrors.hold_to(400)
        await asyncio.wait_for(mirrors.mirror(None), 10)
        await transfer.hold_to(200)

    play(script, client)
    speeds = [(what["device"], what["speed"]) for name, what in told if name[:5] == "block"]
    memory = [what["max-bandwidth"] for name, what in told if name[:7] == "migrate"]
    if disks:
        # Copied with all of it; then a quarter is theirs, and the rest memory's.
        copying = [("copy-r1-0", 200), ("copy-r1-1", 200)]
        following = [("copy-r1-0", 50), ("copy-r1-1", 50)]
        at_last = [("copy-r1-0", 25), ("copy-r1-1", 25)]
        assert (speeds, memory) == ([*copying, *following, *at_last], [150])
    else:
        assert (speeds, memory) == ([], [200])
