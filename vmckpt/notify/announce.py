"""Announce an event: a process of its own delivers the notification.

It is started and left alone, so that what it reports on neither waits for it nor fails with it.
"""

import sys
from contextlib import suppress

from vmckpt.errors import VmckptError
from vmckpt.hosts.processes.process import own_command, spawn
from vmckpt.notify.notification import Notification
from vmckpt.notify.undelivered import notifications_dir
from vmckpt.state.config_files import are_there


def announce(notification: Notification) -> None:
    """Have it delivered, if anything is configured here. Raises nothing: problems go to stderr."""
    if not are_there("notify"):
        return
    text = notification.to_text()
    try:
        notifications_dir().mkdir(mode=0o700, parents=True, exist_ok=True)
        spawn([*own_command(), "deliver", text], notifications_dir() / "log")
    except (OSError, RuntimeError, VmckptError) as exc:  # no thread, no state directory
        with suppress(OSError):
            sys.stderr.write(f"no process delivers the notification: {exc}: {text}\n")
            sys.stderr.flush()
