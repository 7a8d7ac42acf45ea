"""A QEMU that hangs or dies before it answers is started once more, and no more than once."""

import asyncio
import sys
from pathlib import Path

import pytest

from tests.qemu.world import qemu
from vmckpt.errors import HostDownError, OperationFailedError
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes.process import find_by_argument
from vmckpt.qemu import commands
from vmckpt.vm import start
from vmckpt.vm.paths import new_qemu_id, vm_dir
from vmckpt.vm.probe import abilities
from vmckpt.vm.record import Platform
from vmckpt.vm.spec.spec import parse_spec

SPEC = 'name = "slow"\nmemory = "32M"\n'


HANGS = f'exec {sys.executable} -I -S -c "import time; time.sleep(3600)" "$@"'
DIES = "kill -SEGV $$"
# It greets, takes one command, and hangs up at the next, as it is asked what it can do.
HANGS_UP = """
import socket, sys
server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[-1].split(",")[0].removeprefix("unix:"))
server.listen()
client = server.accept()[0]
client.sendall(b'{"QMP": {"version": {"qemu": {"major": 10, "minor": 0, "micro": 0}, '
               b'"package": ""}, "capabilities": []}}\\n')
client.recv(4096)
client.sendall(b'{"return": {}}\\n')
client.recv(4096)
"""


def fails(directory: Path, times: int, how: str = HANGS) -> Path:
    """A QEMU whose first `times` processes do `how` instead."""
    wrapper = directory / "qemu-system-x86_64"
    count = directory / "starts"
    count.write_text("")
    wrapper.write_text(
        f'#!/bin/sh\necho >>{count}\n[ "$(wc -l <{count})" -gt {times} ] || {how}\n'
        f'exec {qemu("10.0")} "$@"\n'
    )
    wrapper.chmod(0o755)
    return wrapper


async def started(directory: Path, times: int, how: str = HANGS) -> bool:
    """Whether the VM's QEMU came to wait for `cont`; nothing of it is left."""
    wrapper = fails(directory, times, how)
    host = LocalHost("here", directory / "state", "127.0.0.1", qemu=str(wrapper))
    spec = parse_spec(SPEC, "test", directory)
    files = vm_dir(host.state_dir, "slow").qemu(new_qemu_id())
    platform = Platform("pc-q35-10.0", "tcg", "qemu64")
    _, monitor = await start.start_qemu(host, spec, platform, files, incoming=False)
    try:
        return not (await commands.query_status(monitor)).running
    finally:
        await monitor.close()
        await start.end_qemu(host, spec.ram_dir, files)


def test_one_that_hangs_once_is_started_again(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Longer than a QEMU takes on a busy machine.
    monkeypatch.setattr(start, "START_TIMEOUT_S", 8.0)
    assert asyncio.run(started(short_path, times=1))
    assert (short_path / "starts").read_text() == "\n\n"


def test_one_that_hangs_again_is_given_up_and_gone(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "START_TIMEOUT_S", 0.5)
    with pytest.raises(HostDownError, match="does not open its monitor"):
        asyncio.run(started(short_path, times=9))
    assert (short_path / "starts").read_text() == "\n\n"
    assert find_by_argument(str(short_path)) == []


def test_one_that_dies_without_a_word_is_started_again(short_path: Path) -> None:
    assert asyncio.run(started(short_path, 1, DIES))
    assert (short_path / "starts").read_text() == "\n\n"


def test_one_that_dies_again_is_told(short_path: Path) -> None:
    with pytest.raises(OperationFailedError, match="ended twice without a message"):
        asyncio.run(started(short_path, 9, DIES))
    assert (short_path / "starts").read_text() == "\n\n"


def test_one_that_says_why_it_ends_is_not_started_again(short_path: Path) -> None:
    with pytest.raises(OperationFailedError, match="no such machine"):
        asyncio.run(started(short_path, 9, "{ echo no such machine >&2; exit 1; }"))
    assert (short_path / "starts").read_text() == "\n"


@pytest.mark.parametrize("times", [1, 9])
def test_one_that_hangs_up_on_a_question_is_followed_by_another(
    short_path: Path, times: int
) -> None:
    program = short_path / "hangs-up.py"
    program.write_text(HANGS_UP)
    wrapper = fails(short_path, times, f'exec {sys.executable} -I -S {program} "$@"')
    host = LocalHost("here", short_path / "state", "127.0.0.1", qemu=str(wrapper))
    if times == 1:
        assert "pc-q35-10.0" in asyncio.run(abilities(host)).machines
    else:
        with pytest.raises(HostDownError, match="did not answer"):
            asyncio.run(abilities(host))
    assert (short_path / "starts").read_text() == "\n\n"
    left = [path.suffix for path in (host.state_dir / "cache").iterdir()]
    assert left == [".json"] * (times == 1)
