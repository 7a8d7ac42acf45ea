"""Run a guard's command, and end all of it on request.

Two processes, parent and child, watch each other: the *runner* waits for the command, the *keeper*
for the runner. All descendants count as their own (PR_SET_CHILD_SUBREAPER), including daemons, and
are in a control group if one can be created. If either process is killed, the other ends the
command with all that it started; if both are, the group remains (`ending`). Processes that the
command leaves running stay, and the keeper with them, until the guard is over. The room for all
records is reserved before the command begins, which may fill the disk.

    worker   the workers' ids; written before the command is begun, by them or to forbid it
    result   {"returncode": N} of the command, or {"error": WHY}
    over     {"left": [PID, ...]}: no process of the command runs except these, which do not end
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NamedTuple, NoReturn

from vmckpt.errors import StorageError
from vmckpt.fleet.guard import cgroup
from vmckpt.hosts.processes.kernel import BOOT_ID
from vmckpt.hosts.processes.process import ProcessId, identify
from vmckpt.hosts.processes.process import kill as kill_process
from vmckpt.state.durable import fill, reserve

WORKER, RESULT, OVER = "worker", "result", "over"
# In the environment of the command: the directory of its guard.
MARK = "VMCKPT_GUARDED"
KILL_S = 20.0
_KEEPER, _RUNNER, _ROOM_BYTES = "keeper", "runner", 4096
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_POLL_S = 0.01
# A terminal's signals are for the command, which decides the result; the processes that end it must
# outlive it.
_OF_TERMINALS = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)
_OURS = (signal.SIGTERM, signal.SIGUSR1)
_Handler = signal.Handlers | Callable[[int, FrameType | None], NoReturn]
_libc = ctypes.CDLL(None, use_errno=True)


class _AskedToEndError(BaseException):
    """SIGTERM was received."""


class _ReleasedError(BaseException):
    """SIGUSR1 was received: release what the command left running."""


@dataclass(frozen=True, slots=True)
class Workers:
    """`worker`: keeper and runner, in which boot, and the command's control group, if any."""

    boot: str
    processes: tuple[ProcessId, ...] = ()
    group: Path | None = None


@dataclass(frozen=True, slots=True)
class CommandResult:
    """`result`: the command's exit status, or why there is none."""

    returncode: int | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Over:
    """`over`: no process of the command runs except these, which do not end."""

    left: tuple[int, ...] = ()


class _Given(NamedTuple):
    directory: Path
    command: Sequence[str]
    group: Path | None
    ignored: Mapping[signal.Signals, bool]
    role: str = _KEEPER


def work(result: Path, command: Sequence[str]) -> None:
    """Run the command; the outcome is in files beside `result`.

    Returns when no process of the command is left, or once it is released (SIGUSR1).
    """
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    ignored = {
        number: signal.signal(number, signal.SIG_IGN) == signal.SIG_IGN for number in _OF_TERMINALS
    }
    directory = result.parent
    try:
        for name in (RESULT, OVER):
            for role in (_KEEPER, _RUNNER):
                reserve(_by(role, directory / name), _ROOM_BYTES)
    except StorageError as exc:
        sys.exit(f"the command was not begun: {exc.what}: {exc.why}")
    group = cgroup.make(f"vmckpt-guard-{directory.name}-{os.getpid()}")
    given = _Given(directory, command, group, ignored)
    go_read, go_write = os.pipe()
    results_read, results_write = os.pipe()
    keeper = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, _OURS)
    _hear(_end, _release)
    runner = os.fork()
    if runner == 0:
        os.close(go_write)
        os.close(results_read)
        _run_and_exit(given._replace(role=_RUNNER), keeper, go_read, results_write)
    with suppress(_ReleasedError):
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _OURS)
            os.close(results_write)
            if claim(directory, _who(runner, group)):
                os.write(go_write, b"\n")
            os.close(go_write)
            _keep(given, results_read)
        except _AskedToEndError:
            _end_all(given, "it was ended")
    if group is not None:
        cgroup.dissolve(group)


def claim(directory: Path, workers: Workers) -> bool:
    """Record the workers, unless a record exists; returns whether it was written now."""
    if (directory / WORKER).exists():  # even on a full disk
        return False
    part = directory / f".{WORKER}.{os.getpid()}"
    try:
        part.write_text(_encode(workers))
        os.link(part, directory / WORKER)
    except (FileExistsError, FileNotFoundError):
        return False
    finally:
        part.unlink(missing_ok=True)
    return True


def _who(runner: int, group: Path | None) -> Workers:
    processes = [identify(pid) for pid in (os.getpid(), runner)]
    return Workers(BOOT_ID.read_text().strip(), tuple(filter(None, processes)), group)


