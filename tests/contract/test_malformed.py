"""Whatever guests, hooks, hosts, QEMUs, services and stores say: a value, or an error of ours.

Each door is given replies that are malformed (`tests/malformed.py`); it may make something of one,
or raise a VmckptError, and nothing else. What was asked beside it, of another, is answered.
"""

import asyncio
import json
import os
import random
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

from tests.malformed import mutated
from tests.scripted_qmp import GREETING
from vmckpt.checkpoint.group.line import Line
from vmckpt.devices.contract import read_answer
from vmckpt.errors import HostDownError, VmckptError
from vmckpt.events.lines import Lines
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.remote.frames import MAGIC, PROTOCOL, Frame, RpcFrameKind, read_frame, with_json
from vmckpt.hosts.remote.host import RemoteHost
from vmckpt.hosts.remote.session import ServeConnection, Session
from vmckpt.qemu import block, commands, inside
from vmckpt.qemu.abilities import learn
from vmckpt.qemu.agent import GuestAgent
from vmckpt.qemu.compare import describe
from vmckpt.qemu.monitor import Monitor, session
from vmckpt.qemu.replies import RunState
from vmckpt.replicate import control
from vmckpt.replicate.operator.sides import side_of
from vmckpt.replicate.request import ServiceFiles
from vmckpt.replicate.status import ReplicaStatus
from vmckpt.replicate.wire import messages
from vmckpt.store.files.config import new_config, parse_config
from vmckpt.store.files.manifest import Manifest
from vmckpt.vm.domains.definition.description import parse_domain

pytestmark = pytest.mark.contract

PATIENCE_S = 20.0


async def outcome(work: Awaitable[object]) -> str:
    try:
        async with asyncio.timeout(PATIENCE_S):
            await work
    except VmckptError as exc:
        assert exc.what
        assert exc.why
        assert exc.remedy
        assert exc.exit_code
        str(exc)
        return type(exc).__name__
    return "a value"


# -- guests -----------------------------------------------------------------------------------

AGENT: tuple[tuple[Any, Callable[[GuestAgent], Awaitable[object]]], ...] = (
    ({"return": {}}, lambda one: one.set_time(5)),
    (
        {"return": [{"name": "eth0", "hardware-address": "52:54:00:00:00:01",
                     "ip-addresses": [{"ip-address-type": "ipv4", "ip-address": "192.0.2.7"}]}]},
        lambda one: one.addresses(5),
    ),
    ({"return": {"pid": 7}}, lambda one: one.start(["true"], 5)),
    ({"return": {"exited": True, "exitcode": 0, "out-data": "aGk=", "err-data": ""}},
     lambda one: one.ended(7, 5)),
    ({"error": {"class": "GenericError", "desc": "no"}}, lambda one: one.interfaces(5)),
)  # fmt: skip


async def agents(rng: random.Random, folder: Path) -> str:
    """Beside an agent of another VM, which is heard."""
    sample, ask = rng.choice(AGENT)
    bad, good = await asyncio.gather(
        outcome(_agent(mutated(rng, sample), ask)),
        _agent(b'{"return": {"pid": 7}}\n', lambda one: one.start(["true"], 5)),
    )
    assert good == 7
    return bad


async def _agent(said: bytes, ask: Callable[[GuestAgent], Awaitable[object]]) -> object:
    ours, theirs = socket.socketpair()

    async def guest() -> None:
        reader, writer = await asyncio.open_unix_connection(sock=theirs)
        number = json.loads(await reader.readline())["arguments"]["id"]
        writer.write(json.dumps({"return": number}).encode() + b"\n")
        await reader.readline()
        writer.write(said)
        writer.close()

    talking = asyncio.create_task(guest())
    try:
        agent = await GuestAgent.connect(ours, 5)
        try:
            return await ask(agent)
        finally:
            await agent.close()
    finally:
        talking.cancel()
        await asyncio.wait({talking})


HOOK = {"ok": True, "device_bytes": 80 << 30, "restarted": ["a"], "notes": ["b"], "why": "c",
        "remedy": "d"}  # fmt: skip


