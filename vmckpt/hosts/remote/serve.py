"""The far side: answers the calls of `Host` about this machine, over one connection."""

import asyncio
import os
from contextlib import AsyncExitStack, suppress
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any, TypedDict

from vmckpt import __version__
from vmckpt.codec import convert
from vmckpt.errors import HostDownError
from vmckpt.hosts.host import Host
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.lock import Owner
from vmckpt.hosts.ownership import require_own
from vmckpt.hosts.remote.frames import (
    MAGIC,
    MOST_BYTES,
    PROTOCOL,
    Frame,
    RpcFrameKind,
    broken,
    read_frame,
    with_json,
)
from vmckpt.hosts.remote.link import FrameLink
from vmckpt.hosts.remote.values import pack, pack_error, unbind, unpack
from vmckpt.units import format_size

HELLO_TIMEOUT_S = 20.0
QUESTIONS = {
    name: question
    for name, question in vars(Host).items()
    if iscoroutinefunction(question) and name != "connect"
}


class _ClientHello(TypedDict):
    """The other side's first message: its name for this host, and the state directory here."""

    name: str
    state_dir: Path


async def serve(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, state_dir: Path
) -> None:
    """Answer until the other side has gone; then release what it held here.

    The other side may name another state directory, which this process's children inherit.
    """
    hello = {
        "protocol": PROTOCOL,
        "version": __version__,
        "state_dir": str(state_dir),
        "address": _own_address(),
    }
    writer.write(MAGIC + with_json(RpcFrameKind.HELLO, 0, hello).encode())
    try:
        async with asyncio.timeout(HELLO_TIMEOUT_S):
            theirs = convert(_ClientHello, (await read_frame(reader)).json)
        host = LocalHost(theirs["name"], theirs["state_dir"], "127.0.0.1")
    except (EOFError, OSError, TimeoutError, ValueError):
        return  # it has gone, or speaks another protocol, as it knows from our hello
    os.environ["VMCKPT_STATE_DIR"] = str(theirs["state_dir"])
    await _Server(host, reader, writer).run()


def _fitting(answer: Frame) -> Frame:
    """Raises HostDownError if the caller would reject the answer."""
    if (size := len(answer.payload)) <= MOST_BYTES:
        return answer
    raise HostDownError(
        "an answer is too long for one message",
        why=f"it has {format_size(size)}, a message {format_size(MOST_BYTES)}",
        remedy="report this, unless it is a guest that floods its callers",
    )


def _own_address() -> str | None:
    """The local address of the SSH connection over which the caller came (ssh(1))."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    return words[2] if len(words) == 4 else None


class _Server:
    def __init__(
        self, host: LocalHost, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._host = host
        self._link = FrameLink(reader, writer, "the asker", self._handle)
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._locks: dict[Path, AsyncExitStack] = {}
        self._is_own = False

    async def run(self) -> None:
        """Run until the connection ends; then running commands are ended and locks freed."""
        try:
            await self._link.run()
        finally:
            for task in self._tasks.values():
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks.values())
            for lock in self._locks.values():
                await lock.aclose()

    def _handle(self, frame: Frame) -> None:
        if frame.kind is RpcFrameKind.REQUEST:
            task = asyncio.create_task(self._answer(frame))
            self._tasks[frame.number] = task
            task.add_done_callback(lambda _: self._tasks.pop(frame.number, None))
        elif frame.kind is RpcFrameKind.CANCEL and (running := self._tasks.get(frame.number)):
            # After it has begun: otherwise it would end without the answer that the caller expects.
            asyncio.get_running_loop().call_soon(running.cancel)

    async def _answer(self, frame: Frame) -> None:
        try:
            reply = _fitting(with_json(RpcFrameKind.ANSWER, frame.number, await self._do(frame)))
        except asyncio.CancelledError:
            # The caller that cancelled it waits for this, and learns only that it has ended.
            reply = with_json(RpcFrameKind.ANSWER, frame.number, None)
        except Exception as exc:  # noqa: BLE001 - any error is sent to the client
            reply = with_json(RpcFrameKind.ERROR, frame.number, pack_error(exc, self._host.name))
        with suppress(OSError):  # when the connection is gone, `run` ends too
            await self._link.send(reply)

    async def _do(self, frame: Frame) -> Any:
        if not self._is_own:  # the caller named it
            require_own(self._host.state_dir)
            self._is_own = True
        request = frame.json
        name, given = request["do"], request["with"]
        if name == "lock":
            await self._lock(Path(given["path"]), unpack(Owner, given["owner"]))
        elif name == "unlock":
            if lock := self._locks.pop(Path(given["path"]), None):
                await lock.aclose()
        elif name == "connect":
            sock = await self._host.connect(Path(given["path"]), of_anyone=given["of_anyone"])
            self._link.open_stream(sock, frame.number).start()
        elif question := QUESTIONS.get(name):
            answer = await getattr(self._host, name)(**unbind(question, given))
            return pack(answer)
        else:
            raise broken(f"'{name}' is not a question")
        return None

    async def _lock(self, path: Path, owner: Owner) -> None:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._host.lock(path, owner))
            self._locks[path] = stack.pop_all()
