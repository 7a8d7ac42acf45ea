"""The guard of a domain: it resumes a guest whose checkpoint or replication is dead, or stuck, and
stops one whose lease has ended.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from vmckpt.errors import HostDownError
from vmckpt.hosts.host import Host
from vmckpt.vm.domains import guard

pytestmark = pytest.mark.contract
UUID = "7961af85-4cf2-49f8-a727-3c1736dbe50b"


class Watched:
    """A guard at work, with what libvirt is replaced by; `say` is what the checkpoint does."""

    def __init__(self, directory: Path, pid: int) -> None:
        self.mark, self.pid = directory / "saving", pid
        self.ear, self.say_fd = os.pipe()
        self.resumed = list[float]()
        self.silent = 0  # how often libvirtd does not answer first
        self.paused = 0  # how often the guest was paused
        self.pauses = True  # whether libvirt does that
        self.is_open = True

    def say(self, line: str) -> None:
        os.write(self.say_fd, f"{line}\n".encode())

    async def resume(self, _host: Host, uuid: str, mark: Path) -> None:
        assert (uuid, mark) == (UUID, self.mark)
        if self.silent:
            self.silent -= 1
            raise HostDownError("no", why="no", remedy="-")
        self.resumed.append(time.monotonic())
        mark.unlink()

    async def open(self) -> None:
        """Of libvirt's session."""

    async def pause(self, _timeout_s: float) -> None:
        if not self.pauses:
            raise HostDownError("no", why="no", remedy="-")
        self.mark.touch()
        self.paused += 1

    def state(self) -> str:
        """Of its QEMU's process, as in proc(5)."""
        return Path(f"/proc/{self.pid}/stat").read_text().split()[2]

    def may_run_for(self, seconds: float) -> None:
        self.say(str(time.clock_gettime(time.CLOCK_BOOTTIME) + seconds))

    def run(self) -> None:
        asyncio.run(guard.watch(UUID, Path("/run/libvirt/sock"), self.mark, self.pid))


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    with subprocess.Popen(["sleep", "60"]) as qemu:
        made = Watched(tmp_path, qemu.pid)
        monkeypatch.setattr(guard, "resume_paused", made.resume)
        monkeypatch.setattr(guard, "relay_to", lambda *_: made)
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


async def beside(watched: Watched, check: Callable[[], Awaitable[None]]) -> None:
    """Run the guard beside the check, until its sender ends."""
    work = asyncio.ensure_future(asyncio.to_thread(watched.run))
    await check()
    os.close(watched.say_fd)
    await work


async def until(reached: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not reached():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def test_a_guest_whose_lease_has_ended_is_stopped_until_it_is_renewed(watched: Watched) -> None:
    async def check() -> None:
        watched.may_run_for(0.1)
        await until(lambda: watched.paused > 1)  # again and again: an epoch may resume it
        watched.may_run_for(60)
        await asyncio.sleep(0.2)
        paused = watched.paused
        await asyncio.sleep(0.2)
        assert watched.paused == paused
        watched.say("inf")
        await asyncio.sleep(0.1)

    asyncio.run(beside(watched, check))
    assert len(watched.resumed) == 1  # its sender had paused it, or so it seems, and has ended


def test_a_qemu_that_libvirt_does_not_pause_is_held_and_let_go(watched: Watched) -> None:
    watched.pauses = False

    async def check() -> None:
        watched.may_run_for(0.1)
        await until(lambda: watched.state() == "T")
        watched.may_run_for(60)
        await until(lambda: watched.state() != "T")
        watched.say("inf")
        await asyncio.sleep(0.1)

    asyncio.run(beside(watched, check))
    assert watched.state() not in "TZ"


def test_one_that_is_held_does_not_outlive_its_sender(watched: Watched) -> None:
    watched.pauses = False

    async def check() -> None:
        watched.may_run_for(0.1)
        await until(lambda: watched.state() == "T")

    asyncio.run(beside(watched, check))
    asyncio.run(until(lambda: watched.state() == "Z"))


def test_a_guest_that_was_resumed_after_its_senders_death_is_stopped_with_the_lease(
    watched: Watched,
) -> None:
    watched.mark.touch()
    watched.may_run_for(0.5)
    os.close(watched.say_fd)
    watched.run()
    assert len(watched.resumed) == 1
    assert watched.paused
