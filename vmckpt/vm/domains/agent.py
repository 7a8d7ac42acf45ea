"""The guest agent of a domain, which libvirt alone may reach."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from vmckpt.errors import OperationFailedError
from vmckpt.qemu.agent import AgentSilentError, GuestAgent
from vmckpt.vm.domains.faults import LibvirtRefusedError
from vmckpt.vm.domains.flags import ErrorCode
from vmckpt.vm.domains.inventory import Domain
from vmckpt.vm.domains.libvirtd import Libvirtd
from vmckpt.vm.domains.sessions import libvirtd

# VIR_ERR_AGENT_COMMAND_TIMEOUT of libvirt 11.2, which an older client passes on without a name.
COMMAND_TIMEOUT = 112
_SILENT = frozenset({ErrorCode.AGENT_UNRESPONSIVE, ErrorCode.AGENT_UNSYNCED, COMMAND_TIMEOUT})


@asynccontextmanager
async def domain_agent(domain: Domain) -> AsyncIterator[GuestAgent]:
    """A session with the agent in the domain's guest, for the block.

    Raises RefusedError, HostDownError: there is no session with its libvirtd.
    """
    async with libvirtd(domain.host) as session:
        yield GuestAgent(_ByLibvirt(session, domain.uuid))


class _ByLibvirt:
    """See `AgentChannel`. libvirt limits an answer to 4 MiB (REMOTE_STRING_MAX)."""

    def __init__(self, session: Libvirtd, uuid: str) -> None:
        self._session, self._uuid = session, uuid

    async def answer(self, request: Mapping[str, Any], timeout_s: float, most_bytes: int) -> bytes:
        """See `AgentChannel`."""
        try:
            text = await self._session.ask_agent(self._uuid, json.dumps(request), timeout_s)
        except LibvirtRefusedError as exc:
            remedy = "check that qemu-guest-agent runs in the guest, and see its log"
            if exc.code in _SILENT:
                what = "the guest agent does not answer"
                raise AgentSilentError(what, why=exc.why, remedy=remedy) from exc
            what = f"the guest agent refused {request['execute']}"
            raise OperationFailedError(what, why=exc.why, remedy=remedy) from exc
        return text.encode()

    async def close(self) -> None:
        """The session with libvirtd ends with its own block."""