async def hooks(rng: random.Random, folder: Path) -> str:
    answer = read_answer(rng.choice([0, 0, 1, -9]), mutated(rng, HOOK), rng.randbytes(9))
    assert answer.ok or answer.why
    assert isinstance(answer.device_bytes, int)
    assert all(isinstance(text, str) for text in (*answer.notes, *answer.restarted, answer.remedy))
    return "well" if answer.ok else "not well"


# -- hosts ------------------------------------------------------------------------------------

HOST: tuple[tuple[Any, Callable[[RemoteHost], Awaitable[object]]], ...] = (
    ([0, "out", "err"], lambda host: host.run(["true"])),
    ([7, 8], lambda host: host.spawn(["true"], Path("/log"))),
    ([[7, 8]], lambda host: host.find_processes("x")),
    (["run", "action", 7, 1.5], lambda host: host.lock_owner(Path("/lock"))),
    (True, lambda host: host.exists(Path("/x"))),
    ("/x", lambda host: host.resolve(Path("/x"))),
    ("text", lambda host: host.read_text(Path("/x"))),
    ("6869", lambda host: host.read_from(Path("/x"), 0)),
    (["a", "b"], lambda host: host.list_dir(Path("/x"))),
    (1 << 40, lambda host: host.free_bytes(Path("/x"))),
    (12.5, lambda host: host.unix_time_s()),
    ([22, 80], lambda host: host.listening_ports("127.0.0.1")),
    (["sse", "avx"], lambda host: host.cpu_flags()),
)  # fmt: skip
ERROR = ["StorageError", "no room", "the disk is full", "make room"]
HELLO = {"protocol": PROTOCOL, "version": "1", "state_dir": "/state", "address": "192.0.2.1"}


class _Far:
    """A host whose next answer is `said`; the one after that is well."""

    def __init__(self, hello: bytes, said: Frame) -> None:
        self._hello, self._said = hello, said
        self._serving: asyncio.Task[None] | None = None

    async def open(self) -> ServeConnection:
        ours, theirs = socket.socketpair()
        self._serving = asyncio.create_task(self._serve(theirs))
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        return ServeConnection(reader, writer, self._silent)

    async def _silent(self) -> HostDownError:
        return HostDownError("it is silent", why="it made no sense", remedy="ask another")

    async def _serve(self, sock: socket.socket) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=sock)
        writer.write(MAGIC + Frame(RpcFrameKind.HELLO, 0, self._hello).encode())
        try:
            await read_frame(reader)
            asked = await read_frame(reader)
            writer.write(self._said._replace(number=asked.number).encode())
            while True:
                asked = await read_frame(reader)
                if asked.kind is RpcFrameKind.REQUEST:
                    writer.write(with_json(RpcFrameKind.ANSWER, asked.number, 12.5).encode())
        except (EOFError, OSError):
            return  # it was left
        finally:
            writer.close()

    async def close(self) -> None:
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.wait({self._serving})


async def hosts(rng: random.Random, folder: Path) -> str:
    """What else is asked of that host is answered; a greeting that is none is no host."""
    sample, ask = rng.choice(HOST)
    kind = rng.choice([RpcFrameKind.ANSWER, RpcFrameKind.ANSWER, RpcFrameKind.ERROR])
    said = Frame(kind, 0, mutated(rng, sample if kind is RpcFrameKind.ANSWER else ERROR))
    far = _Far(json.dumps(HELLO).encode(), said)
    talk = Session("far", None, far.open)
    host = RemoteHost("far", Path("/state"), "192.0.2.1", session=talk)
    try:
        bad = await outcome(ask(host))
        assert await host.unix_time_s() == 12.5
        return bad
    finally:
        await talk.close()
        await far.close()


async def greetings(rng: random.Random, folder: Path) -> str:
    far = _Far(mutated(rng, HELLO), with_json(RpcFrameKind.ANSWER, 0, 12.5))
    talk = Session("far", None, far.open)
    try:
        return await outcome(talk.greeting())
    finally:
        await talk.close()
        await far.close()


