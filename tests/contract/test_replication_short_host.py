"""A standby whose host has no free thread or descriptor for a moment: it has the only guest."""

import asyncio
import fcntl
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Coroutine
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tests.waiting_qemu import it_waits
from vmckpt.errors import OutcomeUnknownError
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes.process import identify, is_alive
from vmckpt.lease.etcd_store import EtcdStore
from vmckpt.lease.file_store import FileStore
from vmckpt.lease.gateway import Gateway
from vmckpt.lease.lease import HeldTerm, Lease
from vmckpt.lease.record import LeaseSpan
from vmckpt.lease.rule import Claimant
from vmckpt.lease.standby import StandbyMove
from vmckpt.lease.store import ArbiterDownError
from vmckpt.memory.ram_file import PAGE_BYTES, open_fd
from vmckpt.replicate.disks.image import WritableImage
from vmckpt.replicate.disks.journal import DisksJournal
from vmckpt.replicate.fencing.agent import this_machine
from vmckpt.replicate.standby import takeover, warm
from vmckpt.replicate.standby.replica import Replica
from vmckpt.replicate.standby.takeover import TakeOver
from vmckpt.replicate.standby.warm import Warm
from vmckpt.replicate.wire.epoch import ReceivedEpoch
from vmckpt.replicate.wire.messages import DiskWrite, Process
from vmckpt.replicate.wire.pages import PageBatch, as_words
from vmckpt.vm.record import Qemu


class Threads:
    """Of the host: `refused` more are not started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refused, real = 0, threading.Thread.start

        def start(thread: threading.Thread) -> None:
            if self.refused:
                self.refused -= 1
                raise RuntimeError("can't start new thread")
            real(thread)

        monkeypatch.setattr(threading.Thread, "start", start)


def silent_primary(
    tmp_path: Path, host: LocalHost, *, one_machine: bool
) -> tuple[Lease, Callable[[Process], Coroutine[Any, Any, StandbyMove]]]:
    """A standby's lease, and its takeover from a primary that is silent, and named a process."""
    store, span = FileStore(tmp_path / "leases"), LeaseSpan(0.5)
    primary = Lease(store, "web", Claimant("a/1"), span)
    standby = Lease(store, "web", Claimant("b/1", replica="b/1"), span)
    request: Any = SimpleNamespace(
        options=SimpleNamespace(fence=()), primary=host, one_machine=one_machine
    )
    replica: Any = SimpleNamespace(complete=True, is_applying=False, disks=DisksJournal(()))

    async def settled(emitter: Process) -> StandbyMove:
        await primary.take()
        await primary.record_in_sync("b/1")
        hello = SimpleNamespace(machine=this_machine(), emitters=(emitter,))
        gone: Any = SimpleNamespace(
            heard_s=0.0, epoch_s=0.0, hello=hello, term=1, why="", heard_by_path_s=lambda: (0.0,),
            second=SimpleNamespace(diagnosis=lambda _: "a is silent"),
        )  # fmt: skip
        taking = TakeOver(request, standby, replica, gone, asyncio.Event(), lack=it_waits)
        receiving: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        async with asyncio.timeout(20):
            return await taking.settled(receiving)

    return standby, settled


@pytest.mark.parametrize("short_of", ["threads", "descriptors"])
def test_a_primary_that_cannot_be_fenced_for_a_moment_takes_no_guest_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short_of: str
) -> None:
    """The standby's service ended for it, when it had the term, and with that the guest."""
    threads = Threads(monkeypatch)
    host = LocalHost("a", tmp_path / "a", "127.0.0.1")
    standby, settled = silent_primary(tmp_path, host, one_machine=True)
    claim = standby.claim

    def no_descriptor() -> str:
        raise OSError(24, "Too many open files")

    async def claimed() -> HeldTerm:
        held = await claim()
        if short_of == "threads":
            threads.refused = 1
        else:
            monkeypatch.setattr(takeover, "this_machine", no_descriptor)
        return held

    monkeypatch.setattr(standby, "claim", claimed)

    with subprocess.Popen(["sleep", "60"]) as process:
        found = identify(process.pid)
        assert found is not None
        try:
            emitter = Process(found.pid, found.start_ticks)
            assert asyncio.run(settled(emitter)) is StandbyMove.PROMOTE
            assert is_alive(found) is (short_of == "threads")  # then its lease was waited out
        finally:
            process.kill()


