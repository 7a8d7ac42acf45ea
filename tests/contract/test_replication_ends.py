"""What the services of a replication do without a VM: frames, words, a replica's memory."""

import asyncio
import errno
import itertools
import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.waiting_qemu import it_has_ended, it_waits
from vmckpt.drivers.direct import DirectVm
from vmckpt.epoch.epoch import Pages
from vmckpt.errors import HostDownError, OperationFailedError, RefusedError
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes.process import ProcessId, identify, is_alive
from vmckpt.lease.clock import boottime_s
from vmckpt.lease.file_store import FileStore
from vmckpt.lease.lease import Lease
from vmckpt.lease.record import LeaseSpan
from vmckpt.lease.rule import Claimant
from vmckpt.lease.standby import StandbyMove
from vmckpt.memory.ram_file import PAGE_BYTES, mapped, open_fd
from vmckpt.options.migration import MigrationOptions
from vmckpt.options.replication import ReplicationOptions
from vmckpt.qemu.monitor import MonitorLostError
from vmckpt.replicate import channel
from vmckpt.replicate.channel import Channel
from vmckpt.replicate.control import answering, ask
from vmckpt.replicate.disks.image import WritableImage
from vmckpt.replicate.disks.journal import DisksJournal
from vmckpt.replicate.fencing.agent import FencingProof, Target
from vmckpt.replicate.operator.operate import require_decided
from vmckpt.replicate.operator.stop import stop
from vmckpt.replicate.paths import SecondPath
from vmckpt.replicate.primary import keeper, primary
from vmckpt.replicate.primary import stream as stream_module
from vmckpt.replicate.primary.ending import ProtectionEnding
from vmckpt.replicate.primary.keeper import TermKeeper
from vmckpt.replicate.primary.protection import Protection
from vmckpt.replicate.primary.stream import EpochStream, StandbyLostError
from vmckpt.replicate.request import ReplicationRequest, ServiceFiles
from vmckpt.replicate.standby import takeover
from vmckpt.replicate.standby.following import Following
from vmckpt.replicate.standby.replica import replica_in
from vmckpt.replicate.standby.takeover import SILENCE_S, TakeOver
from vmckpt.replicate.status import ReplicaStatus, Role
from vmckpt.replicate.wire.beats import Hearing, Sender
from vmckpt.replicate.wire.epoch import Assembler, Composer, ReceivedEpoch
from vmckpt.replicate.wire.errors import DamagedFrameError
from vmckpt.replicate.wire.frames import HEAD_BYTES, Buffer, FrameKind, Inbound, Outbound
from vmckpt.replicate.wire.messages import (
    PROTOCOL,
    Begin,
    DiskWrite,
    Failure,
    Hello,
    Welcome,
    decode_failure,
)
from vmckpt.replicate.wire.pages import Encoder, Shadow, as_words
from vmckpt.vm.inventory import Vm
from vmckpt.vm.paths import vm_dir
from vmckpt.vm.record import Platform, Qemu
from vmckpt.vm.spec.spec import parse_spec

PAGES = 256
TEXT = 'name = "web"\nmemory = "32M"\n'


@pytest.fixture
def ram_path() -> Iterator[Path]:
    with NamedTemporaryFile(dir="/dev/shm", prefix="vk-test-") as file:
        file.truncate(PAGES * PAGE_BYTES)
        yield Path(file.name)


async def _pair() -> tuple[Channel, Channel]:
    ours, theirs = socket.socketpair()
    return (
        Channel(*await asyncio.open_connection(sock=ours), term=7),
        Channel(*await asyncio.open_connection(sock=theirs), term=7),
    )


def test_frames_come_as_they_were_sent_and_the_end_is_told() -> None:
    async def talk() -> None:
        ours, theirs = await _pair()
        await ours.fail(Failure("stopped", "what", "why", "-"))
        head, payload = await theirs.receive()
        assert (head.kind, head.term) == (FrameKind.FAILURE, 7)
        assert decode_failure(payload).kind == "stopped"
        ours.abort()
        with pytest.raises(HostDownError):
            await theirs.receive()
        with pytest.raises(HostDownError):
            for _ in range(100):
                await theirs.fail(Failure("a", "b", "c", "d"))
                await asyncio.sleep(0.01)
        theirs.abort()

    asyncio.run(talk())


