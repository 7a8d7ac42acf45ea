"""Processes of a VM's own user: none outlives its QEMU, however it disguises itself.

A guest that has broken out of its QEMU can overwrite the QEMU's command line, or start more
processes if the sandbox is off. It cannot become another user.
"""

import asyncio
import re
import stat
from pathlib import Path

from vmckpt.errors import OperationFailedError
from vmckpt.hosts.host import Host
from vmckpt.hosts.processes.process import ProcessId
from vmckpt.vm.paths import QemuDir
from vmckpt.vm.users.users import VmUser, user_of

END_S = 5.0
_POLL_S = 0.01
# Two files of root's with their modes, by stat(1).
_ROOTS = re.compile(r"0 ([0-9a-f]{1,8})\n0 ([0-9a-f]{1,8})\n")


async def end_all_of(host: Host, files: QemuDir) -> None:
    """Kill all processes of the user of a QEMU that must be gone.

    Raises OperationFailedError if some do not end.
    """
    user = await user_of(host, files)
    if user is None:
        return
    deadline_s = asyncio.get_running_loop().time() + END_S
    while left := await all_of_user(host, files):
        if asyncio.get_running_loop().time() > deadline_s:
            raise OperationFailedError(
                f"processes of the user of '{files.vm_name}' on {host.name} do not end",
                why=f"{len(left)} of uid {user.uid} survived SIGKILL, the first is pid "
                f"{left[0].pid}",
                remedy="they are stuck in the kernel: check its storage",
            )
        if len(left) == len(await host.find_processes_of(user.uid)):
            # All in one system call, so that none can start another meanwhile.
            await host.run(user.command(["kill", "-KILL", "--", "-1"]))
        for process in left:
            await host.stop_for_good(process)
        await asyncio.sleep(_POLL_S)


async def all_of_user(host: Host, files: QemuDir) -> list[ProcessId]:
    """The processes of a QEMU's user, except other QEMUs of the same VM; [] if it has no own user.

    Those exist during a migration between hosts on one machine, or a restore.
    """
    user = await user_of(host, files)
    if user is None:
        return []
    return [
        process
        for process in await host.find_processes_of(user.uid)
        if not await _is_anothers(host, files, user, process)
    ]


async def _is_anothers(host: Host, files: QemuDir, user: VmUser, process: ProcessId) -> bool:
    """Whether root's record of another QEMU with the same user names this process.

    It ends with that QEMU at the latest.
    """
    output = await host.read_text(Path(f"/proc/{process.pid}/cmdline")) or ""
    before, _, rest = output.partition("-pidfile\0")
    pid_file = Path(rest.partition("\0")[0])
    if before == output or not pid_file.is_absolute():
        return False
    directory = await host.resolve(pid_file.parent)
    other = files._replace(path=directory)
    if directory == await host.resolve(files.path) or not await _is_roots(host, other):
        return False
    theirs = await user_of(host, other)
    return theirs is not None and theirs.uid == user.uid


async def _is_roots(host: Host, files: QemuDir) -> bool:
    """Whether root alone can have put `user.json` there: every user may put one into /tmp."""
    done = await host.run(["stat", "-c", "%u %f", "--", str(files.path), str(files.user)])
    if (found := _ROOTS.fullmatch(done.stdout)) is None:
        return False
    directory, record = (int(mode, 16) for mode in found.groups())
    is_closed = not directory & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_ISDIR(directory) and is_closed and stat.S_ISREG(record)
