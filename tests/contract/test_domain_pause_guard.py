"""The guard of a domain's checkpoint: it resumes a guest whose checkpoint is dead, or stuck."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from vmckpt.checkpoint.domains import guard
from vmckpt.errors import HostDownError
from vmckpt.hosts.host import Host

pytestmark = pytest.mark.contract
UUID = "7961af85-4cf2-49f8-a727-3c1736dbe50b"


class Watched:
    """A guard at work, with what libvirt is replaced by; `say` is what the checkpoint does."""

    def __init__(self, directory: Path, pid: int) -> None:
        self.mark, self.pid = directory / "saving", pid
        self.ear, self.say_fd = os.pipe()
        self.resumed = list[float]()
        self.silent = 0  # how often libvirtd does not answer first

    def say(self, line: str) -> None:
        os.write(self.say_fd, f"{line}\n".encode())

    async def resume(self, _host: Host, uuid: str, mark: Path) -> None:
        assert (uuid, mark) == (UUID, self.mark)
        if self.silent:
            self.silent -= 1
            raise HostDownError("no", why="no", remedy="-")
        self.resumed.append(time.monotonic())
        mark.unlink()

    def run(self) -> None:
        asyncio.run(guard.watch(UUID, Path("/run/libvirt/sock"), self.mark, self.pid))


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    with subprocess.Popen(["sleep", "60"]) as qemu:
        made = Watched(tmp_path, qemu.pid)
        monkeypatch.setattr(guard, "resume_paused", made.resume)
        monkeypatch.setattr(guard, "AGAIN_S", 0.01)
        monkeypatch.setattr(signal, "signal", lambda *_: None)
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(fileno=lambda: made.ear))
        yield made
        qemu.kill()
    os.close(made.ear)


def test_a_guest_whose_checkpoint_has_died_runs(watched: Watched) -> None:
    watched.mark.touch()
    watched.silent = 2
    os.close(watched.say_fd)
    watched.run()
    assert len(watched.resumed) == 1


def test_one_that_is_not_paused_is_left_alone(watched: Watched) -> None:
    os.close(watched.say_fd)
    watched.run()
    assert watched.resumed == []


def test_a_guest_whose_checkpoint_is_stuck_runs_in_time(watched: Watched) -> None:
    """It stays paused until others are: that may not last."""
    watched.mark.touch()
    began_s = time.monotonic()
    watched.say(f"free {time.clock_gettime(time.CLOCK_BOOTTIME) + 0.2}")

    async def run() -> None:
        work = asyncio.ensure_future(asyncio.to_thread(watched.run))
        while not watched.resumed:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert not work.done()  # it still watches
        watched.mark.touch()  # the next pause, in time
        watched.say(f"free {time.clock_gettime(time.CLOCK_BOOTTIME) + 60}")
        watched.say("free inf")
        await asyncio.sleep(0.1)
        assert len(watched.resumed) == 1
        os.close(watched.say_fd)
        await work

    asyncio.run(run())
    assert watched.resumed[0] - began_s >= 0.2
    assert len(watched.resumed) == 2


def test_a_qemu_that_has_ended_needs_nothing(watched: Watched) -> None:
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    watched.pid = ended.pid
    watched.mark.touch()
    os.close(watched.say_fd)
    watched.run()
    assert watched.resumed == []
