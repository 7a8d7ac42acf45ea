"""A QEMU that hangs before its monitor is there is started once more, and no more than once."""

import asyncio
import sys
from pathlib import Path

import pytest

from tests.qemu.world import qemu
from vmckpt.errors import HostDownError
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.process import find_by_argument
from vmckpt.qemu import commands
from vmckpt.vm import start
from vmckpt.vm.argv import Platform
from vmckpt.vm.paths import vm_dir
from vmckpt.vm.spec import parse_spec

SPEC = 'name = "slow"\nmemory = "32M"\n'


def hangs(directory: Path, times: int) -> Path:
    """A QEMU whose first `times` processes never get as far as a monitor."""
    wrapper = directory / "qemu-system-x86_64"
    count = directory / "starts"
    count.write_text("")
    wrapper.write_text(
        f'#!/bin/sh\necho >>{count}\n[ "$(wc -l <{count})" -gt {times} ] || '
        f'exec {sys.executable} -I -S -c "import time; time.sleep(3600)" "$@"\n'
        f'exec {qemu("10.0")} "$@"\n'
    )
    wrapper.chmod(0o755)
    return wrapper


async def started(directory: Path, times: int) -> bool:
    """Whether the VM's QEMU came to wait for `cont`; nothing of it is left."""
    host = LocalHost("here", directory / "state", "127.0.0.1", qemu=str(hangs(directory, times)))
    spec = parse_spec(SPEC, "test", directory)
    files = vm_dir(host.state_dir, "slow").qemu(start.new_qemu_id())
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
    with pytest.raises(HostDownError, match="opens no monitor"):
        asyncio.run(started(short_path, times=9))
    assert (short_path / "starts").read_text() == "\n\n"
    assert find_by_argument(str(short_path)) == []
