"""An end whose connection was lost gets another, and nothing of the first one is left over."""

import asyncio
import gc
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.scripted_qmp import Server
from vmckpt.hosts.local import LocalHost
from vmckpt.migrate.outcome.ends import End
from vmckpt.vm.paths import VmDir

pytestmark = pytest.mark.contract


def host_of(servers: list[Server], directory: Path) -> LocalHost:
    """A host whose sockets lead to servers that greet, which come into the list."""
    greetings: list[asyncio.Task[None]] = []

    class Ringing(LocalHost):
        async def connect(self, path: Path, *, of_anyone: bool = True) -> socket.socket:
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            servers.append(Server(theirs))
            greetings.append(asyncio.create_task(servers[-1].greet()))
            return ours

    return Ringing("a", directory, "127.0.0.1")


@pytest.mark.parametrize("which", ["monitor", "rescue"])
def test_a_lost_connection_is_ended_before_there_is_another(tmp_path: Path, which: str) -> None:
    complaints: list[dict[str, Any]] = []
    servers: list[Server] = []

    async def lose_it() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, told: complaints.append(told))
        end = End(host_of(servers, tmp_path), VmDir(tmp_path).qemu("0123abcd"))
        ask = getattr(end, which)
        first = await ask()
        servers[0].hang_up()
        while first.is_open:  # noqa: ASYNC110 - no one tells of it
            await asyncio.sleep(0.001)
        second = await ask()
        assert second is not first
        assert second.is_open
        await end.close()
        servers[1].hang_up()

    asyncio.run(lose_it())
    assert len(servers) == 2
    gc.collect()
    assert complaints == []
