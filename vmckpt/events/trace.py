"""What vmckpt does to QEMUs, libvirtds and hosts, for `-v`: commands by name, with `-vv` arguments.

Off, a call costs a comparison. A job on a host is started with the detail of the command that
watches it (`flags`), and writes its trace to a file that the command reads (`jobs/handle.py`).
"""

import json
import re
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from pathlib import PurePath
from typing import Any

# Values of these names are not shown: QEMU's secret objects, passwords, what a guest's file holds.
_SECRET = re.compile(r"pass(?:word|wd|phrase)|secret|token|^data$|buf-b64", re.IGNORECASE)
# The same within a text: NAME=VALUE, NAME: VALUE, an option and its value, the password of a URL.
_NAME = r"(?:pass(?:word|wd|phrase)|secret|token)[\w-]*"
_SECRET_IN_TEXT = re.compile(
    rf"({_NAME}[\"']?\s*[=:]\s*|--[\w-]*{_NAME}\s+)[^\s,&]+|(://[^/\s:@]*:)[^@/\s]*(?=@)",
    re.IGNORECASE,
)
_HIDDEN = "***"


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
        shown = f" {json.dumps(_without_secrets(arguments), default=str)}"
    _show(f"{to}: {command}{shown}")


def trace_process(host: str, argv: Sequence[str]) -> None:
    """A process that is started on a host."""
    if not _detail:
        return
    if _detail >= Detail.ARGUMENTS:
        shown = shlex.join(_words_without_secrets(argv))
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


def _without_secrets(value: Any) -> Any:
    match value:
        case Mapping():
            return {
                name: _HIDDEN if _SECRET.search(str(name)) else _without_secrets(inner)
                for name, inner in value.items()
            }
        case list() | tuple():
            return [_without_secrets(inner) for inner in value]
        case str():
            return _text_without_secrets(value)
    return value


def _words_without_secrets(argv: Sequence[str]) -> list[str]:
    """Also the word after an option such as --password."""
    found, hides = list[str](), False
    for word in argv:
        found.append(_HIDDEN if hides else _text_without_secrets(word))
        hides = word.startswith("-") and "=" not in word and bool(_SECRET.search(word))
    return found


def _text_without_secrets(text: str) -> str:
    return _SECRET_IN_TEXT.sub(lambda found: f"{found[1] or found[2]}{_HIDDEN}", text)
