"""A monitor against scripted servers: greeting, replies, errors, silence, hang-up, garbage."""

import asyncio
import gc
import json
import re
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest
from qemu.qmp import Message

from tests.scripted_qmp import GREETING, Script, Server, answering, nothing, play
from vmckpt.errors import HostDownError, OperationFailedError, OutcomeUnknownError
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes.process import identify
from vmckpt.migrate.outcome.ends import End
from vmckpt.migrate.steps.arrival import prove_alive
from vmckpt.qemu import commands
from vmckpt.qemu.abilities import Abilities, learn
from vmckpt.qemu.monitor import CommandRefusedError, Monitor, MonitorLostError, session
from vmckpt.qemu.replies import (
    BlockNode,
    Cpu,
    MigrationStatus,
    QemuJob,
    QemuVersion,
    RunState,
    Snapshot,
)
from vmckpt.vm.paths import VmDir

SHORT_S = 0.1


async def connect_to(script: Script, timeout_s: float = 8.0) -> None:
    ours, theirs = socket.socketpair()
    server = Server(theirs)
    serving = asyncio.ensure_future(script(server))
    try:
        async with asyncio.timeout(10):
            await Monitor.connect(ours, "web on a", timeout_s)
    finally:
        serving.cancel()
        server.hang_up()
        # This takes the socket over, whatever comes of it.
        assert ours.fileno() == -1


def test_a_silent_peer_is_given_up_in_time() -> None:
    with pytest.raises(MonitorLostError, match="is silent") as caught:
        asyncio.run(connect_to(nothing, SHORT_S))
    assert "another client holds it" in caught.value.why
    assert isinstance(caught.value, HostDownError)


def test_a_peer_that_greets_and_then_says_nothing_is_given_up_in_time() -> None:
    async def script(server: Server) -> None:
        await server.send(GREETING)

    with pytest.raises(MonitorLostError, match="is silent"):
        asyncio.run(connect_to(script, SHORT_S))


@pytest.mark.parametrize(
    "said",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b'{"hello": "world"}\r\n',
        b'{"QMP": 7}\r\n',
        b"[]\r\n",
        b"\xff\xfe\x00\r\n",
        b"\x00" * 100_000 + b"\n",
    ],
    ids=["ssh", "other-json", "odd-greeting", "array", "binary", "long-zeros"],
)
def test_what_is_no_qmp_is_said_to_be_none(said: bytes) -> None:
    async def script(server: Server) -> None:
        await server.send_bytes(said)

    with pytest.raises(MonitorLostError, match="does not speak QMP") as caught:
        asyncio.run(connect_to(script))
    assert caught.value.why


def test_a_peer_that_hangs_up_is_no_monitor() -> None:
    async def script(server: Server) -> None:
        server.hang_up()

    with pytest.raises(MonitorLostError):
        asyncio.run(connect_to(script))


def test_a_question_is_answered() -> None:
    async def script(server: Server) -> None:
        command = await server.command()
        assert (command["execute"], command["arguments"]) == ("qom-get", {"path": "/machine"})
        await server.answer(command, "pc")

    async def client(monitor: Monitor) -> None:
        assert monitor.is_open
        assert await monitor.ask("qom-get", str, {"path": "/machine"}) == "pc"

    play(script, client)


