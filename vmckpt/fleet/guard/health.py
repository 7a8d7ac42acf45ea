"""Check the VM's health: each check returns a reason why not, or nothing."""

import asyncio
import os
import shlex
import socket
import ssl
from collections.abc import Mapping
from contextlib import suppress
from enum import Enum
from http.client import HTTPException
from typing import NamedTuple
from urllib.parse import urljoin, urlsplit

from vmckpt.drivers.driver import Driver
from vmckpt.errors import RefusedError, UsageError, VmckptError
from vmckpt.hosts.processes.child import TooMuchSaidError, end_of
from vmckpt.hosts.sockets.http import request
from vmckpt.units import whole_number

CHECK_TIMEOUT_S = 10.0
_LAST_PORT = 65535
# Limit of an environment variable of a command: 128 KiB (execve(2)).
_MOST_CHARS = 16_000
_REDIRECTS, _MOST_REDIRECTS = (301, 302, 303, 307, 308), 10


class CheckKind(Enum):
    """The kind of a check."""

    AGENT = "agent"
    TCP = "tcp"
    HTTP = "http"
    COMMAND = "command"


class HealthCheck(NamedTuple):
    """One check; `words` is the URL, the command line, or address and port."""

    kind: CheckKind
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
    return UsageError(f"'{text}' is not a command", why=why, remedy=remedy)


def parse_check(text: str, address: str | None) -> HealthCheck:
    """`agent`, `tcp:PORT`, `tcp:ADDRESS:PORT`, a URL, or a command line. Raises UsageError."""
    if text == "agent":
        return HealthCheck(CheckKind.AGENT, (), text)
    if text.startswith(("http://", "https://")):
        return HealthCheck(CheckKind.HTTP, (text,), text)
    if text.startswith("tcp:"):
        where, _, port = text.removeprefix("tcp:").rpartition(":")
        if not whole_number(port, _LAST_PORT):
            raise _no_check(text, "it must be tcp:PORT or tcp:ADDRESS:PORT")
        found = where.strip("[]") or address
        return HealthCheck(CheckKind.TCP, (found or "", port), text)
    try:
        return HealthCheck(CheckKind.COMMAND, parse_command(text), text)
    except UsageError as exc:
        raise _no_check(text, exc.why) from exc


def _no_check(text: str, why: str) -> UsageError:
    remedy = "give agent, tcp:PORT, http://..., or a command"
    return UsageError(f"'{text}' is not a health check", why=why, remedy=remedy)


async def require_possible(vm: Driver, checks: tuple[HealthCheck, ...], *, in_guest: bool) -> None:
    """Raises RefusedError if a check, or a command in the guest, is not possible with this VM."""
    if (await vm.inspect()).guest_agent:
        return
    commands = [one.text for one in checks if one.kind is CheckKind.AGENT or one.words[:1] == ("",)]
    if in_guest:
        commands.append("--in guest")
    if commands:
        raise RefusedError(
            f"'{vm.name}' cannot do {', '.join(commands)}",
            why="it has no port for a guest agent (guest_agent in its spec; in a domain's XML the "
            "channel org.qemu.guest_agent.0)",
            remedy="use other checks; for a port, give the address: tcp:ADDRESS:PORT or --address",
        )


async def health_problems(vm: Driver, checks: tuple[HealthCheck, ...]) -> list[str]:
    """The VM's present faults, by QEMU and by all checks; empty: it is healthy."""
    seen = await vm.inspect()
    if seen.state != "running":
        return [as_variable(f"it is {seen.state}{f': {seen.ended}' if seen.ended else ''}")]
    found = await asyncio.gather(*(_ask(vm, check) for check in checks))
    return [
        as_variable(f"{check.text}: {reason}")
        for check, reason in zip(checks, found, strict=True)
        if reason
    ]


async def _ask(vm: Driver, check: HealthCheck) -> str:
    try:
        async with asyncio.timeout(CHECK_TIMEOUT_S):
            match check.kind:
                case CheckKind.AGENT:
                    return await _answers(vm)
                case CheckKind.TCP:
                    return await _tcp(vm, *check.words)
                case CheckKind.HTTP:
                    return await _http(check.words[0])
                case CheckKind.COMMAND:
                    return await _command(check.words, variables(vm.name, vm.host.name))
    except TimeoutError:
        return f"no answer within {CHECK_TIMEOUT_S:g} s"
    except (VmckptError, ssl.SSLError, socket.gaierror, ValueError, HTTPException) as exc:
        return str(exc)
    except OSError as exc:
        return os.strerror(exc.errno) if exc.errno else str(exc)


async def _answers(vm: Driver) -> str:
    async with vm.agent() as agent:
        await agent.ping()
    return ""


async def _tcp(vm: Driver, address: str, port: str) -> str:
    if not address:
        async with vm.agent() as agent:
            addresses = await agent.addresses()
        if not addresses:
            return "the guest has no address yet"
        address = addresses[0]
    _, writer = await asyncio.open_connection(address, int(port))
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return ""


async def _http(url: str) -> str:
    """Without a proxy, and following redirects only to the same server: only the guest is
    queried.
    """
    parts = urlsplit(url)
    for _ in range(_MOST_REDIRECTS):
        code, reason, location = await request(url)
        if code // 100 == 2:
            return ""
        to = urlsplit(urljoin(url, location)) if location and code in _REDIRECTS else None
        if to is None or (to.hostname, to.port) != (parts.hostname, parts.port):
            return f"HTTP {code} {reason}"
        url = to.geturl()
    return f"more than {_MOST_REDIRECTS} redirects"


def as_variable(text: str) -> str:
    """Text from a guest or a program, made safe for an environment variable. Pure."""
    return "".join(char if char.isprintable() else " " for char in text[:_MOST_CHARS])


def variables(vm: str, host: str) -> Mapping[str, str]:
    """The environment of commands that are run for a VM."""
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
        _, output = await end_of(child, CHECK_TIMEOUT_S)
    except TooMuchSaidError as exc:
        return str(exc)
    last = output.decode(errors="replace").strip().splitlines()[-1:]
    return "" if child.returncode == 0 else ": ".join([f"exit status {child.returncode}", *last])
