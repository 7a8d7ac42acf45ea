"""The QEMU guest agent: JSON lines over a virtio serial port, answered by a daemon in the guest."""

import asyncio
import base64
import json
import random
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

from vmckpt.errors import HostDownError, OperationFailedError

SYNC_TIMEOUT_S = 2.0
# Of a program it keeps 16 MiB of each stream (qga/commands.c), and tells both in one line, base64.
MOST_ANSWER_BYTES = 48 << 20
# Between two questions whether a program has ended: each costs the guest time. Longer each time.
POLL_S, MOST_POLL_S = 0.02, 0.2


class AgentSilentError(HostDownError):
    """No agent runs in the guest, or it does not answer now."""


class NoProgramError(OperationFailedError):
    """The guest does not run that program: it has none, or its agent may run none."""


class GuestExit(NamedTuple):
    """How a program in the guest ended: its exit status, a signal's as minus its number."""

    returncode: int
    out: bytes
    err: bytes


class GuestAgent:
    """A session with the agent. One at a time: the port has one reader."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def connect(cls, sock: socket.socket, timeout_s: float = SYNC_TIMEOUT_S) -> Self:
        """A session on the agent's connected socket, which this takes over.

        Raises AgentSilentError when nobody answers within `timeout_s`.
        """
        agent = cls(*await asyncio.open_unix_connection(sock=sock, limit=MOST_ANSWER_BYTES))
        try:
            await agent._sync(timeout_s)
        except BaseException:
            await agent.close()
            raise
        return agent

    async def set_time(self, timeout_s: float = 5.0) -> None:
        """Set the guest's clock to this machine's.

        Raises AgentSilentError, OperationFailedError (the guest refused).
        """
        await self._ask("guest-set-time", {"time": time.time_ns()}, timeout_s)

    async def interfaces(self, timeout_s: float = 5.0) -> list[dict[str, Any]]:
        """The guest's network interfaces: `name`, `hardware-address`, ...

        Raises AgentSilentError, OperationFailedError (the guest refused).
        """
        found: list[dict[str, Any]] = await self._ask("guest-network-get-interfaces", {}, timeout_s)
        return found

    async def addresses(self, timeout_s: float = 5.0) -> list[str]:
        """The guest's own addresses, IPv4 first, without those that nobody else can reach.

        Raises as `interfaces` does.
        """
        found = [
            (one["ip-address-type"], one["ip-address"])
            for interface in await self.interfaces(timeout_s)
            for one in interface.get("ip-addresses", ())
        ]
        reachable = [
            one for one in found if not one[1].startswith(("127.", "fe80:")) and one[1] != "::1"
        ]
        return [address for _, address in sorted(reachable, key=lambda one: one[0] != "ipv4")]

    async def start(
        self, argv: Sequence[str], timeout_s: float = 5.0, *, given: bytes = b""
    ) -> int:
        """Start a program in the guest, its output kept by the agent; its pid there.

        It reads `given`. Raises AgentSilentError, NoProgramError.
        """
        words: dict[str, Any] = {"path": argv[0], "arg": list(argv[1:]), "capture-output": True}
        if given:
            words["input-data"] = base64.b64encode(given).decode()
        try:
            return int((await self._ask("guest-exec", words, timeout_s))["pid"])
        except OperationFailedError as exc:
            raise NoProgramError(exc.what, why=exc.why, remedy=exc.remedy) from exc

    async def ended(self, pid: int, timeout_s: float = 5.0) -> GuestExit | None:
        """How a program that `start` began has ended; None: it runs. Told once.

        Raises AgentSilentError, OperationFailedError (the agent knows no such program).
        """
        status = await self._ask("guest-exec-status", {"pid": pid}, timeout_s)
        if not status["exited"]:
            return None
        out, err = (base64.b64decode(status.get(key, "")) for key in ("out-data", "err-data"))
        code = status.get("exitcode")
        return GuestExit(-status.get("signal", 0) if code is None else code, out, err)

    async def run_first(
        self, paths: Sequence[str], words: Sequence[str], timeout_s: float = 5.0
    ) -> None:
        """Run the first of these programs that the guest has, to its end.

        Raises AgentSilentError, OperationFailedError: the guest refuses, or has none, or it fails.
        """
        *others, last = paths
        for path in others:
            try:
                return await self._run(path, words, timeout_s)
            except NoProgramError:
                continue
        return await self._run(last, words, timeout_s)

    async def _run(self, path: str, words: Sequence[str], timeout_s: float) -> None:
        pid = await self.start([path, *words], timeout_s)
        deadline_s, poll_s = time.monotonic() + timeout_s, POLL_S
        while time.monotonic() < deadline_s:
            if done := await self.ended(pid, timeout_s):
                if done.returncode == 0:
                    return
                raise OperationFailedError(
                    f"{path} failed in the guest",
                    why=done.err.decode(errors="replace").strip()
                    or f"it ended with {done.returncode}",
                    remedy=f"try it there: {path} {' '.join(words)}",
                )
            await asyncio.sleep(poll_s)
            poll_s = min(2 * poll_s, MOST_POLL_S)
        raise AgentSilentError(
            f"{path} does not end in the guest",
            why=f"not within {timeout_s:g} s",
            remedy="look at the guest",
        )

    async def _sync(self, timeout_s: float) -> None:
        """What earlier clients left unread, half a line maybe, ends at the answer to our number.

        It is asked once: an agent that comes back answers all that was asked meanwhile, in order.
        """
        number = random.getrandbits(31)
        try:
            async with asyncio.timeout(timeout_s):
                await self._send("guest-sync", {"id": number})
                while _number_in(line := await self._reader.readline()) != number:
                    if not line:
                        raise OSError("it has hung up")
        except (TimeoutError, OSError, ValueError) as exc:
            raise _silent(exc, timeout_s) from exc

    async def _send(self, command: str, arguments: Mapping[str, Any]) -> None:
        request = {"execute": command, "arguments": arguments}
        self._writer.write(json.dumps(request).encode() + b"\n")
        await self._writer.drain()

    async def _ask(self, command: str, arguments: Mapping[str, Any], timeout_s: float) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                await self._send(command, arguments)
                reply = json.loads(await self._reader.readline())
        except (TimeoutError, OSError, ValueError) as exc:
            raise _silent(exc, timeout_s) from exc
        if "error" in reply:
            raise OperationFailedError(
                f"the guest agent refused {command}",
                why=str(reply["error"].get("desc", reply["error"])),
                remedy="see the guest agent's log in the guest",
            )
        return reply.get("return")

    async def close(self) -> None:
        """End the session."""
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except OSError:
            return  # QEMU has gone first


def _number_in(line: bytes) -> object:
    """What a line answers; None when it is no whole answer."""
    try:
        reply = json.loads(line)
    except ValueError:
        return None
    return reply.get("return") if isinstance(reply, dict) else None


def _silent(exc: Exception, timeout_s: float) -> AgentSilentError:
    return AgentSilentError(
        "the guest agent does not answer",
        why=str(exc) or f"nothing within {timeout_s:g} s",
        remedy="check that qemu-guest-agent runs in the guest",
    )
