"""The process that runs a guard's command, and ends all of it when it is told to.

Children of children count as its own (PR_SET_CHILD_SUBREAPER), daemons that the command makes too:
when the guard is over before its command is, nothing of that goes on beside the rollback.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from vmckpt.hosts.process import identify
from vmckpt.hosts.process import kill as kill_process

_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.01
KILL_S = 20.0
# What a terminal sends to all that runs in it is the command's: what it makes of that is its
# result. Who sees to its end outlives it.
_OF_TERMINALS = (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)


class _ToldToEndError(BaseException):
    """SIGTERM has come."""


def work(result: Path, command: Sequence[str]) -> None:
    """Run the command, and write into the new file `result` how it ended.

    {"returncode": N}, or {"error": WHY} when it could not be started or was ended by SIGTERM.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    ignored = {
        number: signal.signal(number, signal.SIG_IGN) == signal.SIG_IGN for number in _OF_TERMINALS
    }
    signal.signal(signal.SIGTERM, _end)
    told: dict[str, Any]
    try:
        child = subprocess.Popen(command, preexec_fn=partial(_as_before, ignored))  # noqa: PLW1509 - no threads
        told = {"returncode": child.wait()}
    except OSError as exc:
        told = {"error": f"{command[0]}: {exc.strerror}"}
    except _ToldToEndError:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _kill_all()
        told = {"error": "it was ended"}
    part = result.with_name(f".{result.name}.part")
    part.write_text(json.dumps(told))
    part.rename(result)


def _as_before(ignored: Mapping[signal.Signals, bool]) -> None:
    """What was ignored already, as by nohup, stays so for the command."""
    for number, is_ignored in ignored.items():
        signal.signal(number, signal.SIG_IGN if is_ignored else signal.SIG_DFL)


def _end(_number: int, _frame: object) -> None:
    raise _ToldToEndError


def _kill_all() -> None:
    """SIGKILL every descendant, and see each one's end, until there is none."""
    given_up_s = time.monotonic() + KILL_S
    with suppress(ChildProcessError):
        while time.monotonic() < given_up_s:
            for pid in _descendants(os.getpid()):
                if process := identify(pid):
                    kill_process(process, wait_s=0)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            time.sleep(_POLL_S)


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with suppress(OSError):
            for child in map(int, (task / "children").read_text().split()):
                if identify(child):
                    found += [child, *_descendants(child)]
    return found


if __name__ == "__main__":
    work(Path(sys.argv[1]), sys.argv[2:])