async def frames(rng: random.Random, folder: Path) -> str:
    """Bytes in place of frames: the connection goes, and whoever asked hears it."""
    sent = with_json(RpcFrameKind.ANSWER, 1, 12.5).encode()
    changed = bytearray(sent + rng.randbytes(rng.randrange(40)))
    for _ in range(rng.randint(1, 3)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    theirs.sendall(bytes(changed))
    theirs.close()
    try:
        frame = await read_frame(reader)
        return await outcome(_json_of(frame))
    except asyncio.IncompleteReadError:
        return "its end"
    except VmckptError as exc:
        return type(exc).__name__
    finally:
        writer.close()


async def _json_of(frame: Frame) -> None:
    _ = frame.credit_bytes if frame.kind is RpcFrameKind.CREDIT else frame.json


# -- QEMU -------------------------------------------------------------------------------------

STATUS = {"status": "running", "running": True, "singlestep": False}
MIGRATE = {
    "status": "active", "downtime": 3, "expected-downtime": 300, "blocked-reasons": ["a"],
    "socket-address": [{"type": "inet", "host": "::", "port": "49152"}], "postcopy-blocktime": 3,
    "ram": {"page-size": 4096, "total": 1 << 30, "remaining": 5, "transferred": 6, "mbps": 7.5,
            "dirty-pages-rate": 3, "dirty-sync-count": 2, "normal": 3, "duplicate": 4},
}  # fmt: skip
IMAGE = {"filename": "/a", "format": "qcow2", "virtual-size": 5, "actual-size": 3, "snapshots": [
    {"name": "a", "id": "1", "vm-state-size": 3, "date-sec": 1, "date-nsec": 1, "vm-clock-sec": 1,
     "vm-clock-nsec": 2}], "backing-image": {"filename": "/b", "virtual-size": 4}}  # fmt: skip
NODES = [{"node-name": "disk0", "drv": "qcow2", "ro": False, "image": IMAGE,
          "dirty-bitmaps": [{"name": "a", "recording": True, "inconsistent": False}]}]  # fmt: skip
SCHEMA = [{"name": "migrate-set-parameters", "meta-type": "command", "arg-type": "1"},
          {"name": "1", "meta-type": "object",
           "members": [{"name": "multifd-compression", "type": "2"}]},
          {"name": "2", "meta-type": "enum", "values": ["none"]}]  # fmt: skip
QMP: tuple[tuple[Any, Callable[[Monitor], Awaitable[object]]], ...] = (
    (STATUS, commands.query_status),
    ({"qemu": {"major": 10, "minor": 0, "micro": 2}}, commands.query_version),
    (MIGRATE, commands.query_migrate),
    ([{"thread-id": 7, "qom-path": "/m", "cpu-index": 0}], commands.query_cpus),
    ([{"id": "a", "type": "mirror", "status": "ready", "current-progress": 1, "total-progress": 2,
       "error": "b"}], commands.query_jobs),
    (NODES, commands.query_named_block_nodes),
    (NODES, block.query_disk_images),
    (NODES, block.query_bitmaps),
    ([{"device": "", "qdev": "/machine/peripheral/a", "inserted": {
        "node-name": "a", "drv": "b", "file": "c", "ro": True, "cache": {"direct": True}}}],
     inside.query_drives),
    ([{"devices": [{"bus": 0, "slot": 1, "function": 0, "qdev_id": "a",
                    "pci_bridge": {"devices": []}}]}], commands.query_pci_ids),
    ([{"capability": "multifd", "state": True}], commands.query_migrate_capabilities),
    ({"status": "measured", "dirty-rate": 3}, commands.query_dirty_rate),
    ([{"name": "a", "type": "child<b>"}], lambda one: commands.qom_children(one, "/")),
    ({"nodes": [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}],
      "edges": [{"name": "file", "parent": 1, "child": 2}]}, lambda one: block.file_of(one, "a")),
    (SCHEMA, learn),
    ("pc-q35", describe),
    ([{"label": "a"}], inside.query_chardev_labels),
    ("hub 0\n \\ a: index=0,type=user", inside.query_networks),
)  # fmt: skip
EVENT = {"event": "MIGRATION", "data": {"status": "completed"}, "timestamp": {"seconds": 1}}


