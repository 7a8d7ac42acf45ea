"""The guard of a domain's checkpoint: a process that resumes the guest if the checkpoint dies.

On its standard input, a stream socket, it receives `free` and a time, in seconds of CLOCK_BOOTTIME
or `inf`, by which the checkpoint must have resumed the guest; else it is stuck.

A domain's QEMU has one monitor, libvirt's, so the guard uses libvirt too. It waits for a libvirtd
that does not answer as long as the QEMU lives.
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
from vmckpt.vm.domains.monitor import resume_paused
from vmckpt.vm.inventory import Vm

COMMAND = "domain-guard"
AGAIN_S = 0.5
_READ_BYTES, _MOST_WAIT_S = 4096, 3600.0


def guard_words(vm: Vm, uuid: str) -> list[str]:
    """The arguments of the guard's command."""
    mark, pid = str(vm.directory.saving), str(vm.qemu.process.pid)
    return [COMMAND, uuid, str(vm.host.libvirt), mark, pid]


async def watch(uuid: str, libvirt: Path, mark: Path, pid: int) -> None:
    """Resume the guest if standard input ends, or the time of `free` is past, and `mark` says that
    it is paused.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a host that shuts down signals every process
    host = LocalHost("this host", mark.parent, "127.0.0.1", libvirt=libvirt)
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    words = _Words(sys.stdin.fileno())
    while not words.has_ended:
        if words.wait():
            await _resume(host, uuid, mark, pidfd)
    await _resume(host, uuid, mark, pidfd)


class _Words:
    """What the checkpoint says."""

    def __init__(self, fd: int) -> None:
        self._fd, self._received = fd, b""
        self._free_by_s, self.has_ended = math.inf, False

    def wait(self) -> bool:
        """Wait for a word; true: the guest must run by now, and does not wait for one."""
        left_s = self._free_by_s - time.clock_gettime(time.CLOCK_BOOTTIME)
        if left_s <= 0:
            self._free_by_s = math.inf
            return True
        if select.select([self._fd], [], [], min(left_s, _MOST_WAIT_S))[0]:
            data = os.read(self._fd, _READ_BYTES)
            self.has_ended = not data
            *lines, self._received = (self._received + data).split(b"\n")
            for line in lines:
                word, _, time_s = line.decode().partition(" ")
                if word == "free":
                    self._free_by_s = float(time_s)
        return False


async def _resume(host: LocalHost, uuid: str, mark: Path, pidfd: int) -> None:
    """Resume the guest, however long libvirtd does not answer."""
    while mark.exists() and not select.select([pidfd], [], [], 0)[0]:
        try:
            await resume_paused(host, uuid, mark)
            _say("its checkpoint has died or given up, or is stuck; the guest was resumed")
        except HostDownError:
            await asyncio.sleep(AGAIN_S)
        except NotFoundError:
            return
        except VmckptError as exc:  # libvirt refuses it: another job has the domain
            _say(f"{exc.what}: {exc.why}")
            await asyncio.sleep(AGAIN_S)


def _say(text: str) -> None:
    with suppress(OSError):  # the disk is full
        os.write(1, f"{text}\n".encode())
