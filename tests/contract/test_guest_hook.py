"""A hook's phases through a scripted guest agent: what is run, waited for, and begun again."""

import asyncio
import base64
import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vmckpt.devices.absence import without_devices
from vmckpt.devices.contract import HookPhase
from vmckpt.devices.hook import GuestHook, HookFailedError
from vmckpt.devices.journey import Journey
from vmckpt.errors import JobHeldError, StorageError
from vmckpt.hosts.host import Completed
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.ssh.address import Address
from vmckpt.qemu.agent import GuestAgent
from vmckpt.sequence.steps import Step
from vmckpt.vm.passthrough.passthrough import Passthrough, Strategy
from vmckpt.vm.paths import VmDir

LIMITS = {"lock": 1}
DEVICE = Passthrough("gpu0", "edu", None, Strategy.HOOK_DETACH, "/hook", 0, LIMITS, {})
GOOD = {"exited": True, "exitcode": 0, "out-data": base64.b64encode(b'{"ok": true}').decode()}


class Agent:
    """Answers as `does` says, call by call; every session is a connection of its own."""

    def __init__(self, *does: dict[str, Any] | str) -> None:
        self._does, self.started = list(does), list[dict[str, Any]]()
        self.sessions = self._open = self.most_at_once = 0
        self.refuses = False
        self.slow_s = self.slow_beside_a_hook_s = 0.0
        self.by_ssh: list[list[str]] = []

    async def connect(self, _: Path) -> socket.socket:
        ours, theirs = socket.socketpair()
        self.sessions += 1
        self._task = asyncio.ensure_future(self._serve(theirs))
        return ours

    async def _serve(self, sock: socket.socket) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=sock)
        self._open += 1
        self.most_at_once = max(self.most_at_once, self._open)
        while line := await reader.readline():
            asked = json.loads(line)
            if not await self._answer(asked, writer):
                break
        self._open -= 1
        writer.close()

    async def _answer(self, asked: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        match asked["execute"]:
            case "guest-sync":
                await asyncio.sleep(self.slow_s)
                # What an earlier client left unread comes first.
                writer.write(b'lf a line"}\n{"return": 4711}\n')
                reply: Any = asked["arguments"]["id"]
            case "guest-exec" if self.refuses:
                text = "Command guest-exec has been disabled"
                writer.write(json.dumps({"error": {"desc": text}}).encode() + b"\n")
                return True
            case "guest-exec":
                self.started.append(asked["arguments"])
                reply = {"pid": len(self.started)}
            case _:
                await asyncio.sleep(self.slow_beside_a_hook_s)
                does = self._does.pop(0)
                if does == "dies":
                    return False
                if does == "forgets":
                    writer.write(b'{"error": {"desc": "PID 1 does not exist"}}\n')
                    return True
                reply = does
        writer.write(json.dumps({"return": reply}).encode() + b"\n")
        return True

    async def run(self, argv: list[str], timeout_s: float) -> Completed:
        self.by_ssh.append(argv)
        return Completed(0, '{"ok": true}\n', "")

    def hook(self, device: Passthrough = DEVICE) -> GuestHook:
        files = VmDir(Path("/s/vms/web")).qemu("q1")
        return GuestHook(self, files, device, "run-1")  # type: ignore[arg-type]


def run(agent: Agent, phase: HookPhase = HookPhase.LOCK, tries: int = 1) -> None:
    async def act() -> None:
        await agent.hook().do(phase, tries=tries)

    asyncio.run(asyncio.wait_for(act(), 30))


@pytest.mark.parametrize(
    ("refuses", "does", "by_ssh"),
    [
        (False, [GOOD], 0),
        (True, [], 1),  # the agents of some distributions may run nothing
        (False, ["dies"], 1),
    ],
)
def test_ssh_is_the_second_way(refuses: bool, does: list[Any], by_ssh: int) -> None:
    agent = Agent(*does)
    agent.refuses = refuses
    device = DEVICE._replace(ssh=Address("192.0.2.30", "root", 2222))

    async def act() -> None:
        await agent.hook(device).do(HookPhase.LOCK)

    asyncio.run(asyncio.wait_for(act(), 30))
    assert len(agent.by_ssh) == by_ssh
    for argv in agent.by_ssh:
        where, line = argv[-7:-1], argv[-1]
        assert where == ["-l", "root", "-p", "2222", "--", "192.0.2.30"]
        assert line.endswith(" | timeout -s KILL 1 /hook lock")


def test_an_agent_that_is_always_slow_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vmckpt.devices.hook.PATIENCE_S", 0.1)
    agent = Agent(GOOD)
    agent.slow_s = 0.25
    run(agent)
    assert agent.sessions == 3


def test_a_guest_that_a_hook_makes_slow_is_not_asked_to_begin_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vmckpt.devices.hook.PATIENCE_S", 0.3)
    agent = Agent({"exited": False}, GOOD)
    agent.slow_s, agent.slow_beside_a_hook_s = 0.2, 0.5
    run(agent, HookPhase.RELEASE)
    assert (agent.sessions, len(agent.started)) == (1, 1)


def test_an_agent_that_may_run_nothing_is_not_asked_again() -> None:
    agent = Agent()
    agent.refuses = True
    with pytest.raises(HookFailedError) as error:
        run(agent)
    assert "guest-exec has been disabled" in error.value.why
    assert agent.sessions == 1


def answered(code: int, words: dict[str, Any]) -> dict[str, Any]:
    out = base64.b64encode(json.dumps(words).encode()).decode()
    return {"exited": True, "exitcode": code, "out-data": out}


def test_a_phase_is_run_with_its_time_limit_and_its_request() -> None:
    agent = Agent({"exited": False}, GOOD)
    run(agent)
    (started,) = agent.started
    assert started["path"] == "timeout"
    assert started["arg"] == ["-s", "KILL", "1", "/hook", "lock"]
    told = json.loads(base64.b64decode(started["input-data"]))
    assert told == {"format": 1, "device": "gpu0", "run": "run-1", "limit_s": 1}


def test_what_the_hook_says_is_told() -> None:
    agent = Agent(answered(1, {"ok": False, "why": "MIG is on", "remedy": "switch it off"}))
    with pytest.raises(HookFailedError) as error:
        run(agent)
    assert "hook of 'gpu0' failed in phase lock" in error.value.what
    assert (error.value.why, error.value.remedy) == (
        "MIG is on",
        "the hook in the guest proposes: switch it off",
    )
    assert len(agent.started) == 1


def test_what_failed_is_tried_again_on_the_way_back() -> None:
    agent = Agent(answered(1, {"ok": False, "why": "x"}), GOOD)
    run(agent, HookPhase.RESTORE, tries=3)
    assert len(agent.started) == 2


@pytest.mark.parametrize("does", ["dies", "forgets"])
def test_an_agent_that_comes_back_is_asked_anew(does: str) -> None:
    agent = Agent(does, GOOD)
    run(agent)
    assert len(agent.started) == 2
    assert agent.sessions == 2


@pytest.mark.parametrize(
    "status",
    [
        {"exited": True, "exitcode": 137},
        {"exited": True, "signal": 9},
    ],
)
def test_a_hook_that_took_too_long_was_ended(status: dict[str, Any]) -> None:
    with pytest.raises(HookFailedError) as error:
        run(Agent(status))
    assert "not done within 1 s" in error.value.why
    assert "limits_s = { lock = N }" in error.value.remedy


def test_a_hook_that_is_not_there() -> None:
    with pytest.raises(HookFailedError) as error:
        run(Agent({"exited": True, "exitcode": 127}))
    assert "no program /hook" in error.value.why


BAD = {"exited": True, "exitcode": 1}


@pytest.mark.parametrize(
    ("phase", "does", "asked"),
    [
        (HookPhase.LOCK, [GOOD, GOOD], ["a", "b"]),
        # On the way out the first failure ends it; on the way back the others are brought back.
        (HookPhase.LOCK, [BAD], ["a"]),
        (HookPhase.RESTORE, [BAD, GOOD], ["a", "b"]),
    ],
)
def test_hooks_of_several_devices_are_run_one_after_the_other(
    phase: HookPhase, does: list[dict[str, Any]], asked: list[str]
) -> None:
    agent = Agent(*does)
    devices = (DEVICE._replace(id="a"), DEVICE._replace(id="b"))
    journey = Journey(devices, "run-1", lambda _code, _text: None)

    async def act() -> None:
        location = SimpleNamespace(host=agent, files=VmDir(Path("/s/vms/web")).qemu("q1"))
        await journey.phase(location, phase)

    if BAD in does:
        with pytest.raises(HookFailedError) as error:
            asyncio.run(asyncio.wait_for(act(), 30))
        assert "'a'" in error.value.what
    else:
        asyncio.run(asyncio.wait_for(act(), 30))
    told = [json.loads(base64.b64decode(one["input-data"]))["device"] for one in agent.started]
    assert told == asked
    assert agent.most_at_once == 1


def test_answers_to_those_before_are_left_out() -> None:
    """An agent that comes back answers all that it was asked meanwhile."""

    async def act() -> None:
        agent = Agent()
        session = await GuestAgent.connect(await agent.connect(Path()))
        try:
            assert await session.start(["/x"]) == 1
        finally:
            await session.close()

    asyncio.run(asyncio.wait_for(act(), 10))


def test_a_program_that_said_much_has_ended_all_the_same() -> None:
    """How it ended is told once, in one line with all that it said."""
    said = b"unpacking ...\n" * 200_000

    async def act() -> None:
        agent = Agent({"exited": True, "exitcode": 0, "out-data": base64.b64encode(said).decode()})
        session = await GuestAgent.connect(await agent.connect(Path()))
        try:
            ended = await session.ended(await session.start(["/x"]))
            assert ended is not None
            assert (ended.returncode, ended.out) == (0, said)
        finally:
            await session.close()

    asyncio.run(asyncio.wait_for(act(), 10))


def test_work_that_failed_says_that_a_device_has_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint met a full disk: that alone was said, and the guest had lost its device."""

    async def out(*_: object) -> None:
        return None

    async def fails(*_: object) -> None:
        raise HookFailedError("no card", why="another program has it", remedy="-")

    async def work() -> None:
        raise StorageError("the disk is full", why="-", remedy="-")

    step = Step("unplug", out, fails)
    monkeypatch.setattr(Journey, "steps_out", lambda *_: (step,))
    host, files = LocalHost("a", tmp_path, "127.0.0.1"), VmDir(tmp_path).qemu("q1")
    vm: Any = SimpleNamespace(
        name="web",
        host=host,
        spec=SimpleNamespace(passthrough=(DEVICE,)),
        qemu=SimpleNamespace(files=files),
        directory=VmDir(tmp_path),
    )
    monitor: Any = None
    with pytest.raises(JobHeldError, match="disk is full") as error:
        asyncio.run(without_devices(vm, monitor, "run-1", lambda _: None, work))
    assert "another program has it" in error.value.why
    assert error.value.remedy == "vmckpt device recover web"