def test_a_primary_of_another_protocol_is_refused_by_name() -> None:
    async def talk() -> None:
        ours, theirs = await _pair()
        second = SecondPath(Hearing(Sender.STANDBY, b"key"), "a", lacks="a has one address only")
        anything: Any = None
        following = Following("b/1", anything, anything, second)
        # Its progress is that of no replica here.
        following._progress = int  # type: ignore[method-assign]
        receiving = asyncio.ensure_future(following.receive(theirs))
        hello = Hello("web", "a/1", "a", "machine", PAGES * PAGE_BYTES, protocol=4)
        await ours.send(ours.outbound.frame(FrameKind.HELLO, 0, hello.encode()))
        head, payload = await ours.receive()
        said = decode_failure(payload)
        assert head.kind is FrameKind.FAILURE
        assert said.what == "primary and standby speak different protocols"
        assert said.why == f"the other side's HELLO is of protocol 4, here is {PROTOCOL}"
        assert said.remedy == "install the same vmckpt on both hosts"
        assert await receiving == channel.ALONE
        ours.abort()
        theirs.abort()

    asyncio.run(talk())


@asynccontextmanager
async def _greeting(tmp_path: Path) -> AsyncIterator[tuple["asyncio.Task[Welcome]", Channel]]:
    """A primary that has said HELLO, and the standby's end of its connection."""
    host, spec = LocalHost("a", tmp_path, "192.0.2.1"), parse_spec(TEXT, "test", tmp_path)
    request = ReplicationRequest(
        run="1", vm="web", spec=spec.text, platform=Platform("q35", "tcg", "qemu64"), primary=host,
        standby=LocalHost("b", tmp_path, "192.0.2.2"), options=ReplicationOptions("/leases"),
        one_machine=False, qemu_id="0",
    )  # fmt: skip
    second = SecondPath(Hearing(Sender.PRIMARY, b"key"), "b", lacks="a has one address only")
    process = identify(os.getpid())
    assert process is not None
    directory = vm_dir(host.state_dir, "web")
    vm = Vm(spec, host, directory, Qemu(directory.qemu("0"), process, request.platform))
    ours, theirs = await _pair()
    try:
        greeting = asyncio.ensure_future(primary._greet(ours, request, vm, second))
        head, _ = await theirs.receive()
        assert head.kind is FrameKind.HELLO
        yield greeting, theirs
    finally:
        ours.abort()
        theirs.abort()


@pytest.mark.parametrize("name", ["c/7", "b/1/abandon/3", "x" * 900_000])
def test_a_standby_is_known_by_its_own_name_alone(tmp_path: Path, name: str) -> None:
    """The arbiter has the name: one of 1 MiB would be a record that no side can read."""

    async def greeted(name: str) -> str:
        async with _greeting(tmp_path) as (greeting, theirs):
            await theirs.send(theirs.outbound.frame(FrameKind.WELCOME, 0, Welcome(name).encode()))
            return (await greeting).replica

    assert asyncio.run(greeted("b/1")) == "b/1"
    with pytest.raises(OperationFailedError, match="does not accept") as refused:
        asyncio.run(greeted(name))
    assert len(refused.value.why) < 200


@pytest.mark.parametrize(
    ("beats", "most_s", "is_welcome"),
    [(True, 60.0, True), (False, 60.0, False), (True, 0.5, False)],
)
def test_a_standby_may_reserve_memory_for_as_long_as_it_says_that_it_is_there(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    beats: bool,
    most_s: float,
    is_welcome: bool,
) -> None:
    """That took more than a minute for a guest of some hundred GiB: it could not be protected."""
    monkeypatch.setattr(primary, "HELLO_S", 0.3)
    monkeypatch.setattr(primary, "LEAST_RESERVED_BYTES_PER_S", (32 << 20) / most_s)
    monkeypatch.setattr(channel, "HEARTBEAT_S", 0.05)

    async def greeted() -> str:
        async with _greeting(tmp_path) as (greeting, theirs):
            reserving = asyncio.sleep(1.2)
            await (theirs.alive_during(reserving) if beats else reserving)
            await theirs.send(theirs.outbound.frame(FrameKind.WELCOME, 0, Welcome("b/1").encode()))
            return (await greeting).replica

    if is_welcome:
        assert asyncio.run(greeted()) == "b/1"
    else:
        with pytest.raises(HostDownError, match="does not accept"):
            asyncio.run(greeted())