@pytest.mark.parametrize("length", [1, 1 << 20])
def test_a_qemu_that_tells_events_without_end_loses_its_connection(length: int) -> None:
    # Whoever listens waits for an answer meanwhile: the operator's machine, of another host's QEMU.
    event = {"event": "MIGRATION", "data": {"status": "a" * length}}

    async def script(server: Server) -> None:
        await server.command()
        with suppress(OSError):
            for _ in range(200):
                await server.send(*[event] * max(1, 1000 // length))

    async def client(monitor: Monitor) -> None:
        with monitor.events("MIGRATION"), pytest.raises(MonitorLostError, match="did not answer"):
            await monitor.ask("query-migrate", object, timeout_s=60)
        assert not monitor.is_open

    play(script, client)


@pytest.mark.parametrize(
    "ask",
    [lambda one: one.ask("cont", object), lambda one: one.tell("cont")],
    ids=["ask", "tell"],
)
def test_a_refusal_carries_qemus_words(ask: Callable[[Monitor], Awaitable[object]]) -> None:
    async def script(server: Server) -> None:
        await server.refuse(await server.command(), "Migration is not finalized yet")

    async def client(monitor: Monitor) -> None:
        with pytest.raises(CommandRefusedError, match="web on a refused cont") as caught:
            await ask(monitor)
        assert caught.value.description == "Migration is not finalized yet"
        assert monitor.is_open

    play(script, client)


async def swallow(server: Server) -> None:
    await server.command()


async def hang_up_on_command(server: Server) -> None:
    await server.command()
    server.hang_up()


async def garble(server: Server) -> None:
    await server.command()
    await server.send_bytes(b"Segmentation fault\r\n")


@pytest.mark.parametrize(
    ("script", "reason"),
    [(swallow, "no answer within 0.1 s"), (hang_up_on_command, ""), (garble, "")],
)
def test_a_question_without_an_answer_means_that_nothing_was_asked(
    script: Script, reason: str
) -> None:
    async def client(monitor: Monitor) -> None:
        with pytest.raises(MonitorLostError, match="did not answer query-status") as caught:
            await monitor.ask("query-status", object, timeout_s=SHORT_S)
        assert reason in caught.value.why

    play(script, client)


@pytest.mark.parametrize("script", [swallow, hang_up_on_command, garble])
def test_an_order_without_an_answer_may_have_taken_effect(script: Script) -> None:
    async def client(monitor: Monitor) -> None:
        with pytest.raises(OutcomeUnknownError, match="did not answer cont") as caught:
            await monitor.tell("cont", timeout_s=SHORT_S)
        assert "it is unknown" in caught.value.why

    play(script, client)


def test_a_monitor_that_was_lost_is_closed_for_good() -> None:
    async def client(monitor: Monitor) -> None:
        with pytest.raises(MonitorLostError):
            await monitor.ask("query-status", object)
        assert not monitor.is_open
        with pytest.raises(MonitorLostError, match="did not answer"):
            await monitor.ask("query-status", object)
        with pytest.raises(OutcomeUnknownError):
            await monitor.tell("cont")
        await monitor.close()

    play(hang_up_on_command, client)


def test_a_late_answer_is_not_taken_for_the_next_ones() -> None:
    async def script(server: Server) -> None:
        late = await server.command()
        following = await server.command()
        await server.answer(late, {"status": "late", "running": False})
        await server.answer(following, {"status": "running", "running": True})

    async def client(monitor: Monitor) -> None:
        with pytest.raises(MonitorLostError):
            await monitor.ask("query-status", object, timeout_s=SHORT_S)
        assert await commands.query_status(monitor) == RunState("running", True)

    play(script, client)


def test_answers_find_their_questions_in_any_order() -> None:
    async def script(server: Server) -> None:
        first, second = await server.command(), await server.command()
        await server.answer(second, second["execute"])
        await server.answer(first, first["execute"])

    async def client(monitor: Monitor) -> None:
        answers = await asyncio.gather(monitor.ask("query-a", str), monitor.ask("query-b", str))
        assert list(answers) == ["query-a", "query-b"]

    play(script, client)


def test_a_cancelled_question_leaves_the_monitor_usable() -> None:
    async def script(server: Server) -> None:
        await server.command()
        await server.answer(await server.command(), {"status": "paused", "running": False})

    async def client(monitor: Monitor) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(monitor.ask("query-status", object), SHORT_S)
        assert not (await commands.query_status(monitor)).running

    play(script, client)


def test_a_very_long_answer_is_read_whole() -> None:
    long = [{"name": "x" * 1000, "meta-type": "object"}] * 1000

    async def client(monitor: Monitor) -> None:
        assert await monitor.ask("query-qmp-schema", list) == long

    play(answering(query_qmp_schema=long), client)


def event(name: str, **data: object) -> dict[str, object]:
    return {"event": name, "data": data, "timestamp": {"seconds": 1, "microseconds": 2}}


def test_events_are_those_asked_for_in_order_from_the_block_on() -> None:
    async def script(server: Server) -> None:
        await server.send(event("MIGRATION", status="before"))
        await server.answer(await server.command(), {})
        second = await server.command()
        await server.send(
            event("MIGRATION", status="setup"), event("STOP"), event("MIGRATION", status="active")
        )
        await server.answer(second, {})

    async def client(monitor: Monitor) -> None:
        await monitor.ask("query-migrate", object)
        with monitor.events("MIGRATION") as events:
            await monitor.ask("query-migrate", object)
            first = await events.next(5.0)
            assert first is not None
            assert first["data"] == {"status": "setup"}
            assert [message["data"] for message in events.drain()] == [{"status": "active"}]
            assert events.drain() == []
            assert await events.next(SHORT_S) is None

    play(script, client)


def test_events_are_kept_until_they_are_taken_and_no_longer() -> None:
    async def script(server: Server) -> None:
        command = await server.command()
        await server.send(
            *[event("JOB_STATUS_CHANGE", id=str(n), status="running") for n in range(200)]
        )
        await server.answer(command, [])

    def kept() -> int:
        gc.collect()
        return sum(isinstance(thing, Message) for thing in gc.get_objects())

    async def client(monitor: Monitor) -> None:
        before = kept()
        with monitor.events("JOB_STATUS_CHANGE") as events:
            await monitor.ask("query-jobs", object)
            assert len(events.drain()) == 200
            assert kept() - before < 5

    play(script, client)


@pytest.mark.parametrize(
    ("ask", "said", "why"),
    [
        (commands.query_status, {"status": "running"}, "missing required field `running`"),
        (commands.query_status, {"status": 3, "running": True}, r"got `int` - at `\$.status`"),
        (commands.query_jobs, [{"id": None}], r"got `null` - at `\$\[0\].id`"),
        (commands.query_kvm, [], "Expected `object`, got `array`"),
        (commands.query_cpus, [], "the machine has no processor"),
        (commands.query_migrate, {"ram": {"total": True}}, r"got `bool` - at `\$.ram.total`"),
        (commands.query_dirty_rate, {"status": "measured", "dirty-rate": 0.5}, r"\$.dirty-rate"),
        (commands.query_migrate_parameters, 3, "Expected `object`, got `int`"),
    ],
)
def test_an_answer_of_another_type_is_none(
    ask: Callable[[Monitor], Awaitable[object]], said: object, why: str
) -> None:
    async def script(server: Server) -> None:
        await server.answer(await server.command(), said)

    async def client(monitor: Monitor) -> None:
        with pytest.raises(MonitorLostError, match="gave a malformed answer to query-") as caught:
            await ask(monitor)
        assert re.search(why, caught.value.why)

    play(script, client)


def test_an_order_whose_answer_is_of_another_type_may_have_taken_effect() -> None:
    async def script(server: Server) -> None:
        await server.answer(await server.command(), [{"type": 3}])

    async def client(monitor: Monitor) -> None:
        with pytest.raises(OutcomeUnknownError, match="did not answer query-yank"):
            await commands.query_yank(monitor)

    play(script, client)


def test_a_rescue_goes_out_of_band() -> None:
    async def script(server: Server) -> None:
        yank = await server.command()
        assert yank["exec-oob"] == "yank"
        assert yank["arguments"] == {"instances": [{"type": "migration"}]}
        await server.answer(yank, {})
        await server.refuse(await server.command(), "Instance not found")

    async def client(monitor: Monitor) -> None:
        assert await commands.yank_migration(monitor)
        assert not await commands.yank_migration(monitor)

    play(script, client)


def test_closing_tells_qemu_nothing() -> None:
    async def script(server: Server) -> None:
        with pytest.raises(EOFError):
            await server.command()

    async def client(monitor: Monitor) -> None:
        await monitor.close()
        await monitor.close()

    play(script, client)


def test_a_session_is_closed_when_its_block_fails(tmp_path: Path) -> None:
    async def play_it() -> None:
        gone = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(json.dumps(GREETING).encode() + b"\n")
            while not (await reader.read(1000)).endswith(b"}"):
                pass
            writer.write(b'{"return": {}}\n')
            assert await reader.read() == b""
            writer.close()
            gone.set()

        path = tmp_path / "qmp.sock"
        async with await asyncio.start_unix_server(serve, path):
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(str(path))
            with pytest.raises(ZeroDivisionError):
                async with session(sock, "web on a"):
                    raise ZeroDivisionError
            await asyncio.wait_for(gone.wait(), 5)

    asyncio.run(play_it())


# What QEMU 10.0.2 answered, shortened.
REPLIES: dict[str, object] = {
    "query_version": {"qemu": {"micro": 2, "minor": 0, "major": 10}, "package": "Debian"},
    "query_status": {"status": "running", "running": True},
    "query_cpus_fast": [
        {
            "thread-id": 4711,
            "props": {"core-id": 0},
            "qom-path": "/machine/unattached/device[0]",
            "cpu-index": 0,
            "target": "x86_64",
        }
    ],
    "query_machines": [
        {"name": "pc-q35-10.0", "alias": "q35", "cpu-max": 4096, "deprecated": False},
        {"name": "none", "cpu-max": 1},
    ],
    "query_cpu_definitions": [{"name": "qemu64", "typename": "x"}, {"name": "max"}],
    "query_migrate_capabilities": [
        {"state": False, "capability": "multifd"},
        {"state": True, "capability": "return-path"},
    ],
    "query_qmp_schema": [
        {"name": "migrate-set-parameters", "meta-type": "command", "arg-type": "7"},
        {"name": "cont", "meta-type": "command", "arg-type": "0"},
        {
            "name": "7",
            "meta-type": "object",
            "members": [
                {"name": "downtime-limit", "type": "int", "default": None},
                {"name": "multifd-compression", "type": "12", "default": None},
            ],
        },
        {"name": "12", "meta-type": "enum", "values": ["none", "zlib", "zstd"]},
        {"name": "0", "meta-type": "object", "members": []},
    ],
    "query_kvm": {"enabled": False, "present": True},
    "query_migrate": {},
    "query_jobs": [
        {
            "id": "vmckpt-save-1",
            "type": "snapshot-save",
            "status": "concluded",
            "current-progress": 1,
            "total-progress": 1,
            "error": "No space left on device",
        }
    ],
    "query_named_block_nodes": [
        {
            "node-name": "disk0",
            "drv": "qcow2",
            "file": "/images/root.qcow2",
            "ro": False,
            "image": {
                "filename": "/images/root.qcow2",
                "virtual-size": 1 << 30,
                "snapshots": [
                    {
                        "name": "one",
                        "id": "1",
                        "vm-state-size": 140000000,
                        "date-sec": 1700000000,
                        "date-nsec": 1,
                        "vm-clock-sec": 12,
                        "vm-clock-nsec": 500000000,
                    }
                ],
            },
        },
        {
            "node-name": "f",
            "drv": "file",
            "file": "/images/root.qcow2",
            "ro": False,
            "image": {"filename": "", "virtual-size": 0},
        },
    ],
}


def test_answers_become_values() -> None:
    async def client(monitor: Monitor) -> None:
        assert await commands.query_version(monitor) == QemuVersion(10, 0, 2)
        assert await commands.query_status(monitor) == RunState("running", True)
        assert await commands.query_cpus(monitor) == [Cpu(4711, "/machine/unattached/device[0]")]
        assert await commands.query_migrate(monitor) == MigrationStatus("none")
        assert await commands.query_kvm(monitor) is False
        assert await commands.query_jobs(monitor) == [
            QemuJob("vmckpt-save-1", "snapshot-save", "concluded", 1, 1, "No space left on device")
        ]
        snapshot = Snapshot("one", "1", 140000000, 1700000000, 12.5)
        assert await commands.query_named_block_nodes(monitor) == [
            BlockNode("disk0", (snapshot,)),
            BlockNode("f", ()),
        ]

    play(answering(**REPLIES), client)


def test_a_qemu_says_itself_what_it_can_do() -> None:
    async def client(monitor: Monitor) -> None:
        assert await learn(monitor) == Abilities(
            version=QemuVersion(10, 0, 2),
            machines={"pc-q35-10.0": "pc-q35-10.0", "q35": "pc-q35-10.0", "none": "none"},
            cpu_models=frozenset({"qemu64", "max"}),
            capabilities=frozenset({"multifd", "return-path"}),
            compressions=frozenset({"none", "zlib", "zstd"}),
            parameters=frozenset({"multifd-compression", "downtime-limit"}),
            commands=frozenset({"migrate-set-parameters", "cont"}),
        )

    play(answering(**REPLIES), client)


@pytest.mark.parametrize("dies", [False, True])
def test_only_a_qemu_that_lives_and_gets_on_is_proved_alive(tmp_path: Path, dies: bool) -> None:
    busy = [sys.executable, "-I", "-S", "-c", "while True: pass"]
    with subprocess.Popen(busy) as worker:
        process = identify(worker.pid)
        assert process is not None
        if dies:
            worker.kill()
            worker.wait()

        async def client(monitor: Monitor) -> None:
            target = End(LocalHost("b", tmp_path, "127.0.0.1"), VmDir(tmp_path).qemu("0123abcd"))
            target.adopt(monitor)
            if dies:
                with pytest.raises(OperationFailedError, match="has ended"):
                    await prove_alive(target, process)
            else:
                await prove_alive(target, process)

        cpu = {"thread-id": worker.pid, "qom-path": "/machine/unattached/device[0]"}
        try:
            play(answering(query_cpus_fast=[cpu]), client)
        finally:
            worker.kill()
