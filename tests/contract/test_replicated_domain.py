"""A libvirt domain that is replicated: what libvirt has of it meanwhile, and what waits at its
standby.
"""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests import image_reader
from tests.fake_libvirtd import FakeLibvirtd
from tests.unit.test_stream_head import DEVICES, GOLDEN
from vmckpt.errors import HostDownError, OperationFailedError, OutcomeUnknownError
from vmckpt.hosts.host import Host
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes.process import ProcessId, identify
from vmckpt.memory.ram_file import mapped
from vmckpt.options.replication import ReplicationOptions
from vmckpt.qemu.stream_head import plain_begin, plain_end, plain_page, read_stream_head
from vmckpt.replicate.domains import described, guest, waiting
from vmckpt.replicate.domains.facts import ReplicatedDomain
from vmckpt.replicate.domains.waiting import WaitingDomain, head_of
from vmckpt.replicate.request import REQUEST, ReplicationRequest, ServiceFiles
from vmckpt.state.documents import save_to
from vmckpt.vm.domains import sessions
from vmckpt.vm.domains.faults import LibvirtRefusedError
from vmckpt.vm.domains.flags import DomainState
from vmckpt.vm.domains.loading import starting
from vmckpt.vm.domains.loading.starting import image_head
from vmckpt.vm.domains.replies import Condition, DomainInfo
from vmckpt.vm.inventory import Vm, read_home
from vmckpt.vm.paths import vm_dir
from vmckpt.vm.record import Platform, Qemu, Replaced
from vmckpt.vm.spec.spec import parse_spec

pytestmark = [pytest.mark.contract, pytest.mark.timeout(60)]
NAME = "replicated"
UUID, RAM_BYTES = "7961af85-4cf2-49f8-a727-3c1736dbe50b", 64 << 20
DISK = """<disk type='file'><driver name='qemu' type='qcow2'/><source file='/i/web.qcow2'/>{}
<target dev='vda' bus='virtio'/><alias name='virtio-disk0'/></disk>"""
BASE = "<backingStore type='file'><format type='qcow2'/><source file='/i/base'/></backingStore>"
XML = f"<domain type='qemu'><name>{NAME}</name><uuid>{UUID}</uuid><devices>{{}}</devices></domain>"
LIVE, DEFINITION = XML.format(DISK.format(BASE)), XML.format(DISK.format("") + "<!-- mine -->")
HEAD = read_stream_head(GOLDEN + DEVICES)
HERE = Platform("pc-q35-1", "tcg", "qemu64")
DOMAIN = ReplicatedDomain(
    uuid=UUID, xml=LIVE, definition=DEFINITION, starts_with_host=True, machine=HEAD.machine,
    blocks=HEAD.blocks, ram_names=("ram0",), process=ProcessId(1, 1), devices=("virtio-disk0",),
)  # fmt: skip