def test_a_flipped_bit_is_found() -> None:
    async def talk() -> None:
        ours, theirs = await _pair()
        frame = ours.outbound.frame(FrameKind.ACK, 3, [b"payload"])
        frame[-1] = b"paxload"
        await ours.send(frame)
        with pytest.raises(DamagedFrameError):
            await theirs.receive()
        ours.abort()
        theirs.abort()

    asyncio.run(talk())


def test_a_service_answers_and_one_that_has_ended_is_no_answer(tmp_path: Path) -> None:
    host = LocalHost("a", tmp_path, "127.0.0.1")
    files = ServiceFiles.of(host, "web")
    files.path.mkdir(parents=True)

    async def answer(word: str) -> ReplicaStatus:
        return ReplicaStatus(role=Role.PRIMARY, state="protected", why=word)

    async def talk() -> None:
        async with answering(files.control, answer):
            assert (await ask(host, files, "status")).why == "status"
            assert (await ask(host, files, "stop")).why == "stop"
        with pytest.raises(HostDownError):
            await ask(host, files, "status")

    asyncio.run(talk())


@pytest.mark.parametrize("words", ["x" * 400_000, "\N{GRINNING FACE}" * 30_000])
def test_a_service_answers_whatever_the_other_side_says_at_its_end(
    tmp_path: Path, words: str
) -> None:
    """A status that is too long is none: `stop` and `start` would take the service for silent."""
    host = LocalHost("a", tmp_path, "127.0.0.1")
    files = ServiceFiles.of(host, "web")
    files.path.mkdir(parents=True)

    async def talk() -> None:
        ours, theirs = await _pair()
        stream = EpochStream(ours, _keeper(tmp_path), PAGES * PAGE_BYTES, lambda: None)

        async def answer(_word: str) -> ReplicaStatus:
            return ReplicaStatus(role=Role.PRIMARY, state="alone", why=stream.why)

        await theirs.fail(Failure("alone", words, words, "-"))
        with pytest.raises(StandbyLostError):
            await stream.receive()
        async with answering(files.control, answer):
            said = (await ask(host, files, "status")).why
        assert said is not None
        assert said.startswith(words[:1000])
        ours.abort()
        theirs.abort()

    asyncio.run(talk())


def test_who_asked_before_a_service_ends_is_answered(tmp_path: Path) -> None:
    host = LocalHost("a", tmp_path, "127.0.0.1")
    files = ServiceFiles.of(host, "web")
    files.path.mkdir(parents=True)

    async def talk() -> None:
        ended, asked, told = asyncio.Event(), asyncio.Event(), list[str]()

        async def answer(word: str) -> ReplicaStatus:
            asked.set()
            await ended.wait()
            await asyncio.sleep(0.05)  # the service is closing meanwhile
            told.append(word)
            return ReplicaStatus(role=Role.PRIMARY, state="ended", why=word)

        async with answering(files.control, answer):
            answered = asyncio.ensure_future(ask(host, files, "stop"))
            await asked.wait()
            ended.set()
        assert told == ["stop"]  # before the block ends, and with it the service
        assert (await answered).why == "stop"

    asyncio.run(talk())


def test_a_standby_whose_primary_is_silent_is_not_stopped(tmp_path: Path) -> None:
    host = LocalHost("a", tmp_path, "127.0.0.1")
    files = ServiceFiles.of(host, "web")

    async def answer(_word: str) -> ReplicaStatus:
        return ReplicaStatus(role=Role.STANDBY, state="following")

    async def main() -> None:
        await host.make_dir(files.path)
        files.request.write_text("{}")
        async with answering(files.control, answer):
            with pytest.raises(RefusedError) as refused:
                await stop("web", [host])
        assert refused.value.remedy == "vmckpt replicate failover web"

    asyncio.run(main())
    assert files.request.exists()


def test_a_vm_whose_standby_may_go_on_with_it_is_neither_started_nor_moved(
    tmp_path: Path,
) -> None:
    host = LocalHost("a", tmp_path, "127.0.0.1")
    files, directory = ServiceFiles.of(host, "web"), vm_dir(tmp_path, "web")
    spec = parse_spec('name = "web"\nmemory = "32M"\n', "test", tmp_path)
    qemu = Qemu(directory.qemu("0"), ProcessId(1, 1), Platform("q35", "tcg", "qemu64"))
    vm = Vm(spec, host, directory, qemu)
    files.path.mkdir(parents=True)
    files.request.write_text('{"primary": {"name": "a"}, "vm": "web", "run": "1"}')
    elsewhere, options = LocalHost("b", tmp_path / "b", "127.0.0.1"), MigrationOptions(offline=True)
    for begun in (
        lambda: DirectVm(vm).start(),
        lambda: DirectVm(vm).migrate(elsewhere, options, lambda _: None),
        lambda: DirectVm(vm).examine(elsewhere, options),
    ):
        with pytest.raises(RefusedError, match="may be about to take over"):
            asyncio.run(begun())
    files.status.write_text('{"role": "primary", "state": "ended"}')
    asyncio.run(require_decided(vm))