def test_a_primary_on_another_machine_has_no_process_killed_here(tmp_path: Path) -> None:
    """Its host was broken into, and says that its processes are some of this machine's."""
    elsewhere = LocalHost("a", tmp_path / "a", "192.0.2.1")
    _, settled = silent_primary(tmp_path, elsewhere, one_machine=False)
    with subprocess.Popen(["sleep", "60"]) as process:
        found = identify(process.pid)
        assert found is not None
        try:
            emitter = Process(found.pid, found.start_ticks)
            assert asyncio.run(settled(emitter)) is StandbyMove.PROMOTE  # its lease was waited out
            assert is_alive(found)
        finally:
            process.kill()


def test_a_process_is_not_said_to_have_ended_without_a_thread_to_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, threads = LocalHost("a", tmp_path / "a", "127.0.0.1"), Threads(monkeypatch)

    async def main() -> None:
        found = identify(process.pid)
        assert found is not None
        for work in (host.kill, host.stop_for_good):
            threads.refused = 1
            with pytest.raises(OutcomeUnknownError, match="can't start new thread"):
                await work(found)
            assert is_alive(found)
        assert await host.stop_for_good(found)

    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            asyncio.run(main())
        finally:
            process.kill()


def test_an_etcd_whose_name_no_thread_can_look_up_gives_no_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = Threads(monkeypatch)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://localhost:{server.getsockname()[1]}"
        store = EtcdStore([Gateway(url)], timeout_s=0.2)

        async def main() -> None:
            threads.refused = 1000
            with pytest.raises(ArbiterDownError, match="can't start new thread"):
                await store.read("web")
            threads.refused = 0

        asyncio.run(main())


def test_what_is_acknowledged_is_applied_as_soon_as_there_is_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it is not there when its primary is dead."""
    path, threads = tmp_path / "disk.raw", Threads(monkeypatch)
    path.write_bytes(bytes(PAGE_BYTES))
    page = np.ones(512, dtype="<u8")
    nothing = np.zeros(0, dtype=np.int64)
    batch = PageBatch(
        nothing, nothing, np.zeros(0, dtype=bool), np.zeros(0, dtype="<u8"),
        np.array([0]), as_words(page.tobytes()), int(page.sum()),
    )  # fmt: skip
    ram = bytearray(PAGE_BYTES)

    async def main() -> None:
        with path.open("r+b") as file:
            journal = DisksJournal([(path, WritableImage(file.fileno(), PAGE_BYTES))])
            replica = Replica(as_words(memoryview(ram)), journal)
            epoch = ReceivedEpoch(1, 1, 0, (batch,), b"", b"devices", (DiskWrite(0, 0, b"disk"),))
            threads.refused = 2
            await replica.apply(epoch)
            threads.refused = 2
            await journal.applied()
            assert replica.complete

    asyncio.run(main())
    assert bytes(ram) == page.tobytes()
    assert path.read_bytes()[:4] == b"disk"


def test_a_large_device_state_waits_for_a_thread_that_feeds_it_to_qemu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than the pipe holds: it cannot be written before QEMU reads."""
    threads = Threads(monkeypatch)
    reader, writer = os.pipe()
    device_state = bytes(range(256)) * (fcntl.fcntl(writer, fcntl.F_GETPIPE_SZ) // 128)
    read = bytearray()

    async def has_loaded(*_: object) -> bool:
        while len(read) < len(device_state):
            await asyncio.sleep(0.01)
            with suppress(BlockingIOError):
                read.extend(os.read(reader, 1 << 20))
        return True

    async def load() -> None:
        monitor: Any = SimpleNamespace(events=lambda *_: nullcontext())
        spec: Any = SimpleNamespace(name="web")
        host, no_qemu = LocalHost("b", tmp_path, "127.0.0.1"), cast("Qemu", None)
        threads.refused = 2
        await asyncio.wait_for(Warm(host, spec, no_qemu, monitor, writer).load(device_state), 10)

    monkeypatch.setattr(warm, "has_loaded", has_loaded)
    os.set_blocking(reader, False)
    with open_fd(reader):
        asyncio.run(load())
    assert (bytes(read), threads.refused) == (device_state, 0)
