"""What a QEMU is told before its devices alone are saved, and afterwards."""

import asyncio
import os
from contextlib import ExitStack, suppress
from types import SimpleNamespace
from typing import Any

import pytest

from tests.scripted_qmp import Server, play
from vmckpt.epoch import migrated
from vmckpt.epoch.devices import Devices, _memory
from vmckpt.epoch.head import LearnedHead
from vmckpt.epoch.migrated import (
    CAPABILITIES,
    PARAMETERS,
    PIPE_BYTES,
    DeviceMigration,
    _received,
    saving,
)
from vmckpt.errors import OperationFailedError
from vmckpt.memory.ram_file import open_fd
from vmckpt.qemu.monitor import Monitor

pytestmark = pytest.mark.contract

LEFT = {
    "x-ignore-shared": False,
    "events": True,
    "return-path": True,
    "multifd": True,
    "rdma": False,
}


def test_what_an_earlier_migration_left_on_is_off_meanwhile() -> None:
    now, seen = dict(LEFT), list[dict[str, bool]]()

    async def script(server: Server) -> None:
        try:
            while True:
                command = await server.command()
                arguments: dict[str, Any] = command.get("arguments", {})
                match command["execute"]:
                    case "query-migrate-capabilities":
                        listed = [{"capability": name, "state": on} for name, on in now.items()]
                        await server.answer(command, listed)
                    case "migrate-set-capabilities":
                        given = {
                            one["capability"]: one["state"] for one in arguments["capabilities"]
                        }
                        now.update(given)
                        await server.answer(command, {})
                    case "query-migrate-parameters":
                        await server.answer(command, dict.fromkeys(PARAMETERS, 0))
                    case _:
                        await server.answer(command, {})
        except EOFError:
            return

    async def client(monitor: Monitor) -> None:
        async with saving(monitor, CAPABILITIES, PARAMETERS):
            seen.append(dict(now))

    play(script, client)
    assert seen == [LEFT | CAPABILITIES | {"multifd": False}]
    assert now == LEFT


def test_a_qemu_that_gives_state_without_end_fills_no_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that was broken into: all that it wrote in 10 s was kept."""
    monkeypatch.setattr(migrated, "MOST_STATE_BYTES", 1 << 20)
    monitor: Any = SimpleNamespace(label="web")

    async def main() -> None:
        with ExitStack() as at_last:
            with _received() as (writer, came):
                at_last.enter_context(open_fd(writer))

                def write() -> None:
                    with suppress(BrokenPipeError):
                        for _ in range(1000):
                            os.write(writer, bytes(1 << 16))

                writing = asyncio.ensure_future(asyncio.to_thread(write))
                with pytest.raises(OperationFailedError, match="did not deliver the state"):
                    await DeviceMigration(monitor, monitor, came).state()
                assert len(came.result()) <= (1 << 20) + PIPE_BYTES
            await writing  # the pipe has no reader any longer

    asyncio.run(main())


def test_nor_does_one_that_saves_devices_larger_than_any(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrated, "MOST_STATE_BYTES", 1 << 20)

    async def script(server: Server) -> None:
        await server.answer(await server.command(), {})

    async def client(monitor: Monitor) -> None:
        with _memory() as (fd, writer), monitor.events("RESET") as resets:
            head = LearnedHead(resets, has_only_roms=True)
            devices = Devices(monitor, (fd, writer), 1, head)
            saving_ = asyncio.ensure_future(devices.save())
            await asyncio.sleep(0)
            os.ftruncate(fd, 1 << 40)
            os.lseek(writer, 1 << 40, os.SEEK_SET)
            with pytest.raises(OperationFailedError, match="did not deliver the state"):
                await saving_

    play(script, client)