def test_a_primary_without_its_guard_ends_its_protection(tmp_path: Path) -> None:
    lease = Lease(FileStore(tmp_path), "web", Claimant("a/1"), LeaseSpan(1.0))

    def gone(line: str) -> None:
        raise BrokenPipeError(line)

    async def main() -> None:
        keeper = TermKeeper(lease, gone)
        await keeper.take(None)
        async with asyncio.timeout(10):
            with pytest.raises(OperationFailedError, match="guard"):
                await keeper.keep()
        assert await keeper.solo()  # and the guest's output can be let go

    asyncio.run(main())


def test_a_replica_is_what_was_sent_epoch_by_epoch(ram_path: Path) -> None:
    content = np.frombuffer(os.urandom(8 * PAGE_BYTES), dtype="<u8").reshape(8, -1)
    numbers = np.arange(10, 18)
    composer = Composer(Outbound(1), Encoder(Shadow(PAGES)))
    assembler = Assembler(PAGES, (), last=0)
    with mapped(ram_path) as ram:
        ram.write([(0, PAGE_BYTES)], b"x" * PAGE_BYTES)  # what a new QEMU may leave there
    with mapped(ram_path) as ram, replica_in(ram, DisksJournal([])) as replica:
        ram.reserve()
        assert ram_path.stat().st_blocks * 512 == PAGES * PAGE_BYTES
        for number, state in ((1, b""), (2, b"devices")):
            frames = [composer.begin(number, Begin(number - 1, 8, 0))]
            frames += composer.pages(numbers, content + number)
            frames += [*composer.device(state), composer.commit()]
            epoch = None
            for frame in frames:
                epoch = _taken(assembler, frame)
            assert epoch is not None
            asyncio.run(replica.apply(epoch))
            assert replica.complete == bool(state)
        expected = np.zeros((PAGES, PAGE_BYTES // 8), dtype="<u8")
        expected[numbers] = content + 2
        assert np.array_equal(as_words(ram_path.read_bytes()), expected)
        assert (replica.epoch, replica.device_state) == (2, b"devices")


def _taken(assembler: Assembler, frame: list[Buffer]) -> ReceivedEpoch | None:
    data = b"".join(bytes(part) for part in frame)
    inbound = Inbound(0)
    inbound.sequence = int.from_bytes(data[24:28])
    return assembler.take(inbound.head(data[:HEAD_BYTES]), memoryview(data)[HEAD_BYTES:])


@asynccontextmanager
async def _over_a_relay(bytes_per_s: float) -> AsyncIterator[tuple[Channel, Channel]]:
    """Two ends, and from the first to the second a link of so many bytes a second."""
    (ours, near), (far, theirs) = socket.socketpair(), socket.socketpair()
    for end in (ours, near, far, theirs):
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, 4096)
    left = await asyncio.open_connection(sock=near, limit=4096)
    right = await asyncio.open_connection(sock=far, limit=4096)

    async def relay(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter, bytes_per_s: float
    ) -> None:
        while some := await reader.read(4096):
            writer.write(some)
            await writer.drain()
            await asyncio.sleep(len(some) / bytes_per_s)

    tasks = [
        asyncio.ensure_future(relay(left[0], right[1], bytes_per_s)),
        asyncio.ensure_future(relay(right[0], left[1], 1e9)),
    ]
    one = Channel(*await asyncio.open_connection(sock=ours), term=7)
    other = Channel(*await asyncio.open_connection(sock=theirs), term=7)
    try:
        yield one, other
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for end_of in (one, other):
            end_of.abort()
        for _, writer in (left, right):
            writer.transport.abort()
        await asyncio.sleep(0)


def _keeper(directory: Path) -> TermKeeper:
    return TermKeeper(
        Lease(FileStore(directory), "web", Claimant("a/1"), LeaseSpan(60.0)), lambda _: None
    )


@pytest.mark.parametrize("number", [1, 2, 1 << 60])
def test_what_was_not_sent_is_not_acknowledged(tmp_path: Path, number: int) -> None:
    """It would let out what no standby has."""

    async def main() -> None:
        ours, theirs = await _pair()
        terms = _keeper(tmp_path)
        stream = EpochStream(ours, terms, PAGES * PAGE_BYTES, lambda: None)
        await stream.commit(Pages((), b""))
        await theirs.send(theirs.outbound.frame(FrameKind.ACK, 1, []))
        await theirs.send(theirs.outbound.frame(FrameKind.ACK, number, []))
        with pytest.raises(StandbyLostError, match="comes unasked"):
            await stream.receive()
        assert terms.acknowledged == 1
        ours.abort()
        theirs.abort()

    asyncio.run(main())


def test_an_epoch_that_takes_long_on_the_wire_is_no_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Patience counts from the last progress; heartbeats go on in between, both ways."""
    monkeypatch.setattr(channel, "PATIENCE_S", 0.5)
    monkeypatch.setattr(keeper, "PATIENCE_S", 0.5)
    monkeypatch.setattr(channel, "HEARTBEAT_S", 0.05)

    async def main() -> None:
        async with _over_a_relay(1 << 20) as (ours, theirs):
            stream = EpochStream(ours, _keeper(tmp_path), PAGES * PAGE_BYTES, lambda: None)
            beats = 0

            async def standby() -> None:
                nonlocal beats
                while True:
                    head, _ = await theirs.receive()
                    beats += head.kind is FrameKind.HEARTBEAT
                    if head.kind is FrameKind.COMMIT:
                        theirs.put(theirs.outbound.frame(FrameKind.ACK, head.epoch, []))

            work = (standby(), theirs.beat(), stream.beat(), stream.receive())
            tasks = [asyncio.ensure_future(one) for one in work]
            for _ in range(2):  # a second each
                data = os.urandom(PAGES * PAGE_BYTES)
                number = await stream.commit(Pages(((0, len(data)),), data), (b"", b"devices"))
                await stream.acknowledged(number)
            assert beats > 5
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())


def test_a_connection_that_was_left_with_a_word_is_not_lost(tmp_path: Path) -> None:
    async def end(*, with_a_word: bool) -> bool:
        ours, theirs = await _pair()
        stream = EpochStream(ours, _keeper(tmp_path), PAGES * PAGE_BYTES, lambda: None)
        if with_a_word:
            await stream.end("stopped", "asked for")
        theirs.abort()
        with pytest.raises(StandbyLostError):
            await stream.receive()
        await stream.end("alone", "said after it was lost")
        ours.abort()
        return stream.is_lost

    assert asyncio.run(end(with_a_word=False))
    assert not asyncio.run(end(with_a_word=True))


def test_a_standby_that_takes_nothing_is_given_up_after_its_time_not_twice_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "PATIENCE_S", 2.0)

    async def main() -> None:
        async with _over_a_relay(1.0) as (ours, _):
            stream = EpochStream(ours, _keeper(tmp_path), PAGES * PAGE_BYTES, lambda: None)
            began_s = asyncio.get_running_loop().time()
            with pytest.raises(HostDownError, match="has ended"):
                for _ in range(8):
                    data = os.urandom(PAGES * PAGE_BYTES)
                    await stream.pages(Pages(((0, len(data)),), data))
            assert asyncio.get_running_loop().time() - began_s < 3.8

    asyncio.run(main())


def test_a_standby_that_reads_nothing_and_says_that_it_gets_on_delays_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guest's output is held until the end was said."""
    monkeypatch.setattr(stream_module, "PATIENCE_S", 0.5)

    async def main() -> None:
        ours, theirs = await _pair()
        stream = EpochStream(ours, _keeper(tmp_path), PAGES * PAGE_BYTES, lambda: None)
        progress = itertools.count(1)
        theirs.progress = lambda: next(progress)
        monkeypatch.setattr(channel, "HEARTBEAT_S", 0.05)
        tasks = [asyncio.ensure_future(one) for one in (theirs.beat(), stream.receive())]
        data = os.urandom(PAGES * PAGE_BYTES)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3):  # longer than one that says nothing has
                while True:
                    await stream.pages(Pages(((0, len(data)),), data))
                    data = os.urandom(PAGES * PAGE_BYTES)
        async with asyncio.timeout(3):
            await stream.end("alone", "an epoch has been on its way for too long")
        for end_of in (ours, theirs):
            end_of.abort()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())


