"""Notifications that were not delivered: STATE/notifications/TIME.PID.json, the newest 100.

The record is written before the first attempt and removed after the delivery, so a delivery whose
process was killed stays on record.
"""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vmckpt.hosts.inventory.directories import state_dir
from vmckpt.notify.notification import Notification
from vmckpt.state.documents import Documents, Listing, Schema

KEPT = 100
_CUT_OFF = {"delivery": "its process has not finished: it is at work, or was killed"}


@dataclass(frozen=True, slots=True)
class Undelivered:
    """A notification, and the reason by channel."""

    notification: Notification
    why: Mapping[str, str]


_SCHEMA = Schema(Undelivered, "remove it: it is the record of a notification, and no more")


def notifications_dir() -> Path:
    """The directory of this machine's notifications."""
    return state_dir() / "notifications"


def begin(notification: Notification) -> str:
    """Record that it is to be delivered; returns the record's name. Raises StorageError."""
    name = f"{time.time_ns()}.{os.getpid()}"
    _records().save(name, Undelivered(notification, _CUT_OFF))
    for old in _records().names()[:-KEPT]:
        _records().remove(old)
    return name


def settle(name: str, notification: Notification, failures: Mapping[str, str]) -> None:
    """Record how its delivery ended: without failures the record goes. Raises StorageError."""
    if failures:
        _records().save(name, Undelivered(notification, failures))
    else:
        _records().remove(name)


def load_all() -> Listing[Undelivered]:
    """Those not delivered, oldest first, and damaged records."""
    return _records().load_all()


def _records() -> Documents[Undelivered]:
    return Documents(notifications_dir(), _SCHEMA)
