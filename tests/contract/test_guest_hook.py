"""A hook's phases through a scripted guest agent: what is run, waited for, and begun anew."""

import asyncio
import base64
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from vmckpt.devices.contract import Phase
from vmckpt.devices.hook import GuestHook, HookFailedError
from vmckpt.qemu.agent import GuestAgent
from vmckpt.vm.passthrough import Passthrough, Strategy
from vmckpt.vm.paths import VmDir

LIMITS = {"lock": 1}
DEVICE = Passthrough("gpu0", "edu", None, Strategy.HOOK_DETACH, "/hook", 0, LIMITS, {})
GOOD = {"exited": True, "exitcode": 0, "out-data": base64.b64encode(b'{"ok": true}').decode()}


class Agent:
    """Answers as `does` says, call by call; every session is a connection of its own."""

    def __init__(self, *does: dict[str, Any] | str) -> None:
        self._does, self.started = list(does), list[dict[str, Any]]()
        self.sessions = 0

    async def connect(self, _: Path) -> socket.socket:
        ours, theirs = socket.socketpair()
        self.sessions += 1
        self._task = asyncio.ensure_future(self._serve(theirs))
        return ours

    async def _serve(self, sock: socket.socket) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=sock)
        while line := await reader.readline():
            asked = json.loads(line)
            if not await self._answer(asked, writer):
                break
        writer.close()

    async def _answer(self, asked: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        match asked["execute"]:
            case "guest-sync":
                # What an earlier client left unread comes first.
                writer.write(b'lf a line"}\n{"return": 4711}\n')
                reply: Any = asked["arguments"]["id"]
            case "guest-exec":
                self.started.append(asked["arguments"])
                reply = {"pid": len(self.started)}
            case _:
                does = self._does.pop(0)
                if does == "dies":
                    return False
                if does == "forgets":
                    writer.write(b'{"error": {"desc": "PID 1 does not exist"}}\n')
                    return True
                reply = does
        writer.write(json.dumps({"return": reply}).encode() + b"\n")
        return True

    def hook(self) -> GuestHook:
        files = VmDir(Path("/s/vms/web")).qemu("q1")
        return GuestHook(self, files, DEVICE, "run-1")  # type: ignore[arg-type]


def run(agent: Agent, phase: Phase = Phase.LOCK, tries: int = 1) -> None:
    async def act() -> None:
        await agent.hook().do(phase, tries=tries)

    asyncio.run(asyncio.wait_for(act(), 30))


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
    assert (error.value.why, error.value.remedy) == ("MIG is on", "switch it off")
    assert len(agent.started) == 1


def test_what_failed_is_tried_again_on_the_way_back() -> None:
    agent = Agent(answered(1, {"ok": False, "why": "x"}), GOOD)
    run(agent, Phase.RESTORE, tries=3)
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