# -- the runner ---------------------------------------------------------------------------------


def _run_and_exit(given: _Given, keeper: int, go: int, results: int) -> NoReturn:
    code = 1
    try:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _OURS)
        if os.getppid() == keeper and os.read(go, 1):
            os.write(results, _encode(_run(given)).encode())
        code = 0
    except _AskedToEndError:
        _end_all(given, "its keeper was killed, so it was ended")
    finally:
        os._exit(code)


def _run(given: _Given) -> CommandResult:
    try:
        child = subprocess.Popen(
            given.command,
            preexec_fn=partial(_become_the_command, given, os.getpid()),  # noqa: PLW1509 - no threads
            env=os.environ | {MARK: str(given.directory)},
        )
        return CommandResult(child.wait())
    except OSError as exc:
        return CommandResult(error=f"{given.command[0]}: {exc.strerror}")
    except subprocess.SubprocessError as exc:
        return CommandResult(error=f"{given.command[0]}: {exc}")


def _become_the_command(given: _Given, runner: int) -> None:
    """Signals that were ignored already, as by nohup, stay ignored for the command."""
    if given.group is not None:
        cgroup.enter(given.group)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != runner:
        os._exit(1)
    _hear(signal.SIG_DFL, signal.SIG_DFL)
    for number, is_ignored in given.ignored.items():
        signal.signal(number, signal.SIG_IGN if is_ignored else signal.SIG_DFL)


# -- the keeper ---------------------------------------------------------------------------------


def _keep(given: _Given, results: int) -> None:
    """Wait until the command is over, then until what it leaves running is."""
    output = b""
    while more := os.read(results, 4096):
        output += more
    if not output:
        if (given.directory / OVER).exists():
            return  # by its runner, on request
        _end_all(given, "its worker was killed, so it was ended")
        return
    _write(given, RESULT, output.decode())
    _release_output()
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
    _write(given, OVER, _encode(Over()))


def _release_output() -> None:
    """Close the output: its reader must not wait for the keeper."""
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)


def _end_all(given: _Given, why: str) -> None:
    """SIGKILL all of the command, wait for its end, and record what did not end."""
    _hear(signal.SIG_IGN, signal.SIG_IGN)
    left = set(_kill_descendants())
    if given.group is not None:
        with suppress(OSError):
            left |= set(cgroup.kill_all(given.group, KILL_S if not left else 0))
    try:
        if not (given.directory / RESULT).exists():
            _write(given, RESULT, _encode(CommandResult(error=why)))
        _write(given, OVER, _encode(Over(tuple(sorted(left)))))
    except (StorageError, FileNotFoundError):
        if given.directory.exists():  # else the sender only needs to see us end
            raise


def _kill_descendants() -> list[int]:
    """Returns those that did not end."""
    given_up_s = time.monotonic() + KILL_S
    with suppress(ChildProcessError):
        while True:
            found = _descendants(os.getpid())
            for process in filter(None, map(identify, found)):
                with suppress(PermissionError):  # another user's: it is reported
                    kill_process(process, wait_s=0)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            if time.monotonic() > given_up_s:
                return found
            time.sleep(_POLL_S)
    return []


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(OSError):
            for child in map(int, (task / "children").read_text().split()):
                if identify(child):
                    found += [child, *_descendants(child)]
    return found


def _encode(record: Workers | CommandResult | Over) -> str:
    # As `codec.builtins`; import nothing now, as the command may have replaced files.
    known = {name: value for name, value in asdict(record).items() if value is not None}
    return json.dumps(known, default=str)


def _write(given: _Given, name: str, text: str) -> None:
    """Write a record into its reserved room. Raises StorageError, FileNotFoundError."""
    path = given.directory / name
    fill(_by(given.role, path), text)
    _by(given.role, path).rename(path)


def _by(role: str, path: Path) -> Path:
    """A record before it is in its place: both processes may write it."""
    return path.with_name(f".{path.name}.{role}")


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option})")


def _end(_number: int, _frame: FrameType | None) -> NoReturn:
    _hear(signal.SIG_IGN, signal.SIG_IGN)
    raise _AskedToEndError


def _release(_number: int, _frame: FrameType | None) -> NoReturn:
    _hear(signal.SIG_IGN, signal.SIG_IGN)
    raise _ReleasedError


def _hear(on_term: _Handler, on_usr1: _Handler) -> None:
    signal.signal(signal.SIGTERM, on_term)
    signal.signal(signal.SIGUSR1, on_usr1)


if __name__ == "__main__":
    work(Path(sys.argv[1]), sys.argv[2:])
