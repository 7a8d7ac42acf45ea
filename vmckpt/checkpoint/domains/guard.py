"""The guard of a domain's checkpoint: a process that resumes the guest if the checkpoint dies.

A domain's QEMU has one monitor, libvirt's, so the guard uses libvirt too. It waits for a libvirtd
that does not answer as long as the QEMU lives.
"""

import asyncio
import os
import select
import signal
import sys
from contextlib import suppress
from pathlib import Path

from vmckpt.errors import HostDownError, NotFoundError, VmckptError
from vmckpt.hosts.local import LocalHost
from vmckpt.vm.domains.monitor import resume_paused
from vmckpt.vm.inventory import Vm

COMMAND = "domain-guard"
AGAIN_S = 0.5


def guard_words(vm: Vm, uuid: str) -> list[str]:
    """The arguments of the guard's command."""
    mark, pid = str(vm.directory.saving), str(vm.qemu.process.pid)
    return [COMMAND, uuid, str(vm.host.libvirt), mark, pid]


async def watch(uuid: str, libvirt: Path, mark: Path, pid: int) -> None:
    """Wait until standard input ends; then resume the guest if `mark` says that it is paused."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a host that shuts down signals every process
    host = LocalHost("this host", mark.parent, "127.0.0.1", libvirt=libvirt)
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    sys.stdin.buffer.read()
    while mark.exists() and not select.select([pidfd], [], [], 0)[0]:
        try:
            await resume_paused(host, uuid, mark)
            _say("its checkpoint has died or given up; the guest was resumed")
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