def test_frames_are_made_as_there_is_room_for_them() -> None:
    async def main() -> None:
        async with _over_a_relay(1.0) as (ours, _):
            made = 0

            def frames() -> Iterator[list[Buffer]]:
                nonlocal made
                for _ in range(64):
                    made += 1
                    yield ours.outbound.frame(FrameKind.PAGES, 1, [bytes(1 << 20)])

            with pytest.raises(TimeoutError):
                await asyncio.wait_for(ours.send_all(frames()), 0.3)
            assert made < 8

    asyncio.run(main())


def test_silence_is_nothing_to_act_on_before_there_is_anything_to_take_over() -> None:
    """On a busy machine a primary may say nothing for seconds before its first copy."""

    async def main() -> None:
        replica = SimpleNamespace(complete=False)
        long_ago_s = boottime_s() - 2 * SILENCE_S
        primary = SimpleNamespace(heard_s=long_ago_s, epoch_s=long_ago_s)
        anything: Any = None
        lease: Any = SimpleNamespace(span=LeaseSpan(1.0))
        taking = TakeOver(anything, lease, replica, primary, asyncio.Event(), lack=it_waits)  # type: ignore[arg-type]
        receiving: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        assert not taking.is_due(receiving)
        replica.complete = True
        assert taking.is_due(receiving)
        replica.complete = False
        receiving.set_result("lost")
        assert taking.is_due(receiving)

    asyncio.run(main())


