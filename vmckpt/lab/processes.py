"""How a lab's processes are started, which processes are a lab's, and how they end.

A process is a lab's if its environment says VMCKPT_LAB=<lab directory>, or if its network namespace
holds an interface named with the lab's tag. Both follow from the directory's name alone, so they
hold when nothing was recorded, and unlike pids and inode numbers of namespaces they are never
reused for something else, before or after a reboot.
"""

import asyncio
import contextlib
import hashlib
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from vmckpt.errors import OperationFailedError, RefusedError
from vmckpt.hosts.processes.process import ProcessId, identify, is_alive

_MARK = "VMCKPT_LAB"
_GRACE_S = 1.0
_END_TIMEOUT_S = 10.0
_COMMAND_TIMEOUT_S = 10.0


def known(pid: int) -> ProcessId:
    """The lab's process `pid`. Raises OperationFailedError if it has ended."""
    process = identify(pid)
    if process is None:
        raise OperationFailedError(
            "the lab could not be made",
            why=f"its process {pid} ended (was it killed?)",
            remedy="try again",
        )
    return process


def tag(directory: Path) -> str:
    """The name of the interface that marks the network namespaces of the lab in `directory`."""
    return "lab" + hashlib.blake2b(bytes(directory), digest_size=6).hexdigest()


def tool(name: str) -> str:
    """The path of a system program. Raises RefusedError if it is not installed."""
    # A user's PATH on Debian lacks the sbin directories, where ip, tc and nsenter's kin may be.
    found = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin:/usr/bin:/bin")
    if found is None:
        raise RefusedError(
            "the lab cannot be made here",
            why=f"the program '{name}' is not installed",
            remedy="install iproute2 and util-linux",
        )
    return found


def python(module: str, *arguments: str) -> list[str]:
    """The argument vector that runs a module of this package; its imports are stdlib and vmckpt."""
    # Without site the start is a third faster; -P keeps the caller's directory out of sys.path.
    return [sys.executable, "-S", "-P", "-m", module, *arguments]


def environment(directory: Path) -> dict[str, str]:
    """The environment of the lab's own processes: the mark, and what they need to start."""
    return {
        _MARK: str(directory),
        "PATH": os.environ.get("PATH", os.defpath),
        "LC_ALL": "C.UTF-8",
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    }


def spawn(argv: Sequence[str], directory: Path, log: Path) -> int:
    """Start a process that outlives this one, its output in `log`; return its pid.

    It is this process's child until this process ends; `reap` it if it is ended earlier. Raises
    OSError. posix_spawn leaves closing descriptors to exec: the lab's lock, which is among them, is
    thus held until the new process carries the mark by which `down` finds it.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    return os.posix_spawn(
        argv[0],
        list(argv),
        environment(directory),
        setsid=True,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), flags, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
    )


def reap(pids: Iterable[int]) -> None:
    """Reap ended children, so that they do not remain as zombies while this process lives."""
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


async def run(argv: Sequence[str], directory: Path, *, stdin: str = "") -> str:
    """Run a short command of the lab to its end; return its output.

    Raises OperationFailedError with the command's output if it fails or takes over 10 s.
    """
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment(directory),
    )
    try:
        async with asyncio.timeout(_COMMAND_TIMEOUT_S):
            out, err = await process.communicate(stdin.encode())
        why = err.decode(errors="replace").strip() or f"it ended with {process.returncode}"
    except TimeoutError:
        why = f"no end after {_COMMAND_TIMEOUT_S:.0f} s"
    finally:
        if process.returncode is None:
            process.kill()
            # Not wait(): this also sees the pipes closed.
            await process.communicate(b"")
    if process.returncode != 0:
        raise OperationFailedError(
            f"'{' '.join(argv)}' failed", why=why, remedy="fix the cause, and try again"
        )
    return out.decode(errors="replace")


def find(directory: Path) -> list[ProcessId]:
    """The processes of the lab in `directory` that this user can see; never this one."""
    mark = f"{_MARK}={directory}".encode()
    interface = tag(directory).encode() + b":"
    tagged: dict[int, bool] = {}
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        process = identify(int(entry.name))
        with contextlib.suppress(OSError):
            if process and (_is_marked(entry, mark) or _is_tagged(entry, interface, tagged)):
                found.append(process)
    return found


def _is_marked(entry: Path, mark: bytes) -> bool:
    return mark in (entry / "environ").read_bytes().split(b"\0")


def _is_tagged(entry: Path, interface: bytes, known: dict[int, bool]) -> bool:
    """Whether the process's network namespace has the interface; `known` avoids repeated reads."""
    inode = (entry / "ns/net").stat().st_ino
    if inode not in known:
        known[inode] = interface in (entry / "net/dev").read_bytes().split()
    return known[inode]


def end_all(directory: Path) -> list[ProcessId]:
    """End every process of the lab in `directory`; return those that were ended.

    SIGTERM, then SIGKILL after 1 s. Repeats until nothing was found twice in a row, because a
    process may have been about to enter. Raises OperationFailedError if some are left after 10 s.
    """
    ended: dict[ProcessId, None] = {}
    deadline_s = time.monotonic() + _END_TIMEOUT_S
    quiet_rounds = 0
    while quiet_rounds < 2:
        found = find(directory)
        if found and time.monotonic() > deadline_s:
            raise OperationFailedError(
                "the lab could not be taken down",
                why="these processes do not exit: " + " ".join(str(one.pid) for one in found),
                remedy="see what they wait for (ps -o pid,stat,wchan), then run 'vmckpt lab down'",
            )
        if found:
            quiet_rounds = 0
            ended |= dict.fromkeys(found)
            _end(found, deadline_s)
        else:
            quiet_rounds += 1
            time.sleep(0.01)
    return list(ended)


def _end(processes: Iterable[ProcessId], deadline_s: float) -> None:
    with contextlib.ExitStack() as stack:
        poller = select.poll()
        open_fds: set[int] = set()
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                fd = os.pidfd_open(process.pid)
                stack.callback(os.close, fd)
                # From here on the descriptor refers to one process; is it still the one that was
                # found?
                if is_alive(process):
                    poller.register(fd, select.POLLIN)
                    open_fds.add(fd)
        for signal_number, wait_until_s in (
            (signal.SIGTERM, min(time.monotonic() + _GRACE_S, deadline_s)),
            (signal.SIGKILL, deadline_s),
        ):
            for fd in open_fds:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(fd, signal_number)
            while open_fds and (left_s := wait_until_s - time.monotonic()) > 0:
                for fd, _ in poller.poll(left_s * 1000):
                    poller.unregister(fd)
                    open_fds.discard(fd)