class World:
    """Hosts a and b, each with a libvirtd; which of them define the domain, and with what."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hosts = {
            name: LocalHost(name, directory / name, "127.0.0.1", libvirt=Path("/run/l"))
            for name in "ab"
        }
        self.defined = {"a": LIVE}
        self.starts = set[str]()
        self.silent = 0  # how often libvirtds do not answer first
        self.live, self.definition, self.runs = LIVE, DEFINITION, True
        self.refuses: Exception | None = None  # to define it

        @asynccontextmanager
        async def libvirtd(host: Host) -> AsyncIterator[FakeLibvirtd]:
            if self.silent:
                self.silent -= 1
                raise HostDownError("no", why="no", remedy="-")
            yield self.libvirtd(host)

        monkeypatch.setattr(sessions, "libvirtd", libvirtd)
        monkeypatch.setattr(described, "libvirtd", libvirtd)
        monkeypatch.setattr(guest, "_AGAIN_S", 0.001)

    def libvirtd(self, host: Host) -> FakeLibvirtd:
        def seen() -> DomainInfo:
            xml, is_kept = self.live, host.name in self.defined
            return DomainInfo(UUID, NAME, DomainState.RUNNING, 1, persistent=is_kept, xml=xml)

        return FakeLibvirtd(
            host,
            find=seen,
            condition=lambda: Condition(
                DomainState.RUNNING if self.runs else DomainState.PAUSED, 1
            ),
            definition=lambda: self.definition,
            undefine=lambda *_: self.defined.pop(host.name) and None,
            define=lambda xml: self.refuses or self.defined.update({host.name: xml}),
            start_with_host=lambda: self.starts.add(host.name),
        )

    def vm(self, host: str, replaces: Replaced | None = None) -> Vm:
        directory = vm_dir(self.hosts[host].state_dir, NAME)
        spec = parse_spec('name = "replicated"\nmemory = "64M"\n', "test", directory.path)
        qemu = Qemu(
            directory.qemu("0123abcd"), ProcessId(1, 1), HERE, is_foreign=True, replaces=replaces,
            domain=UUID, ram_names=("ram0",),
        )  # fmt: skip
        return Vm(spec, self.hosts[host], directory, qemu)

    def left(self, host: str) -> list[str]:
        path = vm_dir(self.hosts[host].state_dir, NAME).path
        return sorted(one.name for one in path.iterdir()) if path.exists() else []


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


async def begun(vm: Vm, domain: ReplicatedDomain = DOMAIN) -> None:
    await guest.record_home(vm, domain)
    await guest.take_charge(vm, domain)


def test_while_it_is_protected_libvirt_has_no_definition_of_it(world: World) -> None:
    async def run() -> None:
        vm = world.vm("a")
        await begun(vm)
        assert world.defined == {}
        assert await read_home(vm.host, NAME) == vm
        world.silent = 2  # libvirtd is being restarted
        await guest.give_back(vm.host, NAME, DOMAIN)

    asyncio.run(run())
    assert world.defined == {"a": DEFINITION}
    assert world.starts == {"a"}
    assert world.left("a") == []


def test_a_transient_domain_stays_one(world: World) -> None:
    world.defined = {}
    domain = replace(DOMAIN, definition="", starts_with_host=False)

    async def run() -> None:
        vm = world.vm("a")
        await begun(vm, domain)
        await guest.give_back(vm.host, NAME, domain)

    asyncio.run(run())
    assert world.defined == {}
    assert world.left("a") == []


def test_a_definition_that_was_made_meanwhile_is_not_overwritten(world: World) -> None:
    async def run() -> None:
        vm = world.vm("a")
        await begun(vm)
        world.defined["a"] = "<domain/>"
        await guest.give_back(vm.host, NAME, DOMAIN)

    asyncio.run(run())
    assert world.defined == {"a": "<domain/>"}


@pytest.mark.parametrize("keeps", ["claim", "older home"])
def test_what_says_which_home_is_stale_outlasts_a_protection(world: World, keeps: str) -> None:
    async def run() -> None:
        vm = world.vm("a", Replaced("b", "0") if keeps == "older home" else None)
        await begun(vm)
        if keeps == "claim":
            await vm.host.write_text(vm.directory.claim, "{}")
        await guest.give_back(vm.host, NAME, DOMAIN)
        assert await read_home(vm.host, NAME) == vm

    asyncio.run(run())
    assert world.defined == {"a": DEFINITION}


@pytest.mark.parametrize("is_older_there", [False, True])
def test_when_its_replication_is_over_libvirt_alone_has_it(
    world: World, *, is_older_there: bool
) -> None:
    """On the standby its images stand alone. What lab-a still has of it is recognized later."""
    world.defined = {}
    here, there = world.hosts["b"], world.hosts["a"]

    async def run() -> None:
        vm = world.vm("b", Replaced("a", "0123abcd"))
        await guest.record_home(vm, DOMAIN)
        if is_older_there:
            await guest.record_home(world.vm("a"), DOMAIN)
        request = ReplicationRequest(
            "r", NAME, vm.spec.text, HERE, there, here, ReplicationOptions("/l"),
            one_machine=False, qemu_id="0123abcd", domain=DOMAIN,
        )  # fmt: skip
        files = ServiceFiles.of(here, NAME)
        await here.make_dir(files.path)
        await save_to(here, files.request, REQUEST, request)
        await guest.return_to_libvirt(here, NAME, (there, here))

    asyncio.run(run())
    assert world.defined.keys() == {"b"}
    assert "/i/web.qcow2" in world.defined["b"]
    assert bool(world.left("b")) == is_older_there


def test_a_vm_of_vmckpts_own_is_not_forgotten(world: World) -> None:
    async def run() -> None:
        vm = world.vm("a")
        own = vm._replace(qemu=vm.qemu._replace(domain=""))
        await vm.host.make_dir(vm.directory.path)
        await vm.host.write_text(vm.directory.spec, vm.spec.text)
        await vm.host.write_text(vm.directory.current, own.qemu.to_json())
        await guest.forget(vm.host, NAME)
        await guest.return_to_libvirt(vm.host, NAME, ())
        assert await read_home(vm.host, NAME) is not None

    asyncio.run(run())
    assert world.defined == {"a": LIVE}


def test_images_on_its_standby_stand_alone() -> None:
    assert "/i/base" not in described.standalone(LIVE)
    assert "/i/web.qcow2" in described.standalone(LIVE)


def test_a_device_that_is_plugged_in_ends_the_protection(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The standby's QEMU does not have it. A silent libvirtd says nothing about that."""
    monkeypatch.setattr(described, "_WATCH_S", 0.01)
    domain = replace(DOMAIN, devices=described.devices_of(LIVE))
    world.silent, world.defined = 2, {}

    async def run() -> None:
        watching = asyncio.ensure_future(described.until_changed(world.hosts["a"], domain))
        await asyncio.wait({watching}, timeout=0.2)
        assert not watching.done()
        nic = "<interface type='bridge'><alias name='net1'/></interface>"
        world.live = XML.format(DISK.format(BASE) + nic)
        with pytest.raises(OperationFailedError, match="net1"):
            await watching

    asyncio.run(run())


