"""Ask before something is lost, where a person can be asked.

A person is at a terminal: stdin is one, and the command was not given `--json`. Then the command
names what will be lost and waits for a yes. Programs are not asked: without a terminal, or with
`--json`, the command acts at once, as virsh, zfs and restic do, so that jobs of cron and scripts
work as they are written. `--yes` acts at once everywhere.
"""

import os
import select
import signal
import sys
from contextlib import suppress
from typing import Annotated, TextIO

import typer

from vmckpt.cli.loop import warn_in_lines
from vmckpt.errors import CancelledByUserError, UsageError

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]


def confirm(loss: str, *, yes: bool, as_json: bool) -> None:
    """Return when `loss`, which says what will be lost, is accepted; nothing was done yet.

    Raises CancelledByUserError: the answer was no, or the terminal gave none. UsageError: a person
    is at the terminal, but cannot see the question.
    """
    if yes or as_json or not sys.stdin or not sys.stdin.isatty():
        return
    if not sys.stderr.isatty():
        raise UsageError(
            "this command asks for confirmation, and the question would not be seen",
            why="stdin is a terminal, and stderr is not",
            remedy="add --yes, or leave stderr on the terminal",
        )
    warn_in_lines(loss)
    print("Proceed? [y/N] ", end="", file=sys.stderr, flush=True)
    answer = ""
    with suppress(OSError):  # the terminal is closed
        answer = line_of(sys.stdin)
    if answer.strip().lower() not in ("y", "yes"):
        raise CancelledByUserError(
            "not confirmed: nothing was changed",
            why="the answer was not yes",
            remedy="answer y, or add --yes",
        )


def line_of(stdin: TextIO) -> str:
    """Wait for the next line without missing a signal.

    A signal just before a blocking read is handled only after it, so Ctrl-C had no effect.
    """
    wakes, woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    before = signal.set_wakeup_fd(woken)
    try:
        select.select([stdin.fileno(), wakes], [], [])
    finally:
        signal.set_wakeup_fd(before)
        os.close(wakes)
        os.close(woken)
    return stdin.readline()
