"""The QEMU that waits on the standby, when it is to let its guest run."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from tests.scripted_qmp import Server, play
from vmckpt.errors import OperationFailedError
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes.process import ProcessId
from vmckpt.qemu.monitor import Monitor
from vmckpt.replicate.standby import warm
from vmckpt.replicate.standby.warm import Warm
from vmckpt.vm.paths import vm_dir
from vmckpt.vm.record import Platform, Qemu
from vmckpt.vm.spec.spec import parse_spec

pytestmark = pytest.mark.contract

LOCKED = 'Failed to get "write" lock'


def waiting(tmp_path: Path, monitor: Monitor) -> Warm:
    spec = parse_spec('name = "web"\nmemory = "32M"\n', "test", tmp_path)
    files = vm_dir(tmp_path, "web").qemu("1")
    qemu = Qemu(files, ProcessId(1, 1), Platform("q35", "tcg", "qemu64"))
    reader, writer = os.pipe()
    os.close(reader)
    return Warm(LocalHost("b", tmp_path, "127.0.0.1"), spec, qemu, monitor, writer)


def test_a_guest_whose_disks_are_still_held_runs_a_moment_later(tmp_path: Path) -> None:
    async def script(server: Server) -> None:
        for _ in range(3):
            await server.refuse(await server.command(), LOCKED)
        await server.answer(await server.command(), {})

    async def client(monitor: Monitor) -> None:
        await waiting(tmp_path, monitor).run()

    play(script, client)


def test_a_guest_that_cannot_run_is_said_to_stand_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm, "RUN_S", 0.1)

    async def script(server: Server) -> None:
        try:
            while True:
                await server.refuse(await server.command(), LOCKED)
        except EOFError:
            return

    async def client(monitor: Monitor) -> None:
        with pytest.raises(OperationFailedError, match="'web' is on b and is paused") as raised:
            await waiting(tmp_path, monitor).run()
        assert raised.value.why == LOCKED
        assert raised.value.remedy.endswith("vmckpt vm start web")

    play(script, client)


def test_a_home_that_a_power_cut_might_undo_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its QEMU, the only one that has the guest, was ended for it, and the home removed."""

    def fails(_: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(warm, "sync_directory", fails)
    no_monitor: Any = None
    standby = waiting(tmp_path, no_monitor)
    home = standby.directory.current
    home.parent.mkdir(parents=True)
    home.with_name(".vm.json.ready").write_text("{}")
    standby.settle_here()
    assert home.read_text() == "{}"
