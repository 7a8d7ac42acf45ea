"""A QMP server that follows a script, and a monitor that talks to it."""

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from vmckpt.qemu.monitor import Monitor, session

GREETING = {
    "QMP": {
        "version": {"qemu": {"micro": 2, "minor": 0, "major": 10}, "package": ""},
        "capabilities": ["oob"],
    }
}


def reply_to(command: dict[str, Any], reply: dict[str, object]) -> dict[str, object]:
    # A reply has an id when the command has.
    return reply | ({"id": command["id"]} if "id" in command else {})


class Server:
    """The other end of a QMP connection."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._buffer = sock, ""
        self._sock.setblocking(False)

    async def send(self, *messages: object) -> None:
        data = b"".join(json.dumps(message).encode() + b"\r\n" for message in messages)
        await self.send_bytes(data)

    async def send_bytes(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._sock, data)

    async def command(self) -> dict[str, Any]:
        """The next command; EOFError when the client has gone."""
        # QMP has no separator between commands, and needs none.
        while True:
            try:
                command, end = json.JSONDecoder().raw_decode(self._buffer.lstrip())
            except ValueError:
                self._buffer += (await self._receive()).decode()
            else:
                self._buffer = self._buffer.lstrip()[end:]
                return dict(command)

    async def _receive(self) -> bytes:
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(self._sock, readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self._sock)
        data = self._sock.recv(1 << 16)
        if not data:
            raise EOFError
        return data

    async def greet(self) -> None:
        await self.send(GREETING)
        negotiation = await self.command()
        assert negotiation["execute"] == "qmp_capabilities"
        await self.answer(negotiation, {})

    async def answer(self, command: dict[str, Any], value: object) -> None:
        await self.send(reply_to(command, {"return": value}))

    async def refuse(self, command: dict[str, Any], description: str) -> None:
        error = {"class": "GenericError", "desc": description}
        await self.send(reply_to(command, {"error": error}))

    def hang_up(self) -> None:
        self._sock.close()


Script = Callable[[Server], Awaitable[None]]
Client = Callable[[Monitor], Awaitable[None]]


def play(script: Script, client: Client, *, greets: bool = True) -> None:
    """Run a server's script and a client against each other; both have to end well."""

    async def both() -> None:
        ours, theirs = socket.socketpair()
        server = Server(theirs)

        async def serve() -> None:
            if greets:
                await server.greet()
            await script(server)

        async def act() -> None:
            async with session(ours, "web on a", timeout_s=5.0) as monitor:
                await client(monitor)

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(serve())
                group.create_task(act())
        except ExceptionGroup as exc:
            raise exc.exceptions[0] from None
        finally:
            server.hang_up()

    asyncio.run(asyncio.wait_for(both(), 20))


async def nothing(_: Server) -> None:
    pass


def answering(**replies: object) -> Script:
    """A server that gives each command its reply, again and again, until the client goes."""

    async def script(server: Server) -> None:
        try:
            while True:
                command = await server.command()
                await server.answer(command, replies[command["execute"].replace("-", "_")])
        except EOFError:
            return

    return script