def test_a_primary_that_is_heard_but_lost_its_lease_is_replaced(tmp_path: Path) -> None:
    """Cut off from the arbiter it has stopped its guest; one that renews its lease is followed."""
    store, span = FileStore(tmp_path), LeaseSpan(0.5)
    primary = Lease(store, "web", Claimant("a/1"), span)
    standby = Lease(store, "web", Claimant("b/1", replica="b/1"), span)
    hello = SimpleNamespace(machine="another", emitters=())
    request: Any = SimpleNamespace(options=SimpleNamespace(fence=()), one_machine=False)
    replica: Any = SimpleNamespace(complete=True, is_applying=False, disks=DisksJournal(()))

    async def main() -> None:
        await primary.take()
        await primary.record_in_sync("b/1")
        heard: Any = SimpleNamespace(
            heard_s=boottime_s() + 60, epoch_s=boottime_s(), hello=hello, term=1, why="",
            heard_by_path_s=lambda: (boottime_s() + 60,),
        )  # fmt: skip
        taking = TakeOver(request, standby, replica, heard, asyncio.Event(), lack=it_waits)
        receiving: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        assert not taking.is_due(receiving)
        heard.epoch_s -= 60
        assert taking.is_due(receiving)
        assert await taking.settled(receiving) is StandbyMove.FOLLOW
        async with asyncio.timeout(20):
            move = StandbyMove.FOLLOW
            while move is StandbyMove.FOLLOW:
                await asyncio.wait({receiving}, timeout=0.05)
                move = await taking.settled(receiving)
        assert move is StandbyMove.PROMOTE
        with pytest.raises(RefusedError):
            await primary.renew()

    asyncio.run(main())


def test_a_standby_whose_qemu_has_ended_takes_nothing_from_its_primary(tmp_path: Path) -> None:
    """Or a guest whose service was killed with it, and whose QEMU is well, would be fenced."""
    store, span = FileStore(tmp_path), LeaseSpan(0.5)
    primary = Lease(store, "web", Claimant("a/1"), span)
    standby = Lease(store, "web", Claimant("b/1", replica="b/1"), span)
    hello = SimpleNamespace(machine="another", emitters=())
    request: Any = SimpleNamespace(options=SimpleNamespace(fence=("agent",)), one_machine=False)
    replica: Any = SimpleNamespace(complete=True, is_applying=False, disks=DisksJournal(()))
    gone: Any = SimpleNamespace(
        heard_s=0.0, epoch_s=0.0, hello=hello, term=1, why="", heard_by_path_s=lambda: (0.0,),
        second=SimpleNamespace(diagnosis=lambda _: "a is silent"),
    )  # fmt: skip

    async def main() -> None:
        await primary.take()
        await primary.record_in_sync("b/1")
        taking = TakeOver(request, standby, replica, gone, asyncio.Event(), lack=it_has_ended)
        receiving: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        receiving.set_result("lost")
        assert await taking.settled(receiving) is StandbyMove.STAND_DOWN
        assert taking.why.endswith("the QEMU that waited here has ended")
        assert not standby.has_requested
        await primary.renew()

    asyncio.run(main())


