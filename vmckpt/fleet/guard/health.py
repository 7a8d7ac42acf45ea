"""Is the VM well? Each check gives a reason why not, or nothing."""

import asyncio
import os
import shlex
import signal
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum
from functools import partial
from http.client import HTTPException
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from vmckpt.errors import RefusedError, UsageError, VmckptError
from vmckpt.qemu.agent import GuestAgent
from vmckpt.sequence.in_thread import in_thread
from vmckpt.vm.inventory import Vm, look

CHECK_TIMEOUT_S = 10.0
_LAST_PORT = 65535
# A variable of a command's environment may have 128 KiB (execve(2)).
_MOST_CHARS = 16_000


class Kind(Enum):
    """What a check asks."""

    AGENT = "agent"
    TCP = "tcp"
    HTTP = "http"
    COMMAND = "command"


class HealthCheck(NamedTuple):
    """One thing to ask; `words` is the URL, the command line, or address and port."""

    kind: Kind
    words: tuple[str, ...]
    text: str


def parse_command(text: str) -> tuple[str, ...]:
    """The words of a command line, split as a shell would. Raises UsageError."""
    try:
        words = tuple(shlex.split(text))
    except ValueError as exc:
        raise _no_command(text, str(exc)) from exc
    if not words:
        raise _no_command(text, "it is empty")
    return words


def _no_command(text: str, why: str) -> UsageError:
    remedy = "write it as for a shell, quotes closed"
    return UsageError(f"'{text}' is no command", why=why, remedy=remedy)


def parse_check(text: str, address: str | None) -> HealthCheck:
    """`agent`, `tcp:PORT`, `tcp:ADDRESS:PORT`, a URL, or a command line. Raises UsageError."""
    if text == "agent":
        return HealthCheck(Kind.AGENT, (), text)
    if text.startswith(("http://", "https://")):
        return HealthCheck(Kind.HTTP, (text,), text)
    if text.startswith("tcp:"):
        where, _, port = text.removeprefix("tcp:").rpartition(":")
        if not port.isdecimal() or not 0 < int(port) <= _LAST_PORT:
            raise _no_check(text, "it has to be tcp:PORT or tcp:ADDRESS:PORT")
        found = where.strip("[]") or address
        return HealthCheck(Kind.TCP, (found or "", port), text)
    try:
        return HealthCheck(Kind.COMMAND, parse_command(text), text)
    except UsageError as exc:
        raise _no_check(text, exc.why) from exc


def _no_check(text: str, why: str) -> UsageError:
    remedy = "give agent, tcp:PORT, http://..., or a command"
    return UsageError(f"'{text}' is no health check", why=why, remedy=remedy)


def require_possible(vm: Vm, checks: tuple[HealthCheck, ...], *, in_guest: bool) -> None:
    """Raises RefusedError when a check, or a command in the guest, cannot be had of this VM."""
    if vm.spec.guest_agent:
        return
    asked = [one.text for one in checks if one.kind is Kind.AGENT or one.words[:1] == ("",)]
    if in_guest:
        asked.append("--in guest")
    if asked:
        raise RefusedError(
            f"'{vm.name}' cannot do {', '.join(asked)}",
            why="its spec has no guest_agent = true",
            remedy="use other ways; for a port, say where: tcp:ADDRESS:PORT or --address",
        )


async def ailments(vm: Vm, checks: tuple[HealthCheck, ...]) -> list[str]:
    """What is wrong with the VM now, by QEMU and by all checks; empty: it is well."""
    seen = await look(vm)
    if seen.state != "running":
        return [as_variable(f"it is {seen.state}{': ' if seen.ended else ''}{seen.ended}")]
    found = await asyncio.gather(*(_ask(vm, check) for check in checks))
    return [
        as_variable(f"{check.text}: {reason}")
        for check, reason in zip(checks, found, strict=True)
        if reason
    ]


async def _ask(vm: Vm, check: HealthCheck) -> str:
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            match check.kind:
                case Kind.AGENT:
                    await (await _agent(vm)).close()
                    return ""
                case Kind.TCP:
                    return await _tcp(vm, *check.words)
                case Kind.HTTP:
                    return await in_thread(partial(_http, check.words[0]))
                case Kind.COMMAND:
                    return await _command(check.words, variables(vm.name, vm.host.name))
    except TimeoutError:
        return f"no answer within {CHECK_TIMEOUT_S:g} s"
    except VmckptError as exc:
        return str(exc)
    except OSError as exc:
        return os.strerror(exc.errno) if exc.errno else str(exc)


async def _agent(vm: Vm) -> GuestAgent:
    return await GuestAgent.connect(await vm.host.connect(vm.qemu.files.agent))


async def _tcp(vm: Vm, address: str, port: str) -> str:
    if not address:
        agent = await _agent(vm)
        try:
            addresses = await agent.addresses()
        finally:
            await agent.close()
        if not addresses:
            return "the guest has no address yet"
        address = addresses[0]
    _, writer = await asyncio.open_connection(address, int(port))
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return ""


class _OfOneHost(urllib.request.HTTPRedirectHandler):
    """What a guest says to ask instead is asked only of itself: this machine reaches more."""

    def redirect_request(self, req: urllib.request.Request, *more: Any) -> Any:
        """None: it is not followed."""
        is_same = urlsplit(more[-1]).hostname == urlsplit(req.full_url).hostname
        return super().redirect_request(req, *more) if is_same else None


def _http(url: str) -> str:
    """Blocking. By no proxy: what is asked is the guest."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _OfOneHost)
    try:
        with opener.open(url, timeout=CHECK_TIMEOUT_S):
            return ""
    except urllib.error.HTTPError as exc:
        exc.close()
        return f"HTTP {exc.code} {exc.reason}"
    except (OSError, ValueError, HTTPException) as exc:
        return f"{type(exc).__name__}: {exc}" if isinstance(exc, HTTPException) else str(exc)


def as_variable(text: str) -> str:
    """What a guest or a program has said, as a command may have it in its environment. Pure."""
    return "".join(char if char.isprintable() else " " for char in text[:_MOST_CHARS])


def variables(vm: str, host: str) -> Mapping[str, str]:
    """What commands that are run about a VM find in their environment."""
    return os.environ | {"VMCKPT_VM": vm, "VMCKPT_HOST": host}


async def _command(words: tuple[str, ...], environment: Mapping[str, str]) -> str:
    child = await asyncio.create_subprocess_exec(
        *words,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        env=dict(environment),
        start_new_session=True,
    )
    try:
        _, said = await child.communicate()
    except asyncio.CancelledError:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        await child.wait()
        raise
    last = said.decode(errors="replace").strip().splitlines()[-1:]
    return "" if child.returncode == 0 else ": ".join([f"exit status {child.returncode}", *last])
