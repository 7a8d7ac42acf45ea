"""What vmckpt does to QEMUs, libvirtds and hosts, for `-v`: commands by name, with `-vv` arguments.

Off, a call costs a comparison. A job on a host is started with the detail of the command that
watches it (`flags`), and writes its trace to a file that the command reads (`jobs/handle.py`).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from pathlib import PurePath
from typing import Any


class Detail(IntEnum):
    """How much is shown."""

    NOTHING = 0
    NAMES = 1
    ARGUMENTS = 2


def _unheard(_: str) -> None:
    pass


_detail = Detail.NOTHING
_tell: Callable[[str], None] = _unheard
_last = ""


def trace(detail: Detail, tell: Callable[[str], None]) -> None:
    """From here on pass each line, with its time, to `tell`, which must not raise."""
    global _detail, _tell, _last
    _detail, _tell, _last = detail, tell, ""


def untrace() -> None:
    """Pass on nothing more."""
    trace(Detail.NOTHING, _unheard)


def flags() -> list[str]:
    """The options that have a job of this command trace the same; empty: nothing is traced."""
    return ["-" + "v" * _detail] if _detail else []


def trace_command(to: str, command: str, arguments: Mapping[str, Any] | None = None) -> None:
    """A command to a QEMU or a libvirtd; `to` names it ("web on h1")."""
    if not _detail:
        return
    shown = ""
    if arguments and _detail >= Detail.ARGUMENTS:
        from vmckpt.events.secrets import arguments_shown

        shown = f" {arguments_shown(arguments)}"
    _show(f"{to}: {command}{shown}")


def trace_process(host: str, argv: Sequence[str]) -> None:
    """A process that is started on a host."""
    if not _detail:
        return
    if _detail >= Detail.ARGUMENTS:
        from vmckpt.events.secrets import command_shown

        shown = command_shown(argv)
    else:
        shown = PurePath(argv[0]).name
    _show(f"{host}: run {shown}")


def relay(line: str) -> None:
    """Pass on a line of a job's trace, which has its time already."""
    _tell(line)


def _show(line: str) -> None:
    """By name only, what repeats the line before is left out."""
    global _last  # noqa: PLW0603 - one for the process
    if line != _last or _detail >= Detail.ARGUMENTS:
        _last = line
        now_s = time.time()
        clock = time.strftime("%H:%M:%S", time.localtime(now_s))
        _tell(f"{clock}.{int(now_s % 1 * 1000):03d} {line}")
