"""The agent in a domain's guest, through libvirt: its answers, and libvirt's instead."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.contract.test_domain_plan import SEEN
from tests.fake_libvirtd import FakeLibvirtd
from vmckpt.errors import OperationFailedError
from vmckpt.hosts.host import Host
from vmckpt.hosts.local import LocalHost
from vmckpt.qemu.agent import AgentSilentError, GuestAgent, NoProgramError
from vmckpt.vm.domains import agent as agents
from vmckpt.vm.domains.faults import LibvirtRefusedError
from vmckpt.vm.domains.flags import ErrorCode
from vmckpt.vm.domains.inventory import as_domain

pytestmark = pytest.mark.contract


def asked(
    monkeypatch: pytest.MonkeyPatch,
    answer: Callable[[str, float], str],
    question: Callable[[GuestAgent], Awaitable[object]],
) -> object:
    """What a question gives if libvirt answers so."""

    @asynccontextmanager
    async def libvirtd(host: Host) -> AsyncIterator[FakeLibvirtd]:
        yield FakeLibvirtd(host, ask_agent=answer)

    async def ask(host: LocalHost) -> object:
        async with agents.domain_agent(as_domain(host, SEEN)) as agent:
            return await question(agent)

    monkeypatch.setattr(agents, "libvirtd", libvirtd)
    return asyncio.run(ask(LocalHost("a", Path("/"), "127.0.0.1")))


def refusing(code: int, why: str) -> Callable[[str, float], str]:
    def answer(_: str, __: float) -> str:
        raise LibvirtRefusedError("it did not", why=why, remedy="-", code=code)

    return answer


def test_a_program_is_run_in_the_guest(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(request: str, timeout_s: float) -> str:
        command = json.loads(request)
        assert (command["execute"], command["arguments"]["path"]) == ("guest-exec", "/bin/true")
        assert timeout_s == 3
        return '{"return": {"pid": 7}}'

    assert asked(monkeypatch, answer, lambda one: one.start(["/bin/true"], 3)) == 7


@pytest.mark.parametrize(
    "code",
    [ErrorCode.AGENT_UNRESPONSIVE, ErrorCode.AGENT_UNSYNCED, agents.COMMAND_TIMEOUT],
)
def test_one_that_is_silent_is_no_refusal(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """A guest that reboots: its agent is waited for."""
    with pytest.raises(AgentSilentError, match="does not answer: not connected"):
        asked(monkeypatch, refusing(code, "not connected"), lambda one: one.ping())


def test_a_refusal_is_the_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    why = "unable to execute QEMU agent command 'guest-exec': no such file"
    refuse = refusing(ErrorCode.INTERNAL_ERROR, why)
    with pytest.raises(NoProgramError, match="no such file"):
        asked(monkeypatch, refuse, lambda one: one.start(["/bin/no"]))
    with pytest.raises(OperationFailedError, match="refused guest-set-time"):
        asked(monkeypatch, refuse, lambda one: one.set_time())


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"return": {"pid": "7"}}', "{" * 100_000])
def test_what_is_no_answer_is_said_to_be_none(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    with pytest.raises(AgentSilentError, match="violates its protocol"):
        asked(monkeypatch, lambda *_: text, lambda one: one.start(["/bin/true"]))
