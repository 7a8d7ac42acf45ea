"""A VM that is saved as a whole, or made of what was saved: when QEMU, or the store, fails."""

import asyncio
import os
import tracemalloc
from pathlib import Path
from typing import Any, cast

import pytest

from tests.scripted_qmp import Server, play
from vmckpt.checkpoint.requests import TakeOptions
from vmckpt.checkpoint.restore.whole_again import load_whole
from vmckpt.checkpoint.whole import _TakingWhole, resume_unsaved
from vmckpt.errors import HostDownError, OperationFailedError
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes.process import ProcessId, identify
from vmckpt.qemu.monitor import CommandRefusedError, Monitor
from vmckpt.store.area import Area
from vmckpt.store.errors import DamagedError, damaged
from vmckpt.store.open import create_store
from vmckpt.vm.argv import Platform
from vmckpt.vm.inventory import Vm
from vmckpt.vm.paths import QemuDir, vm_dir
from vmckpt.vm.spec.spec import parse_spec
from vmckpt.vm.start import Qemu

pytestmark = pytest.mark.contract


def a_vm(folder: Path, process: ProcessId) -> Vm:
    spec = parse_spec('name = "web"\nmemory = "32M"\n', "test", folder)
    directory = vm_dir(folder, "web")
    qemu = Qemu(directory.qemu("1"), process, Platform("q35", "tcg", "qemu64"))
    qemu.files.path.mkdir(parents=True)
    return Vm(spec, LocalHost("a", folder, "127.0.0.1"), directory, qemu)


def test_a_guest_that_could_not_be_saved_is_let_run_whatever_qemu_says(tmp_path: Path) -> None:
    vm = a_vm(tmp_path, ProcessId(1, 1))
    vm.directory.saving.touch()
    told: list[str] = []

    async def script(server: Server) -> None:
        command = await server.command()
        told.append(command["execute"])
        await server.refuse(command, "something is stuck")
        command = await server.command()
        told.append(command["execute"])
        await server.answer(command, {})

    async def client(monitor: Monitor) -> None:
        wish = TakeOptions("one", {}, "test", 0.0)
        taking = _TakingWhole(vm, monitor, wish, cast("Any", None), print)
        with pytest.raises(CommandRefusedError, match="stuck"):
            await taking._undone()

    play(script, client)
    assert told == ["query-migrate", "cont"]
    # Whoever comes next tries again.
    assert vm.directory.saving.exists()


def test_a_guest_whose_qemu_does_not_answer_stays_marked_as_one_to_be_let_run(
    tmp_path: Path,
) -> None:
    itself = identify(os.getpid())
    assert itself is not None
    vm = a_vm(tmp_path, itself)
    vm.directory.saving.touch()
    with pytest.raises(HostDownError):
        asyncio.run(resume_unsaved(vm))
    assert vm.directory.saving.exists()
    gone = vm._replace(qemu=vm.qemu._replace(process=ProcessId(1 << 22, 1)))
    vm.qemu.files.saved_file(in_memory=False).touch()
    asyncio.run(resume_unsaved(gone))
    assert not vm.directory.saving.exists()
    assert not vm.qemu.files.saved_file(in_memory=False).exists()


def test_a_saved_file_that_its_qemu_has_stretched_takes_no_memory(tmp_path: Path) -> None:
    """By its size it would: some bytes for each page, and a hole has any number of them."""
    vm = a_vm(tmp_path, ProcessId(1, 1))
    taking = _TakingWhole(
        vm, cast("Any", None), TakeOptions("one", {}, "t", 0.0), cast("Any", None), print
    )
    taking.file = tmp_path / "saved"
    taking.file.touch()
    os.truncate(taking.file, 1 << 38)
    tracemalloc.start()
    try:
        with (
            create_store(str(tmp_path / "store")) as store,
            store.begin("vm") as new,
            pytest.raises(OperationFailedError, match="cannot be stored"),
        ):
            taking._store(new)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


class Damaged:
    """What was saved, and what the store cannot give any longer."""

    chunk_count = 1
    size_bytes = 4096

    def read(self, _: object) -> bytes:
        raise damaged("a pack is not what was written", "a bit of it")


def test_damage_in_what_was_saved_is_told_as_damage(tmp_path: Path) -> None:
    async def script(server: Server) -> None:
        for _ in range(3):  # getfd, migrate-set-capabilities, migrate-incoming
            await server.answer(await server.command(), {})
        # The stream has ended too early.
        event = {"event": "MIGRATION", "data": {"status": "failed"}}
        await server.send(event | {"timestamp": {"seconds": 0, "microseconds": 0}})

    async def client(monitor: Monitor) -> None:
        with pytest.raises(DamagedError, match="not what was written"):
            area, files = cast("Area", Damaged()), QemuDir(tmp_path, "guest", "12345678")
            await load_whole(monitor, area, files, mapped=False, file=tmp_path / "x")

    play(script, client)
