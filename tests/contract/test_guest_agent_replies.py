"""What a guest says is data: whatever it is, it ends no more than the question."""

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from vmckpt.errors import OperationFailedError
from vmckpt.qemu import agent
from vmckpt.qemu.agent import AgentSilentError, GuestAgent

pytestmark = pytest.mark.contract

Question = Callable[[GuestAgent], Awaitable[object]]
QUESTIONS: dict[str, Question] = {
    "clock": lambda one: one.set_time(1),
    "interfaces": lambda one: one.interfaces(1),
    "addresses": lambda one: one.addresses(1),
    "start": lambda one: one.start(["true"], 1),
    "ended": lambda one: one.ended(7, 1),
    "run": lambda one: one.run_first(["/bin/ip"], ["link"], 1),
}


def asked(question: Question, *said: bytes) -> object:
    """What comes of a question to an agent that keeps to the protocol once, then says `said`."""

    async def scripted(near: socket.socket) -> None:
        reader, writer = await asyncio.open_unix_connection(sock=near)
        number = json.loads(await reader.readline())["arguments"]["id"]
        writer.write(json.dumps({"return": number}).encode() + b"\n")
        for one in said:
            if not await reader.readline():
                break
            writer.write(one)
        writer.write_eof()
        writer.close()

    async def both() -> object:
        ours, theirs = socket.socketpair()
        answering = asyncio.create_task(scripted(theirs))
        session = await GuestAgent.connect(ours, 5)
        try:
            return await question(session)
        finally:
            await session.close()
            answering.cancel()
            await asyncio.wait({answering})

    return asyncio.run(both())


NOT_ANSWERS = [
    b"3\n",
    b"[]\n",
    b"null\n",
    b"{}\n",
    b"\n",
    b'{"return"\n',
    b'{"return": NaN}\n',
    b'{"return": {"a": 1, "a": 2}}\n',
    b'{"return": "\\ud800"}\n',
    b'{"return": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
    b'{"error": 3}\n',
    b'{"error": {"desc": []}}\n',
    b"\xff\xfe\n",
    b"x" * (2 << 20),
]


@pytest.mark.parametrize("question", QUESTIONS)
def test_what_is_no_answer_is_an_agents_fault(question: str) -> None:
    for said in NOT_ANSWERS:
        with pytest.raises((AgentSilentError, OperationFailedError)):
            asked(QUESTIONS[question], said)


@pytest.mark.parametrize(
    ("question", "told"),
    [
        ("interfaces", {}),
        ("interfaces", [3]),
        ("interfaces", [{"hardware-address": "x"}]),
        ("interfaces", [{"name": 3}]),
        ("addresses", [{"name": "a", "ip-addresses": 3}]),
        ("addresses", [{"name": "a", "ip-addresses": [{}]}]),
        ("addresses", [{"name": "a", "ip-addresses": [{"ip-address": "$(reboot)"}]}]),
        ("start", 3),
        ("start", {}),
        ("start", {"pid": "1"}),
        ("start", {"pid": -1}),
        ("start", {"pid": 1 << 80}),
        ("ended", []),
        ("ended", {"exited": 1}),
        ("ended", {"exited": True, "exitcode": "0"}),
        ("ended", {"exited": True, "signal": []}),
        ("ended", {"exited": True, "exitcode": 0, "out-data": 3}),
        ("ended", {"exited": True, "exitcode": 0, "err-data": "abc"}),
    ],
)
def test_an_answer_of_other_types_is_an_agents_fault(question: str, told: Any) -> None:
    with pytest.raises(AgentSilentError, match="malformed"):
        asked(QUESTIONS[question], json.dumps({"return": told}).encode() + b"\n")


def test_addresses_that_only_the_guest_can_mean_are_left_out() -> None:
    mine = ["127.0.0.1", "::1", "fe80::1", "0.0.0.0", "224.0.0.1", "2001:db8::7", "192.0.2.7"]
    told = [{"name": "e", "ip-addresses": [{"ip-address": one} for one in mine]}]
    said = json.dumps({"return": told}).encode() + b"\n"
    assert asked(QUESTIONS["addresses"], said) == ["192.0.2.7", "2001:db8::7"]


def test_an_agent_that_never_stops_talking_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "MOST_OUTPUT_BYTES", 1 << 20)

    async def flood(near: socket.socket) -> None:
        _, writer = await asyncio.open_unix_connection(sock=near)
        while True:
            writer.write(b'{"return": 1}\n' * 4096)
            await writer.drain()

    async def both() -> None:
        ours, theirs = socket.socketpair()
        flooding = asyncio.create_task(flood(theirs))
        try:
            with pytest.raises(AgentSilentError):
                await GuestAgent.connect(ours, 0.3)
        finally:
            flooding.cancel()
            await asyncio.wait({flooding})

    asyncio.run(both())