@pytest.mark.parametrize("fails", [True, False])
def test_nothing_is_fenced_for_a_standby_whose_last_writes_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, fails: bool
) -> None:
    """A primary's service was killed, and its guest was well: it was killed, and then the standby
    found that it cannot take over.
    """
    store, span = FileStore(tmp_path / "leases"), LeaseSpan(60.0)
    primary_ = Lease(store, "web", Claimant("a/1"), span)
    standby = Lease(store, "web", Claimant("b/1", replica="b/1"), span)
    hello = SimpleNamespace(machine="another", emitters=())
    options = SimpleNamespace(fence=("agent",))
    request: Any = SimpleNamespace(
        options=options, one_machine=False, vm="web", primary=SimpleNamespace(name="a")
    )
    gone: Any = SimpleNamespace(
        heard_s=0.0, epoch_s=0.0, hello=hello, term=1, why="", heard_by_path_s=lambda: (0.0,),
        second=SimpleNamespace(diagnosis=lambda _: "a is silent"),
    )  # fmt: skip
    applying, fenced = threading.Event(), list[bool]()

    class Slow(WritableImage):
        def apply(self, writes: Sequence[DiskWrite]) -> None:
            assert applying.wait(20)
            if fails:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            super().apply(writes)

    class FencingAgent:
        def __init__(self, *_: object) -> None:
            pass

        async def fence(self, target: Target) -> FencingProof:
            fenced.append(applying.is_set())
            return FencingProof(target.holding, "dead")

    monkeypatch.setattr(takeover, "Agent", FencingAgent)
    ram, disk = tmp_path / "ram", tmp_path / "disk"
    ram.write_bytes(bytes(PAGES * PAGE_BYTES))
    disk.write_bytes(bytes(4096))

    async def main() -> StandbyMove:
        await primary_.take()
        await primary_.record_in_sync("b/1")
        with mapped(ram) as memory, disk.open("r+b") as file:
            disks = DisksJournal([(disk, Slow(file.fileno(), 4096))])
            with replica_in(memory, disks) as replica:
                epoch = ReceivedEpoch(1, 1, 0, (), b"", b"devices", (DiskWrite(0, 0, b"abc"),))
                await replica.apply(epoch)
                taking = TakeOver(request, standby, replica, gone, asyncio.Event(), lack=it_waits)
                receiving: asyncio.Future[str] = asyncio.get_running_loop().create_future()
                receiving.set_result("lost")
                settling = asyncio.ensure_future(taking.settled(receiving))
                await asyncio.wait({settling}, timeout=0.5)
                assert not (standby.has_requested or fenced)
                assert taking.why.endswith("until its last disk writes are applied")
                await primary_.renew()  # it may go on, with the arbiter's consent
                applying.set()
                move = await settling
                assert not fails or taking.why.endswith("the copies of its disks are unusable")
                return move

    assert asyncio.run(main()) is (StandbyMove.STAND_DOWN if fails else StandbyMove.PROMOTE)
    assert fenced == [True] * (not fails)


@pytest.mark.parametrize("is_given_up", [True, False])
def test_a_primary_goes_on_alone_while_its_standbys_disk_hangs(
    tmp_path: Path, *, is_given_up: bool
) -> None:
    """The connection was lost, or a guest that QEMU had stopped was handed over: the standby took
    the term and waited for its disk, and the primary ended the only guest.
    """
    store, span = FileStore(tmp_path), LeaseSpan(3.0 if is_given_up else 0.3)
    primary = Lease(store, "web", Claimant("a/1"), span)
    standby = Lease(store, "web", Claimant("b/1", replica="b/1"), span)
    request: Any = SimpleNamespace(options=SimpleNamespace(fence=()), one_machine=False)
    disks = SimpleNamespace(is_idle=False, is_sound=True)
    replica: Any = SimpleNamespace(complete=True, is_applying=False, disks=disks)
    lost: Any = SimpleNamespace(
        heard_s=0.0, epoch_s=0.0, hello=None, term=1, why="", heard_by_path_s=lambda: (0.0,),
        second=SimpleNamespace(diagnosis=lambda _: "a is silent"),
    )  # fmt: skip

    async def main() -> None:
        await primary.take()
        await primary.record_in_sync("b/1")
        if is_given_up:
            await primary.give_up()
        taking = TakeOver(request, standby, replica, lost, asyncio.Event(), lack=it_waits)
        receiving: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        receiving.set_result("lost")
        settling = asyncio.ensure_future(taking.settled(receiving))
        await asyncio.wait({settling}, timeout=1.0)
        assert not standby.has_requested
        await (primary.again().take() if is_given_up else primary.record_solo())
        async with asyncio.timeout(20):
            assert await settling in (StandbyMove.STALE, StandbyMove.STAND_DOWN)

    asyncio.run(main())


