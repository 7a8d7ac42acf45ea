"""A VM that is saved as a whole, or made of what was saved: when QEMU, or the store, fails."""

import asyncio
import os
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.scripted_qmp import Server, play
from vmckpt.checkpoint import whole as wholes
from vmckpt.checkpoint.facts import MAPPED_RAM
from vmckpt.checkpoint.requests import TakeOptions
from vmckpt.checkpoint.restore import restore as restores
from vmckpt.checkpoint.restore.whole_again import load_whole
from vmckpt.checkpoint.whole import _TakingWhole, resume_unsaved
from vmckpt.errors import HostDownError, OperationFailedError, RefusedError
from vmckpt.hosts.host import FreeMemory, Promise
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes import promises
from vmckpt.hosts.processes.process import ProcessId, identify
from vmckpt.qemu import commands
from vmckpt.qemu.monitor import CommandRefusedError, Monitor
from vmckpt.store.area import Area
from vmckpt.store.errors import DamagedError, damaged
from vmckpt.store.open import create_store
from vmckpt.vm import paths
from vmckpt.vm.inventory import Vm
from vmckpt.vm.paths import QemuDir, vm_dir
from vmckpt.vm.record import Platform, Qemu
from vmckpt.vm.spec.spec import parse_spec

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


MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Promising(LocalHost):
    """A host with 100 MiB of memory, all of it free, whose promises are in its own directory."""

    async def available_memory_bytes(self) -> int:
        return 100 * MIB

    async def promise_memory(self, promise: Promise, *, overcommit: bool) -> FreeMemory:
        shm = self.state_dir / "shm"
        give = promises.promise
        return give(promise, lambda: 100 * MIB, overcommit=overcommit, records_dir=shm)


@pytest.fixture
def promising(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Vm:
    """A VM beside another one that was promised 60 MiB, and has touched none of them."""
    shm = tmp_path / "shm"
    for module in (paths, wholes):
        monkeypatch.setattr(module, "IN_MEMORY", shm)
    (shm / "other").mkdir(parents=True)
    vm = a_vm(tmp_path, ProcessId(1, 1))
    host = Promising("a", tmp_path, "127.0.0.1")
    ram = shm / "other/ram"
    other = Promise(shm / "other/promised", 60 * MIB, ram, is_private=False, holder="")
    assert asyncio.run(host.promise_memory(other, overcommit=False)).is_given
    # It holds as long as the process that asked.
    return vm._replace(host=host)


def given(vm: Vm) -> list[int]:
    counting = promises._counting(paths.IN_MEMORY)
    return sorted(one.promise.size_bytes // MIB for _, one in counting)


@pytest.mark.parametrize(("size_mib", "fits"), [(30, True), (50, False)])
def test_what_is_restored_as_a_whole_takes_no_memory_that_others_were_promised(
    promising: Vm, monkeypatch: pytest.MonkeyPatch, size_mib: int, *, fits: bool
) -> None:
    """From an encrypted store its file is in memory for a while: guests that touched theirs then
    died of it.
    """
    seen = list[list[int]]()

    async def load(*_: object, **__: object) -> None:
        seen.append(given(promising))

    async def loaded() -> None:
        await promising.host.make_private_dir(promising.qemu.files.memory(paths.IN_MEMORY))
        work: Any = object.__new__(restores._Restoring)
        area = SimpleNamespace(numbers=lambda: range(size_mib << 8), chunk_bytes=4096)
        work._is_whole, work._host, work._files = True, promising.host, promising.qemu.files
        work._point = SimpleNamespace(area=lambda _: area)
        facts = SimpleNamespace(saved_as=MAPPED_RAM)
        work._planned = SimpleNamespace(facts=facts, spec=promising.spec)
        work._source = SimpleNamespace(secret=b"secret")
        await work._load(None, b"")

    monkeypatch.setattr(restores, "load_whole", load)
    if fits:
        asyncio.run(loaded())
        assert seen == [[30, 60]]
    else:
        with pytest.raises(RefusedError, match="no room"):
            asyncio.run(loaded())
        assert seen == []
    assert given(promising) == [60]


@pytest.mark.parametrize(("size_mib", "fits"), [(30, True), (50, False)])
def test_nor_does_what_is_saved_as_a_whole(
    promising: Vm, monkeypatch: pytest.MonkeyPatch, size_mib: int, *, fits: bool
) -> None:
    seen = list[list[int]]()

    async def save(*_: object, **__: object) -> float:
        seen.append(given(promising))
        return 0.1

    async def nothing(*_: object) -> dict[str, bool]:
        return {}

    @asynccontextmanager
    async def saving(*_: object) -> AsyncIterator[None]:
        yield

    monkeypatch.setattr(wholes, "_expected_bytes", lambda _: size_mib * MIB)
    monkeypatch.setattr(wholes, "saving", saving)
    monkeypatch.setattr(commands, "query_migrate_capabilities", nothing)
    monkeypatch.setattr(_TakingWhole, "_save", save)

    async def taken() -> None:
        files = promising.qemu.files
        await promising.host.make_private_dir(files.memory(paths.IN_MEMORY))
        wish = TakeOptions("one", {}, "test", 0.0)
        taking = _TakingWhole(promising, cast("Any", None), wish, cast("Any", nothing), print)
        taking.file = files.saved_file(in_memory=True)
        await taking._moment(cast("Any", None))

    if fits:
        asyncio.run(taken())
        assert seen == [[30, 60]]
    else:
        with pytest.raises(RefusedError, match="no room"):
            asyncio.run(taken())
        assert seen == []
    assert given(promising) == [60]
