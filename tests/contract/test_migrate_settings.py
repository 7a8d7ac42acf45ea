"""What QEMU is told for single options of a migration, and what it tells that ends one."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.contract.test_dropped_copies import Scripted
from tests.contract.test_held_to_share import JOBS, copy
from tests.scripted_qmp import Script, Server, play
from vmckpt.errors import OperationFailedError
from vmckpt.migrate.outcome.ends import Pair
from vmckpt.migrate.steps.disks import DiskMirrors
from vmckpt.migrate.steps.settings import set_source
from vmckpt.migrate.steps.transfer import Transfer
from vmckpt.options.migration import Method, MigrationOptions
from vmckpt.qemu.abilities import ZERO_COPY, Agreement
from vmckpt.qemu.monitor import Monitor

pytestmark = pytest.mark.contract
ACTIVE = {"status": "active", "ram": {"transferred": 1, "remaining": 9, "total": 9}}
FAILED_WRITE = {
    "event": "BLOCK_IO_ERROR",
    "data": {"device": "", "node-name": "disk0", "operation": "write", "reason": "No space left"},
    "timestamp": {"seconds": 1, "microseconds": 0},
}


def qemu(answers: Mapping[str, object], told: list[dict[str, Any]], *, after: object) -> Script:
    """One that answers so, and {} to all else; `after` its answer to `migrate` it tells that."""

    async def serve(server: Server) -> None:
        try:
            while True:
                command = await server.command()
                told.append(command)
                await server.answer(command, answers.get(command["execute"], {}))
                if command["execute"] == "migrate" and after:
                    await server.send(after)
        except EOFError:
            return

    return serve


def mirrors(end: Scripted, root: Path, *, write_through: bool) -> DiskMirrors:
    return DiskMirrors(
        Pair(end, end, was_running=True, ram_dir=root),
        [copy(0), copy(1)],
        run="r1",
        bandwidth_bytes_per_s=0,
        write_through=write_through,
        clock=lambda: 0.0,
        emit=lambda _: None,
        note=lambda *_: None,
    )


@pytest.mark.parametrize(("write_through", "mode"), [(True, "write-blocking"), (False, None)])
def test_writes_to_copied_disks_wait_from_the_beginning_if_asked_to(
    tmp_path: Path, *, write_through: bool, mode: str | None
) -> None:
    told: list[dict[str, Any]] = []

    async def client(monitor: Monitor) -> None:
        copies = mirrors(Scripted(monitor, tmp_path), tmp_path, write_through=write_through)
        await asyncio.wait_for(copies.mirror(None), 10)

    play(qemu({"query-jobs": JOBS, "query-block-jobs": []}, told, after=None), client)
    begun = [one["arguments"] for one in told if one["execute"] == "blockdev-mirror"]
    assert [one.get("copy-mode") for one in begun] == [mode, mode]


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("state", "action", "asked", "ends"),
    [
        ("running", "stop", True, "while its memory moved"),
        ("io-error", "", True, "before its memory moved"),
        ("running", "report", True, ""),
        ("running", "stop", False, ""),
        ("io-error", "", False, ""),
    ],
)
def test_a_failing_disk_ends_a_migration_that_is_to_end_then(
    tmp_path: Path, state: str, action: str, *, asked: bool, ends: str
) -> None:
    event = FAILED_WRITE | {"data": {**FAILED_WRITE["data"], "action": action}}  # type: ignore[dict-item]
    told: list[dict[str, Any]] = []
    answers = {
        "query-status": {"status": state, "running": state == "running"},
        "query-migrate": ACTIVE,
    }

    async def client(monitor: Monitor) -> None:
        none = DiskMirrors(
            Pair(Scripted(monitor, tmp_path), Scripted(monitor, tmp_path), True, tmp_path),
            [],
            run="r1",
            bandwidth_bytes_per_s=0,
            clock=lambda: 0.0,
            emit=lambda _: None,
            note=lambda *_: None,
        )
        transfer = Transfer(
            monitor, MigrationOptions(Method.PRECOPY, abort_on_error=asked), lambda: 0.0,
            lambda _: None, lambda *_: None, disks=none, switchover=None,
        )  # fmt: skip
        running = asyncio.ensure_future(transfer.run("tcp:::1"))
        if ends:
            with pytest.raises(OperationFailedError) as caught:
                await running
            assert ends in caught.value.why
            # A guest that is paused for its disk is refused by the next preflight.
            assert "until then it cannot move" in caught.value.remedy
        else:
            # It has looked on since, and goes on.
            while sum(one["execute"] == "query-migrate" for one in told) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert not running.done()
            running.cancel()
            await asyncio.wait({running})

    play(qemu(answers, told, after=event if action else None), client)
    assert any(one["execute"] == "migrate" for one in told) is (ends[:6] != "before")


@pytest.mark.parametrize("zero_copy", [True, False])
def test_what_an_earlier_compression_left_goes_before_pages_go_uncopied(
    tmp_path: Path, *, zero_copy: bool
) -> None:
    """QEMU refuses either beside the other: whichever is to be off is switched off first."""
    told: list[dict[str, Any]] = []
    capabilities, parameters = {ZERO_COPY: zero_copy}, {"multifd-compression": "none"}
    answers = {
        "query-migrate-capabilities": [{"capability": ZERO_COPY, "state": zero_copy}],
        "query-migrate-parameters": parameters,
    }

    async def client(monitor: Monitor) -> None:
        end = Scripted(monitor, tmp_path)
        agreement = Agreement(capabilities, parameters, parameters)
        await set_source(Pair(end, end, True, tmp_path), agreement)

    play(qemu(answers, told, after=None), client)
    order = [one["execute"].removeprefix("migrate-set-") for one in told][:2]
    wanted = ["parameters", "capabilities"]
    assert order == (wanted if zero_copy else wanted[::-1])