def test_whatever_is_noticed_first_of_a_killed_qemu_its_end_is_known_for_that() -> None:
    """Its memory is gone before its sockets are: a scan fails while it still counts as alive."""

    async def main(qemu: "subprocess.Popen[bytes]", pidfd: int) -> None:
        held = protection_of(qemu.pid, pidfd)
        gone = ProcessLookupError(3, "No such process")
        why = {"why": "-", "remedy": "-"}
        noticing = asyncio.ensure_future(held._is_qemus_end(gone))
        await asyncio.sleep(0.2)
        qemu.kill()
        assert await noticing
        assert await held._is_qemus_end(OperationFailedError("a mirror is lost", **why))
        assert await held._is_qemus_end(MonitorLostError("no answer", **why))
        assert not await held._is_qemus_end(HostDownError("the standby is silent", **why))

    with subprocess.Popen(["sleep", "60"]) as qemu, open_fd(os.pidfd_open(qemu.pid)) as pidfd:
        asyncio.run(main(qemu, pidfd))


def protection_of(pid: int, pidfd: int) -> Any:
    held: Any = Protection.__new__(Protection)
    held._handles = SimpleNamespace(pidfd=pidfd)
    held._vm = SimpleNamespace(qemu=SimpleNamespace(process=SimpleNamespace(pid=pid)))
    return held


# As much of a guest's memory as takes the kernel a second to take apart.
LARGE = """
import mmap, os, time
fd = os.memfd_create("ram")
os.ftruncate(fd, 64 << 20)
kept = [mmap.mmap(fd, 64 << 20, mmap.MAP_SHARED | mmap.MAP_POPULATE) for _ in range(64)]
print("mapped", flush=True)
time.sleep(60)
"""


def test_a_killed_qemu_of_a_large_guest_is_dead_long_before_its_memory_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or the primary says that it goes on alone, and the standby drops the only guest."""

    async def left_to_the_standby(_why: str, ending: ProtectionEnding) -> ProtectionEnding:
        return ending

    monkeypatch.setattr("vmckpt.replicate.primary.protection.DYING_S", 0.0)

    async def main(qemu: "subprocess.Popen[bytes]", pidfd: int) -> None:
        assert qemu.stdout is not None
        assert qemu.stdout.readline() == b"mapped\n"
        held, which = protection_of(qemu.pid, pidfd), identify(qemu.pid)
        said: list[str] = []
        assert held._qemu_lives()
        assert which is not None
        qemu.kill()
        # From here on a scan of its memory fails.
        while Path(f"/proc/{qemu.pid}/statm").read_text().split()[0] != "0":  # noqa: ASYNC110
            await asyncio.sleep(0)
        # What it said before (that the guest has powered off, say) waits to be read.
        asyncio.get_running_loop().call_soon(said.append, "SHUTDOWN")
        assert await held._is_qemus_end(ProcessLookupError(3, "No such process"))
        assert said
        assert not is_alive(which)  # for who recovers what is left, if its service died with it
        # Who tells the arbiter that it goes on alone notices it before that has answered.
        held._epochs = SimpleNamespace(is_safe=True)
        held._keeper = SimpleNamespace(solo=asyncio.Event().wait)
        held._dead_here = left_to_the_standby
        assert await held._not_solo() is ProtectionEnding.YOURS

    argv = [sys.executable, "-c", LARGE]
    with (
        subprocess.Popen(argv, stdout=subprocess.PIPE) as qemu,
        open_fd(os.pidfd_open(qemu.pid)) as pidfd,
    ):
        asyncio.run(main(qemu, pidfd))