async def qemus(rng: random.Random, folder: Path) -> str:
    """Another VM's QEMU is asked meanwhile, and answers."""
    sample, ask = rng.choice(QMP)
    envelope = rng.random() < 0.3

    def says(command: dict[str, Any]) -> bytes:
        number = command["id"]
        if envelope:
            return mutated(rng, {"return": sample, "id": number})
        inner = mutated(rng, sample)[:-1]
        return b'{"return": %b, "id": "%b"}\n' % (inner, number.encode())

    async def well(monitor: Monitor) -> object:
        return await commands.query_status(monitor)

    bad, good = await asyncio.gather(
        outcome(_qemu(says, ask)),
        _qemu(lambda one: json.dumps({"return": STATUS, "id": one["id"]}).encode() + b"\n", well),
    )
    assert good == RunState("running", True)
    return bad


async def events(rng: random.Random, folder: Path) -> str:
    def says(command: dict[str, Any]) -> bytes:
        answer = json.dumps({"return": STATUS, "id": command["id"]}).encode() + b"\n"
        return mutated(rng, EVENT) + answer

    async def listen(monitor: Monitor) -> None:
        with monitor.events("MIGRATION") as found:
            await commands.query_status(monitor, 5)
            for event in found.drain():
                assert isinstance(event["data"]["status"], str)  # type: ignore[index]

    return await outcome(_qemu(says, listen))


async def _qemu(
    says: Callable[[dict[str, Any]], bytes], ask: Callable[[Monitor], Awaitable[object]]
) -> object:
    ours, theirs = socket.socketpair()

    async def serve() -> None:
        reader, writer = await asyncio.open_unix_connection(sock=theirs)
        writer.write(json.dumps(GREETING).encode() + b"\n")
        said, decoder = "", json.JSONDecoder()
        while data := await reader.read(1 << 16):
            said += data.decode()
            while said := said.lstrip():
                command, end = decoder.raw_decode(said)
                said = said[end:]
                is_first = command["execute"] == "qmp_capabilities"
                number = {"id": command["id"]} if "id" in command else {}
                well = json.dumps({"return": {}} | number).encode() + b"\n"
                writer.write(well if is_first else says(command))
        writer.close()

    serving = asyncio.create_task(serve())
    try:
        async with session(ours, "web on a", 5) as monitor:
            # One that answers another question is waited for; here not for long.
            async with asyncio.timeout(1):
                return await ask(monitor)
    except TimeoutError:
        return None
    finally:
        serving.cancel()
        await asyncio.wait({serving})


# -- services, and what they tell -------------------------------------------------------------

SERVICE = {"role": "primary", "state": "protected", "term": 3, "vm": "web", "run": "r"}


async def services(rng: random.Random, folder: Path) -> str:
    """A replication's service that says what it likes is one that does not answer."""
    host = LocalHost("a", folder, "127.0.0.1")
    files = ServiceFiles.of(host, "web")
    files.path.mkdir(parents=True, exist_ok=True)
    files.request.write_bytes(mutated(rng, {"vm": "web", "run": "r", "primary": {"name": "a"}}))
    files.status.write_bytes(mutated(rng, SERVICE))
    said = mutated(rng, SERVICE)

    async def visit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(said)
        writer.close()

    files.control.unlink(missing_ok=True)
    server = await asyncio.start_unix_server(visit, files.control)
    try:
        asked = await outcome(control.ask(host, files, "status", 5))
        await outcome(_role(host))
        return asked
    finally:
        server.close()


async def _role(host: LocalHost) -> None:
    side = await side_of(host, "web")
    assert side is not None
    assert isinstance(side.status, ReplicaStatus)
    assert isinstance(side.status.state, str)


class _Deaf:
    def write(self, data: bytes) -> None:
        pass

    def close(self) -> None:
        pass


async def group_lines(rng: random.Random, folder: Path) -> str:
    reader = asyncio.StreamReader()
    reader.feed_data(mutated(rng, {"word": "ready", "at_s": 3.5, "more": {"a": [1]}}))
    reader.feed_eof()
    return await outcome(Line(reader, _Deaf(), "web on a").receive())


async def job_lines(rng: random.Random, folder: Path) -> str:
    line = {"event": "Note", "at_s": 1.5, "code": "a", "text": "b"}

    async def feed() -> None:
        for event in Lines().feed(mutated(rng, line)):
            assert isinstance(event.at_s, int | float)

    return await outcome(feed())


