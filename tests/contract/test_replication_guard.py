"""The guard beside a protected VM: what it is told, and that one that dies says why."""

import asyncio
import math
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vmckpt.epoch.guarding import guard_command
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes.process import identify
from vmckpt.lease.file_store import FileStore
from vmckpt.lease.lease import Lease
from vmckpt.lease.record import LeaseRecord, LeaseSpan
from vmckpt.lease.rule import Claimant
from vmckpt.lease.store import ArbiterDownError, Versioned
from vmckpt.memory.ram_file import open_fd
from vmckpt.qemu import commands
from vmckpt.qemu.monitor import MonitorLostError
from vmckpt.qemu.replies import RunState
from vmckpt.replicate.primary.keeper import TermKeeper
from vmckpt.replicate.primary.primary import _guarded
from vmckpt.replicate.primary.protection import Protection
from vmckpt.replicate.request import ServiceFiles
from vmckpt.vm.inventory import Vm
from vmckpt.vm.paths import vm_dir
from vmckpt.vm.record import Platform, Qemu
from vmckpt.vm.spec.spec import parse_spec

pytestmark = pytest.mark.contract


def test_it_says_what_it_died_of(tmp_path: Path) -> None:
    itself = identify(os.getpid())
    assert itself
    directory, files = vm_dir(tmp_path, "web"), ServiceFiles(tmp_path)
    spec = parse_spec('name = "web"\nmemory = "32M"\n', "test", tmp_path)
    qemu = Qemu(directory.qemu("0"), itself, Platform("q35", "tcg", "qemu64"))
    vm = Vm(spec, LocalHost("a", tmp_path, "127.0.0.1"), directory, qemu)
    with _guarded(guard_command(vm.qemu), files) as tell:  # there is no monitor
        assert "No such file" in _last_words(tell)


class Watched(FileStore):
    """Takes note of what the guard was told before a replica was entitled."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.told, self.told_before = list[str](), list[str]()

    async def replace(self, vm: str, record: LeaseRecord, *, over: int) -> Versioned:
        if record.in_sync is not None:
            self.told_before = [*self.told]
        return await super().replace(vm, record, over=over)


def test_nothing_stops_the_guest_before_anybody_may_take_over(tmp_path: Path) -> None:
    """A service that is killed in its first copy leaves a guest that runs, lease or not."""
    store = Watched(tmp_path)

    async def main() -> None:
        keeper = TermKeeper(Lease(store, "web", Claimant("a/1"), LeaseSpan(0.5)), store.told.append)
        await keeper.take(None)
        keeping = asyncio.ensure_future(keeper.keep())
        async with asyncio.timeout(20):
            while len(store.told) < 2:  # noqa: ASYNC110 - it renews
                await asyncio.sleep(0.01)
        keeping.cancel()
        await asyncio.wait({keeping})
        assert set(store.told) == {"inf"}
        assert await keeper.in_sync("b/1")

    asyncio.run(main())
    assert math.isfinite(float(store.told_before[-1]))
    assert math.isfinite(float(store.told[-1]))


def test_a_qemu_that_is_held_is_let_go_when_no_term_is_needed_any_more(tmp_path: Path) -> None:
    """Its service waits for its answer, and so never came to what ends the protection."""

    class Gone(FileStore):
        async def replace(self, vm: str, record: LeaseRecord, *, over: int) -> Versioned:
            if record.attempt > 2:
                raise ArbiterDownError("it is gone for good", why="a test's", remedy="-")
            return await super().replace(vm, record, over=over)

    told = list[str]()

    async def main() -> None:
        keeper = TermKeeper(
            Lease(Gone(tmp_path), "web", Claimant("a/1"), LeaseSpan(0.5)), told.append
        )
        await keeper.take(None)
        assert await keeper.in_sync("b/1")
        assert math.isfinite(float(told[-1]))
        keeper.continue_alone(is_certain=True)

    asyncio.run(main())
    assert told[-1] == "inf"


class Right:
    """A keeper whose lease can end, beside a guard that may be dead."""

    def __init__(self, *, has_guard: bool) -> None:
        self.has_guard, self.is_over = has_guard, False

    def must_stop(self) -> bool:
        return self.is_over


@pytest.mark.parametrize("has_guard", [True, False])
@pytest.mark.parametrize("answers", [True, False])
def test_the_service_stops_the_guest_too_when_its_lease_has_ended(
    monkeypatch: pytest.MonkeyPatch, *, has_guard: bool, answers: bool
) -> None:
    right, told = Right(has_guard=has_guard), list[str]()

    async def query_status(_monitor: object, _timeout_s: float) -> RunState:
        if not answers:
            raise MonitorLostError("silent", why="a test's", remedy="-")
        return RunState("running", "stop" not in told)

    async def stop(_monitor: object) -> None:
        told.append("stop")

    monkeypatch.setattr(commands, "query_status", query_status)
    monkeypatch.setattr(commands, "stop", stop)
    watching: Any = Protection.__new__(Protection)
    watching._keeper, watching._monitor = right, None
    with subprocess.Popen(["sleep", "60"]) as qemu, open_fd(os.pidfd_open(qemu.pid)) as pidfd:
        watching._handles = SimpleNamespace(pidfd=pidfd)

        async def main() -> None:
            task = asyncio.ensure_future(watching._stop_without_right())
            await asyncio.sleep(0.3)
            assert not told
            right.is_over = True
            await asyncio.sleep(0.5)
            task.cancel()

        asyncio.run(main())
        is_killed = qemu.poll() is not None
        qemu.kill()
    assert told == (["stop"] if answers else [])
    assert is_killed is (not answers and not has_guard)


def _last_words(tell: Callable[[str], None]) -> str:
    given_up_s = time.monotonic() + 30
    while time.monotonic() < given_up_s:
        try:
            tell("inf")
        except OSError as exc:
            return str(exc.strerror)
        time.sleep(0.02)
    return "it lives"
