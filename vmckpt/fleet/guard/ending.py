"""End a guard's command on its machine, even if its workers are gone.

    python -m vmckpt.fleet.guard.ending end|release DIRECTORY

`release` ends nothing of a finished command: what it left running stays. Prints one object,
{"left": [PID, ...], "sure": BOOL}: the processes that do not end, and whether there are certainly
no others.
"""

import json
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vmckpt.codec import builtins, convert
from vmckpt.fleet.guard import cgroup
from vmckpt.fleet.guard.worker import (
    KILL_S,
    MARK,
    OVER,
    RESULT,
    WORKER,
    Over,
    Workers,
    claim,
)
from vmckpt.foreign import parse
from vmckpt.hosts.ownership import trusted_users
from vmckpt.hosts.processes.kernel import BOOT_ID
from vmckpt.hosts.processes.process import (
    ProcessId,
    file_of,
    find_by_argument,
    identify,
    interrupt,
    is_alive,
)
from vmckpt.hosts.processes.process import kill as kill_process

MODULE = "vmckpt.fleet.guard.worker"
# A worker gives the command's processes KILL_S to end, and its group the same again.
NEVER = "never begun"
END_S = 2 * KILL_S + 10
_POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Left:
    """The processes that do not end; `sure`: there are no others of the command."""

    left: tuple[int, ...]
    sure: bool


def end(directory: Path) -> Left:
    """End the command, and all that it has started."""
    if not directory.exists():
        return Left((), sure=True)
    claim(directory, Workers(NEVER))
    try:
        workers = _read(directory)
    except (OSError, ValueError):
        return Left(_end_marked(directory), sure=False)
    if workers.boot == NEVER:
        # Not begun, and now it cannot be; unless by an earlier vmckpt, which made no such file.
        return Left(_ended(find_by_argument(_mark(directory), trusted_users())), sure=True)
    if workers.boot != BOOT_ID.read_text().strip():
        return Left((), sure=True)
    if (over := _over(directory)) is None:
        _wait_for_workers(directory, workers)
        over = _over(directory)
    return _certain(directory, workers, over)


def release(directory: Path) -> Left:
    """Release processes that the command left running. A command that is not over is ended."""
    if not (directory / RESULT).exists():
        return end(directory)
    with suppress(OSError, ValueError):
        workers = _read(directory)
        for process in workers.processes:
            kill_process(process, signal.SIGUSR1)
        if workers.group is not None:
            cgroup.dissolve(workers.group)
    return Left((), sure=True)


def _certain(directory: Path, workers: Workers, over: tuple[int, ...] | None) -> Left:
    left, sure = set(over or ()), over is not None
    if not sure:  # root's processes may have left the group, for example by systemd-run --scope
        left |= set(_end_marked(directory))
    if workers.group is not None and workers.group.exists():
        left |= set(cgroup.kill_all(workers.group, KILL_S))
        cgroup.dissolve(workers.group)
        sure = True
    return Left(tuple(sorted(pid for pid in left if identify(pid))), sure)


def _wait_for_workers(directory: Path, workers: Workers) -> None:
    """Tell the workers to end, and wait until they have ended or no longer can."""
    given_up_s = time.monotonic() + END_S
    is_signalled = False
    while (alive := [one for one in workers.processes if is_alive(one)]) and _over(
        directory
    ) is None:
        if not is_signalled:
            # The first is the keeper; its runner learns of its end by itself.
            interrupt(alive[0])
            is_signalled = True
        if time.monotonic() > given_up_s:
            return
        time.sleep(_POLL_S)


def _end_marked(directory: Path) -> tuple[int, ...]:
    """End processes with the command's environment; returns those that do not end."""
    wanted = f"\0{MARK}={directory}\0".encode()
    found = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        with suppress(OSError):
            if pid != os.getpid() and wanted in b"\0" + file_of(pid, "environ"):
                found.append(identify(pid))
    for process in filter(None, found):
        with suppress(PermissionError):
            kill_process(process)
    return tuple(one.pid for one in found if one is not None and is_alive(one))


def _ended(found: list[ProcessId]) -> tuple[int, ...]:
    for process in found:
        interrupt(process)
    given_up_s = time.monotonic() + END_S
    while any(map(is_alive, found)) and time.monotonic() < given_up_s:
        time.sleep(_POLL_S)
    return tuple(one.pid for one in found if is_alive(one))


def _mark(directory: Path) -> str:
    return "\0".join([MODULE, str(directory / RESULT), ""])


def _read(directory: Path) -> Workers:
    return convert(Workers, parse((directory / WORKER).read_bytes()))


def _over(directory: Path) -> tuple[int, ...] | None:
    with suppress(OSError, ValueError):
        return convert(Over, parse((directory / OVER).read_bytes())).left
    return None


if __name__ == "__main__":
    ending = {"end": end, "release": release}[sys.argv[1]](Path(sys.argv[2]))
    sys.stdout.write(json.dumps(builtins(ending)) + "\n")