WIRE: tuple[tuple[Any, Callable[[bytes], object]], ...] = (
    (asdict(messages.Welcome("r", 3, 7)), messages.decode_welcome),
    (asdict(messages.Failure("lost", "a", "b", "c")), messages.decode_failure),
    (asdict(messages.Hello("web", "h", "a", "q35", 1 << 30, (messages.HelloDisk("d", 5),),
                           (messages.Process(7, 8),), 9)), messages.decode_hello),
)  # fmt: skip


async def wire(rng: random.Random, folder: Path) -> str:
    sample, decode = rng.choice(WIRE)

    async def work() -> None:
        decode(mutated(rng, sample))

    return await outcome(work())


# -- stores and libvirt -----------------------------------------------------------------------

MANIFEST = Manifest(
    id="0" * 32, vm="web", parent=None, created_unix_s=1.5, added_bytes=3, areas=(), blobs=(),
    packs=("0" * 32,), facts={"name": "a", "tags": {}},
)  # fmt: skip


async def manifests(rng: random.Random, folder: Path) -> str:
    async def work() -> None:
        Manifest.decode("0" * 32, mutated(rng, json.loads(MANIFEST.encode())))

    return await outcome(work())


async def configs(rng: random.Random, folder: Path) -> str:
    line, _, _ = new_config({"kind": "clear"}).encode().partition(b"\n")
    said = mutated(rng, json.loads(line))[:-1]
    digest = blake2b(said, digest_size=32).hexdigest().encode()

    async def work() -> None:
        parse_config(b"%b\n%b\n" % (said, digest), "/store")

    return await outcome(work())


XML = """<domain type='kvm'><name>web</name><uuid>u</uuid><memory unit='KiB'>4096</memory>
<vcpu>2</vcpu><os><type arch='x86_64' machine='q35'>hvm</type></os><devices>
<emulator>/usr/bin/qemu</emulator><disk type='file' device='disk'><driver name='qemu' type='raw'/>
<source file='/a'/><target dev='vda'/></disk><interface type='network'><source network='default'/>
<mac address='52:54:00:00:00:01'/></interface></devices></domain>"""


async def domains(rng: random.Random, folder: Path) -> str:
    text = list(XML)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(text))
        match rng.randrange(5):
            case 0:
                del text[at : at + rng.randrange(40)]
            case 1:
                text[at] = rng.choice("<>&'\"\x00\ud800x9-")
            case 2:
                text.insert(at, rng.choice(["<a>" * 5000, "&b;", "<disk/>", "<vcpu>x</vcpu>"]))
            case 3:
                text.insert(0, '<!DOCTYPE d [<!ENTITY b "bbbb">]>')
            case 4:
                text[at : at + 4] = rng.choice(["9" * 5000, "-1", "1e9", "KiB"])
        if not text:
            break

    async def work() -> None:
        parse_domain("".join(text))

    return await outcome(work())


DOORS: dict[str, Callable[[random.Random, Path], Awaitable[str]]] = {
    one.__name__: one
    for one in (
        agents, hooks, hosts, greetings, frames, qemus, events, services, group_lines, job_lines,
        wire, manifests, configs, domains,
    )
}  # fmt: skip
SEED, SAMPLE, ALL = 26, 25, 10_000


def fuzz(door: str, count: int, folder: Path) -> Counter[str]:
    async def work() -> Counter[str]:
        found = Counter[str]()
        for number in range(count):
            seed = f"{SEED} {door} {number}"
            try:
                found[await DOORS[door](random.Random(seed), folder)] += 1
            except Exception as exc:
                exc.add_note(f"of the reply with the seed {seed!r}")
                raise
        return found

    return asyncio.run(work())


@pytest.mark.parametrize("door", DOORS)
def test_whatever_is_said_it_is_a_value_or_an_error_of_ours(door: str, tmp_path: Path) -> None:
    found = fuzz(door, SAMPLE, tmp_path)
    assert found.total() == SAMPLE


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("door", DOORS)
def test_ten_thousand_malformed_replies(door: str, tmp_path: Path) -> None:
    count = int(os.environ.get("VMCKPT_MALFORMED", ALL)) // len(DOORS) + 1
    found = fuzz(door, count, tmp_path)
    print(f"{door}: {count} replies: {dict(found.most_common())}")