# -- what waits -----------------------------------------------------------------------------------


class Bench:
    """A standby's libvirt. In its place a process reads the image, as a QEMU of that domain."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host = LocalHost("b", directory, "127.0.0.1", libvirt=Path("/run/l"))
        self.got, self.mark = directory / "got", b""
        self.qemu: subprocess.Popen[bytes] | None = None
        self.refuses, self.mapped = "", list[tuple[Any, ...]]()
        self.answers: Callable[[], object] = lambda: Condition(DomainState.PAUSED, 1)
        self.resumed = self.cut_off = 0  # how often it was; how often libvirtd ended at that

        @asynccontextmanager
        async def libvirtd(_host: Host) -> AsyncIterator[FakeLibvirtd]:
            yield FakeLibvirtd(
                self.host,
                restore=self.restore,
                condition=self.condition,
                resume=self.resume,
            )

        def find(_: int, size_bytes: int, mark: bytes) -> tuple[int, int]:
            self.mark = mark
            return 1 << 30, (1 << 30) + size_bytes

        def give(*words: Any, **named: Any) -> None:
            self.mapped.append((*words, named))

        monkeypatch.setattr(waiting, "libvirtd", libvirtd)
        monkeypatch.setattr(waiting, "give_content", give)
        monkeypatch.setattr(starting, "find_marked", find)

    def condition(self) -> object:
        return self.answers()

    def resume(self) -> object:
        self.resumed += 1
        if self.resumed <= self.cut_off:
            return OutcomeUnknownError("no", why="it ended", remedy="-")
        return None

    async def restore(self, path: Path) -> object:
        if self.refuses:
            return LibvirtRefusedError("no", why=self.refuses, remedy="-", code=1)
        end = DEVICES[:-1].decode("latin-1")
        words = [
            sys.executable,
            image_reader.__file__,
            str(path),
            str(self.got),
            end,
            "-uuid",
            UUID,
            "",
        ]
        self.qemu = await asyncio.to_thread(subprocess.Popen, words)
        while self.qemu.poll() is None:
            await asyncio.sleep(0.01)
            if self.got.exists() and self.got.read_bytes().endswith(DEVICES):
                return None
        return LibvirtRefusedError("no", why="load of migration failed", remedy="-", code=1)

    async def start(self, domain: ReplicatedDomain = DOMAIN) -> WaitingDomain:
        directory = vm_dir(self.host.state_dir, NAME)
        await self.host.make_dir(directory.path)
        spec = parse_spec('name = "replicated"\nmemory = "64M"\n', "test", directory.path)
        return await WaitingDomain.start(self.host, spec, domain, HERE, Replaced("a", "0"))


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Bench(tmp_path, monkeypatch)
    yield made
    if made.qemu is not None:
        made.qemu.kill()
        made.qemu.wait()


def test_it_waits_with_the_replicas_memory_and_gets_the_devices_at_the_takeover(
    bench: Bench,
) -> None:
    async def run() -> None:
        warm = await bench.start()
        ram = warm.qemu.files.ram(Path("/dev/shm"))
        with mapped(ram, RAM_BYTES) as file:
            assert len(file.view) == RAM_BYTES
        pid, where, path, named = bench.mapped[0]
        assert bench.qemu is not None
        assert (pid, path, named) == (bench.qemu.pid, ram, {"shared": True})
        assert where.blocks == ((1 << 30, (1 << 30) + RAM_BYTES),)
        assert warm.qemu.process == identify(pid)
        assert await warm.lack() == ""
        assert await read_home(bench.host, NAME) is None
        await warm.load(GOLDEN + DEVICES)
        warm.settle_here()
        await warm.run()
        await warm.close()
        await bench.host.remove(ram.parent)

    asyncio.run(run())
    stream = bench.got.read_bytes().removeprefix(image_head(described.standalone(LIVE), runs=False))
    first = plain_begin(head_of(DOMAIN)) + plain_page(HEAD, 0, bench.mark)
    assert stream == first + HEAD.pages + b"".join(plain_end(HEAD, ()))
    assert bench.resumed == 1
    assert vm_dir(bench.host.state_dir, NAME).domain.exists()


@pytest.mark.parametrize("ran", [False, True])
def test_a_libvirtd_that_ends_when_the_guest_is_to_run_is_asked_again(
    bench: Bench, *, ran: bool
) -> None:
    """It is not known whether the guest runs by then."""
    bench.cut_off = 1

    async def run() -> None:
        warm = await bench.start()
        await warm.load(GOLDEN + DEVICES)
        if ran:
            bench.answers = lambda: Condition(DomainState.RUNNING, 1)
        await warm.run()
        await warm.close()
        await bench.host.remove(warm.qemu.files.memory(Path("/dev/shm")))

    asyncio.run(run())
    assert bench.resumed == (1 if ran else 2)


def test_a_standby_that_ends_leaves_nothing(bench: Bench) -> None:
    async def run() -> None:
        warm = await bench.start()
        memory = warm.qemu.files.memory(Path("/dev/shm"))
        assert memory.exists()
        await warm.end()
        assert not memory.exists()

    asyncio.run(run())
    assert bench.qemu is not None
    assert bench.qemu.poll() is not None
    assert not vm_dir(bench.host.state_dir, NAME).path.exists()


def test_what_libvirt_refuses_is_said_and_leaves_nothing(bench: Bench) -> None:
    bench.refuses = "there is no bridge br7"
    with pytest.raises(LibvirtRefusedError) as caught:
        asyncio.run(bench.start())
    assert caught.value.why == bench.refuses
    assert list(vm_dir(bench.host.state_dir, NAME).path.iterdir()) == []
    assert not list(Path("/dev/shm").glob("vmckpt-replicated-*"))


def test_a_guest_that_has_got_other_memory_is_not_loaded(bench: Bench) -> None:
    async def run() -> None:
        warm = await bench.start(replace(DOMAIN, blocks=(*HEAD.blocks[:-1], ("more", 4096))))
        with pytest.raises(OperationFailedError, match="does not take 'replicated' over"):
            await warm.load(GOLDEN + DEVICES)
        await warm.end()

    asyncio.run(run())


def test_a_qemu_or_a_libvirtd_that_ends_is_noticed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "SILENT_S", 0.1)

    async def run() -> None:
        warm = await bench.start()
        bench.answers = lambda: asyncio.sleep(60)
        assert "has not answered" in await warm.lack()
        bench.answers = lambda: HostDownError("gone", why="restarted", remedy="-")
        assert "restarted" in await warm.lack()
        assert bench.qemu is not None
        bench.answers = lambda: Condition(DomainState.PAUSED, 1)
        bench.qemu.kill()
        assert "has ended" in await warm.ended()
        await warm.end()

    asyncio.run(run())
