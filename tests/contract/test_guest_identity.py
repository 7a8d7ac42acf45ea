"""What a guest from a checkpoint is told by its agent, and what is said when it cannot be told."""

import asyncio
import base64
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.unit.test_checkpoint_plans import HOST, OURS, taken
from vmckpt.checkpoint.facts import CheckpointFacts
from vmckpt.checkpoint.restore.identity import new_macs, tell_guest
from vmckpt.checkpoint.restore.planned import plan_copy, plan_itself
from vmckpt.hosts.local import LocalHost
from vmckpt.vm.argv import default_mac
from vmckpt.vm.spec.spec import Spec

OLD, NEW = "52:54:00:00:00:01", default_mac("web-2", 0)
Answer = Callable[[str, dict[str, Any]], dict[str, Any]]


def facts() -> CheckpointFacts:
    return replace(taken(), spec=taken().spec.replace("heartbeat_id = 3", "guest_agent = true"))


def copy() -> Spec:
    return plan_copy(facts(), HOST, "web-2", OURS, keep_macs=False).spec


def told(
    tmp_path: Path,
    answer: Answer,
    spec: Spec,
    *,
    plugged: bool = False,
    of: CheckpointFacts | None = None,
) -> list[str]:
    """What `tell_guest` says with an agent that answers so."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            asked = json.loads(line)
            said = answer(asked["execute"], asked.get("arguments", {}))
            writer.write(json.dumps(said).encode() + b"\n")
        writer.close()

    async def go() -> list[str]:
        socket = tmp_path / "agent.sock"
        async with await asyncio.start_unix_server(serve, str(socket)):
            host = LocalHost("here", tmp_path, "127.0.0.1")
            return await tell_guest(host, socket, of or facts(), spec, plugged=plugged)

    return asyncio.run(go())


class Guest:
    """A guest whose `ip` is in /bin, as its agent shows it."""

    def __init__(self, *, may_run: bool = True) -> None:
        self.clock_ns = 0
        self.ran: list[list[str]] = []
        self._may_run = may_run

    def __call__(self, command: str, words: dict[str, Any]) -> dict[str, Any]:
        match command:
            case "guest-sync":
                return {"return": words["id"]}
            case "guest-set-time":
                self.clock_ns = words["time"]
                return {"return": {}}
            case "guest-network-get-interfaces":
                lo = {"name": "lo", "hardware-address": "00:00:00:00:00:00"}
                return {"return": [lo, {"name": "eth0", "hardware-address": OLD.upper()}]}
            case "guest-exec" if self._may_run and words["path"] == "/bin/ip":
                self.ran.append([words["path"], *words["arg"]])
                return {"return": {"pid": 7}}
            case "guest-exec-status":
                return {"return": {"exited": True, "exitcode": 0}}
        return {"error": {"desc": f"{command} is not done here"}}


def test_a_copy_is_told_the_time_and_its_mac(tmp_path: Path) -> None:
    guest = Guest()
    assert told(tmp_path, guest, copy()) == []
    assert guest.clock_ns > 0
    assert guest.ran == [["/bin/ip", "link", "set", "dev", "eth0", "address", NEW]]


def test_the_vm_itself_keeps_its_mac(tmp_path: Path) -> None:
    guest = Guest()
    spec = plan_itself(facts(), HOST, OURS).spec
    assert new_macs(facts(), spec) == []
    assert told(tmp_path, guest, spec) == []
    assert (guest.clock_ns > 0, guest.ran) == (True, [])


def test_a_nic_that_the_guest_has_given_another_mac_is_said(tmp_path: Path) -> None:
    guest = Guest()
    spec = copy()
    moved = replace(facts(), macs=("52:54:00:00:00:02",))
    (said,) = told(tmp_path, guest, spec, of=moved)
    assert "none of its interfaces has 52:54:00:00:00:02" in said
    assert guest.ran == []
    # One that has it already needs nothing.
    taken_on = spec._replace(nics=tuple(nic._replace(mac=OLD) for nic in spec.nics))
    assert told(tmp_path, guest, taken_on, of=moved) == []


def test_an_agent_that_may_run_nothing(tmp_path: Path) -> None:
    (said,) = told(tmp_path, Guest(may_run=False), copy(), plugged=True)
    assert said.startswith(f"the guest keeps MAC {OLD}, which the VM that it is a copy of")
    assert f"until its next boot with {NEW} (guest-exec is not done here)" in said


def test_a_program_that_fails_says_why(tmp_path: Path) -> None:
    guest = Guest()

    def answer(command: str, words: dict[str, Any]) -> dict[str, Any]:
        if command == "guest-exec-status":
            error = base64.b64encode(b"Operation not permitted\n").decode()
            return {"return": {"exited": True, "exitcode": 2, "err-data": error}}
        return guest(command, words)

    (said,) = told(tmp_path, answer, copy())
    assert said.endswith("(Operation not permitted)")


def test_without_an_agent_both_are_said(tmp_path: Path) -> None:
    spec = copy()._replace(guest_agent=False)
    host = LocalHost("here", tmp_path, "127.0.0.1")
    agent = tmp_path / "agent.sock"
    clock, mac = asyncio.run(tell_guest(host, agent, facts(), spec, plugged=False))
    assert "clock is as it was" in clock
    assert f"keeps MAC {OLD}, until its next boot with {NEW} (no guest agent)" in mac
    # One that is silent is the same; there is no one at the socket.
    clock, mac = asyncio.run(tell_guest(host, agent, facts(), copy(), plugged=False))
    assert "clock is as it was" in clock
    assert "its guest agent is silent" in mac
