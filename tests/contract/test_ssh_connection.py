"""What one connection over SSH takes: one channel, no delay, and nothing that it does not need."""

import asyncio
import getpass
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.sshd import Sshd, sshd
from vmckpt.errors import HostDownError
from vmckpt.hosts.inventory.inventory import reach
from vmckpt.hosts.ssh.address import Address
from vmckpt.hosts.ssh.entry import SshEntry
from vmckpt.hosts.ssh.login import log_in

pytestmark = pytest.mark.contract
STREAMS = 5


@contextmanager
def behind_a_jump_host(directory: Path, jump: str, host: str) -> Iterator[SshEntry]:
    """A host, and a jump host before it, each with one line of its own in sshd_config."""
    with sshd(directory / "gate", jump) as gate, sshd(directory / "inner", host) as inner:
        known, config = directory / "known", directory / "config"
        known.write_text(gate.host_line + inner.host_line)
        config.write_text(
            f"Host gate\n  Port {gate.port}\n  IdentityFile {gate.key}\n"
            f"Host inner\n  Port {inner.port}\n  IdentityFile {inner.key}\n"
            f"  ProxyJump {getpass.getuser()}@gate\n"
            f"Host *\n  HostName 127.0.0.1\n  IdentitiesOnly yes\n  UserKnownHostsFile {known}\n"
        )
        entry = inner.entry("a", directory / "state")
        yield replace(entry, address=Address("inner", None, None, config))


async def use(entry: SshEntry, directory: Path) -> list[bytes]:
    """Questions, and streams beside one another to a socket there that says everything again."""

    ended: list[asyncio.Event] = []

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ended.append(over := asyncio.Event())
        while data := await reader.read(1000):
            writer.write(data)
        writer.close()
        await writer.wait_closed()
        over.set()

    async def answer(number: int) -> bytes:
        reader, writer = await asyncio.open_connection(sock=await host.connect(path))
        writer.write(b"%d" % number)
        said = await reader.read(1000)
        writer.close()
        await writer.wait_closed()
        return said

    path = directory / "socket"
    host = reach(entry)
    async with await asyncio.start_unix_server(echo, path):
        try:
            assert await host.exists(path)
            return await asyncio.gather(*(answer(number) for number in range(STREAMS)))
        finally:
            await host.close()
            for over in ended:
                await over.wait()


def test_one_channel_is_enough_on_the_host_and_on_its_jump_host(tmp_path: Path) -> None:
    with behind_a_jump_host(tmp_path, "MaxSessions 1", "MaxSessions 1") as entry:
        assert asyncio.run(use(entry, tmp_path)) == [b"%d" % number for number in range(STREAMS)]


def test_a_jump_host_that_runs_no_commands_will_do(tmp_path: Path) -> None:
    with behind_a_jump_host(tmp_path, "MaxSessions 0", "MaxSessions 1") as entry:
        assert len(asyncio.run(use(entry, tmp_path))) == STREAMS


def test_a_host_that_allows_no_channel_is_told_what_to_mend(tmp_path: Path) -> None:
    with (
        behind_a_jump_host(tmp_path, "MaxSessions 1", "MaxSessions 0") as entry,
        pytest.raises(HostDownError, match="a refuses to run a command") as caught,
    ):
        asyncio.run(use(entry, tmp_path))
    assert "MaxSessions" in caught.value.remedy


def test_a_connection_whose_jump_host_went_first_ends_quietly(tmp_path: Path) -> None:
    with behind_a_jump_host(tmp_path, "MaxSessions 1", "MaxSessions 1") as entry:
        login = log_in("a", entry.address)
        assert login.jump is not None
        # Nothing can be said to it any longer, and paramiko does not know yet.
        login.jump.client.get_transport().sock.shutdown(socket.SHUT_WR)
        login.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with sshd(tmp_path_factory.mktemp("sshd")) as made:
        yield made


def test_short_messages_do_not_wait_for_receipts(server: Sshd, tmp_path: Path) -> None:
    login = log_in("a", server.entry("a", tmp_path).address)
    try:
        sock = login.client.get_transport().sock
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    finally:
        login.close()


# In a process of its own: what runs commands for paramiko leaves their pipes to the collector.
MATCH_EXEC = """
import sys
from pathlib import Path
from vmckpt.hosts.ssh.address import Address
from vmckpt.hosts.ssh.settings import read_settings
from vmckpt.hosts.ssh import wire
print("invoke.runners" in sys.modules)
for name in "ab":
    print(read_settings(Address(name, None, None, Path(sys.argv[1]))).user)
"""


def test_match_exec_holds_though_what_runs_it_is_loaded_only_then(tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text('Match exec "test %h = a"\n  User ops\n')
    argv = [sys.executable, "-c", MATCH_EXEC, str(config)]
    said = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
    assert said.split() == ["False", "ops", getpass.getuser()]
