"""The guard of a domain whose guest is paused by vmckpt: a process that acts if that one dies.

On its standard input, a stream socket, it receives the time until which the guest may run, in
seconds of CLOCK_BOOTTIME, or `inf`; or `free` and such a time, by which the sender must have
resumed the guest, else it is stuck. It answers each line with a dot, so that a frozen guard is
noticed. It acts as `epoch/guard.py` does for a QEMU of vmckpt's own:

- The input ends, or the time of `free` is past: a guest that the sender has paused is resumed, if
  it still may run.
- The time is past: the guest is stopped. If libvirt does not do that at once, its QEMU itself is
  held (SIGSTOP) until the guest may run, and killed when the sender is gone.

A domain's QEMU has one monitor, libvirt's, so the guard uses libvirt too. It waits for a libvirtd
that does not answer as long as the QEMU lives and the guest may run.
"""

import asyncio
import math
import os
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from vmckpt.errors import HostDownError, NotFoundError, VmckptError
from vmckpt.hosts.local import LocalHost
from vmckpt.vm.domains.monitor import DomainRelay, relay_to, resume_paused
from vmckpt.vm.inventory import Vm

COMMAND = "domain-guard"
AGAIN_S = 0.5
# The time in which libvirt has to pause its guest, and how often that is repeated; the sender's
# margin is longer.
ANSWER_S, STOP_AGAIN_S = 0.2, 0.05
_READ_BYTES, _MOST_WAIT_S = 4096, 3600.0


def guard_words(vm: Vm, uuid: str, mark: Path) -> list[str]:
    """The arguments of the guard's command. `mark` exists while the sender has paused the guest."""
    return [COMMAND, uuid, str(vm.host.libvirt), str(mark), str(vm.qemu.process.pid)]


async def watch(uuid: str, libvirt: Path, mark: Path, pid: int) -> None:
    """Watch the sender of standard input, until it has ended and all that is due is done."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a host that shuts down signals every process
    host = LocalHost("this host", mark.parent, "127.0.0.1", libvirt=libvirt)
    with suppress(ProcessLookupError):
        guard = _Guard(host, uuid, mark, os.pidfd_open(pid))
        await guard.watch(_Words(sys.stdin.fileno()))


class _Words:
    """What the sender says."""

    def __init__(self, fd: int) -> None:
        self._fd, self._received = fd, b""
        self.until_s = self._free_by_s = math.inf
        self.has_ended = False

    def wait(self, most_s: float, pidfd: int) -> None:
        """Wait for a word, for something that is due, or for QEMU's end."""
        left_s = min(most_s, self._free_by_s - _now_s(), _MOST_WAIT_S)
        watched = [pidfd] if self.has_ended else [pidfd, self._fd]
        select.select(watched, [], [], max(left_s, 0.0))

    def hear(self) -> bool:
        """Take in what was said; whether the sender has just ended, or is stuck."""
        had_ended = self.has_ended
        while not self.has_ended and select.select([self._fd], [], [], 0)[0]:
            try:
                data = os.read(self._fd, _READ_BYTES)
            except ConnectionResetError:  # it died, with answers unread
                data = b""
            self.has_ended = not data
            *lines, self._received = (self._received + data).split(b"\n")
            with suppress(OSError):  # a sender that reads no answers may have ended
                os.write(self._fd, b"." * len(lines))
            for line in lines:
                word, _, time_s = line.decode().partition(" ")
                if time_s:
                    self._free_by_s = float(time_s)
                else:
                    self.until_s = float(word)
        is_stuck = self._free_by_s <= _now_s()
        if is_stuck:
            self._free_by_s = math.inf
        return is_stuck or self.has_ended != had_ended


class _Guard:
    """The guest of one domain, whose QEMU is `pidfd`."""

    def __init__(self, host: LocalHost, uuid: str, mark: Path, pidfd: int) -> None:
        self._host, self._uuid, self._mark, self._pidfd = host, uuid, mark, pidfd
        self._relay: DomainRelay | None = None
        self._is_held = False

    async def watch(self, words: _Words) -> None:
        """See the module."""
        while True:
            is_due = words.hear()
            if self._qemu_ended():
                return
            may_run = _now_s() < words.until_s
            if may_run:
                self._let_go()
            else:  # repeatedly: a process in the middle of an epoch may resume it
                await self._stop()
            if is_due:
                await self._resume(words.until_s)
            if words.has_ended and not may_run:
                self._end_held()
                return
            if words.has_ended and words.until_s == math.inf:
                return
            words.wait(words.until_s - _now_s() if may_run else STOP_AGAIN_S, self._pidfd)

    def _qemu_ended(self) -> bool:
        return bool(select.select([self._pidfd], [], [], 0)[0])

    async def _stop(self) -> None:
        """Make sure that the guest does not run."""
        if self._is_held:
            return
        try:
            async with asyncio.timeout(ANSWER_S):
                if self._relay is None or not self._relay.is_open:
                    relay = relay_to(self._host, self._uuid, self._mark)
                    await relay.open()
                    self._relay = relay
                await self._relay.pause(ANSWER_S)
        except (VmckptError, TimeoutError) as exc:
            if self._qemu_ended():
                return
            self._relay, self._is_held = None, True
            self._signal(signal.SIGSTOP)
            _say(f"QEMU is held: its guest may not run, and libvirt does not pause it ({exc})")

    def _let_go(self) -> None:
        if self._is_held:
            self._is_held = False
            self._signal(signal.SIGCONT)
            _say("QEMU is no longer held: its guest may run")

    def _end_held(self) -> None:
        if self._is_held:
            self._signal(signal.SIGKILL)
            _say("QEMU was killed: its guest could not be paused, and nothing could resume it")

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):  # it has ended
            signal.pidfd_send_signal(self._pidfd, number)

    async def _resume(self, until_s: float) -> None:
        """Resume a guest that the sender has paused, however long libvirtd does not answer."""
        while self._mark.exists() and not self._qemu_ended() and _now_s() < until_s:
            try:
                await resume_paused(self._host, self._uuid, self._mark)
                _say("its keeper has died or given up, or is stuck; the guest was resumed")
            except HostDownError:
                await asyncio.sleep(AGAIN_S)
            except NotFoundError:
                return
            except VmckptError as exc:  # libvirt refuses it: another job has the domain
                _say(f"{exc.what}: {exc.why}")
                await asyncio.sleep(AGAIN_S)


def _now_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _say(text: str) -> None:
    with suppress(OSError):  # the disk is full
        os.write(1, f"{text}\n".encode())
