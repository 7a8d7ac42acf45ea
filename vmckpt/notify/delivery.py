"""Deliver a notification: to a command, and to a web server. Bounded in time and attempts."""

import asyncio
import os
import shlex
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from typing import Self
from urllib.parse import urlsplit

from vmckpt.errors import UsageError
from vmckpt.hosts.processes.child import TooMuchSaidError, end_of, end_session
from vmckpt.hosts.sockets.http import request
from vmckpt.notify.notification import Notification, Occasion
from vmckpt.units import counted

# Of one attempt; and the pauses between attempts.
TIMEOUT_S = 10.0
WAITS_S = (2.0, 10.0, 60.0)
# "Later" and "too many": the only refusals by a server that another attempt can change.
_TRY_AGAIN = (408, 425, 429)
_MOST_CHARS = 300


class _RefusedError(Exception):
    """The receiver does not accept it, however often it is sent."""


class _FailedError(Exception):
    """This attempt failed."""


@dataclass(frozen=True, slots=True)
class Receivers:
    """Where notifications go: a command line, a URL; and which events (none: all)."""

    command: tuple[str, ...] = ()
    webhook: str = ""
    events: frozenset[Occasion] = frozenset()

    @classmethod
    def parse(cls, command: str | None, webhook: str | None, events: Sequence[str]) -> Self:
        """Read options. Raises UsageError."""
        return cls(_words(command), _checked(webhook), frozenset(map(_occasion, events)))

    def wants(self, event: str) -> bool:
        """Whether any receiver is to have such an event."""
        if not (self.command or self.webhook):
            return False
        return not self.events or event in (Occasion.TEST, *self.events)


async def deliver(
    notification: Notification, to: Receivers, *, waits_s: Sequence[float] = WAITS_S
) -> dict[str, str]:
    """Deliver to every receiver, each with its own attempts; returns why not, by channel."""
    text = notification.to_text()
    sends: dict[str, Callable[[], Awaitable[None]]] = {}
    if to.command:
        sends["command"] = lambda: _run(to.command, notification, text)
    if to.webhook:
        sends["webhook"] = lambda: _post(to.webhook, text)
    reasons = await asyncio.gather(*(_send_with_retries(send, waits_s) for send in sends.values()))
    return {name: why for name, why in zip(sends, reasons, strict=True) if why}


async def _send_with_retries(send: Callable[[], Awaitable[None]], waits_s: Sequence[float]) -> str:
    why = ""
    for wait_s in (0.0, *waits_s):
        await asyncio.sleep(wait_s)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await send()
            return ""
        except _RefusedError as exc:
            return str(exc)[:_MOST_CHARS]
        except TimeoutError:
            why = f"no end within {TIMEOUT_S:g} s"
        except _FailedError as exc:
            why = str(exc)[:_MOST_CHARS]
    return f"{why} ({counted(1 + len(waits_s), 'attempt')})"


async def _run(words: Sequence[str], notification: Notification, text: str) -> None:
    pipe = asyncio.subprocess.PIPE
    try:
        child = await asyncio.create_subprocess_exec(
            *words, stdin=pipe, stdout=asyncio.subprocess.DEVNULL, stderr=pipe,
            env=os.environ | _environment(notification), start_new_session=True,
        )  # fmt: skip
    except OSError as exc:
        raise _FailedError(f"{words[0]} does not start: {exc.strerror or exc}") from exc
    try:
        if child.stdin is not None:
            child.stdin.write(f"{text}\n".encode())
            child.stdin.close()
        _, output = await end_of(child, TIMEOUT_S)
    except TooMuchSaidError as exc:
        raise _FailedError(str(exc)) from exc
    finally:
        end_session(child)  # with all that it started
    if child.returncode != 0:
        last = output.decode(errors="replace").strip().splitlines()[-1:]
        raise _FailedError(": ".join([f"exit status {child.returncode}", *last]))


def _environment(notification: Notification) -> Mapping[str, str]:
    return {
        "VMCKPT_EVENT": notification.event,
        "VMCKPT_VM": notification.vm,
        "VMCKPT_HOST": notification.host,
    }


async def _post(url: str, text: str) -> None:
    try:
        code, reason, _ = await request(url, text.encode())
    except ssl.SSLError as exc:
        raise _FailedError(f"no TLS connection: {exc.reason or exc}") from exc
    except OSError as exc:
        why = os.strerror(exc.errno) if exc.errno and exc.errno > 0 else exc.strerror or str(exc)
        raise _FailedError(f"no answer from the server: {why}") from exc
    except (ValueError, HTTPException) as exc:
        raise _FailedError(str(exc)) from exc
    if code // 100 == 2:
        return
    if code // 100 in (3, 4) and code not in _TRY_AGAIN:
        raise _RefusedError(f"HTTP {code} {reason}")
    raise _FailedError(f"HTTP {code} {reason}")


def _words(command: str | None) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(command or ""))
    except ValueError as exc:
        raise UsageError(
            f"'{command}' is not a command", why=str(exc), remedy="quote it as for a shell"
        ) from exc


def _checked(url: str | None) -> str:
    if not url:
        return ""
    try:
        parts = urlsplit(url)
        is_sound = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        why = "" if is_sound else "it takes http:// or https:// and a host"
    except ValueError as exc:
        why = str(exc)
    else:
        if parts.username is not None:
            why = "a user and a password in it are not sent"
    if why:
        raise UsageError(
            "notifications cannot be sent to this webhook",
            why=why,
            remedy="write e.g. https://alerts.example/vmckpt?token=...",
        )
    return url


def _occasion(name: str) -> Occasion:
    try:
        return Occasion(name)
    except ValueError as exc:
        raise UsageError(
            f"there is no event '{name}' to notify of",
            why=f"the events are: {', '.join(Occasion)}",
            remedy="see docs/operations.md",
        ) from exc
