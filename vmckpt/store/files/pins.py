"""Pins: a pinned checkpoint cannot be removed.

`pins/CHECKPOINT-PIN` is a header (`header.py`, kind I) and one box: JSON, who pinned it and why.
The name alone says which checkpoint is pinned, so an unreadable pin is effective too. Pins are
separate objects: a checkpoint's file never changes.

A pin is written under the checkpoint's shared lock, and a checkpoint is removed under its exclusive
lock: whichever comes second sees what the other did.
"""

import json
import re
import secrets
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from vmckpt.errors import RefusedError
from vmckpt.store.backends.backend import MissingError
from vmckpt.store.errors import DamagedError
from vmckpt.store.files.decoding import decoding, json_of, mapping, number
from vmckpt.store.files.header import HEADER_BYTES, FileKind
from vmckpt.store.files.manifest import LATEST_UNIX_S
from vmckpt.store.opened import Opened
from vmckpt.store.sealing.seal import Box

PINS = "pins"
MOST_TEXT = 500
_NAME = re.compile(r"([0-9a-f]{32})-([0-9a-f]{16})")
_MOST_BYTES = 16 << 10


@dataclass(frozen=True, slots=True)
class Pin:
    """Why a checkpoint is kept, and for whom. `guard`: the run of the guard that needs it."""

    id: str
    checkpoint: str
    reason: str
    by: str
    pinned_unix_s: float
    guard: str | None = None

    @property
    def name(self) -> str:
        """Its object name."""
        return f"{PINS}/{self.checkpoint}-{self.id}"

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return {name: value for name, value in asdict(self).items() if name != "checkpoint"}

    @property
    def in_words(self) -> str:
        """Who pinned it, and why: in one line."""
        return f"{self.reason} (by {self.by})" if self.by else self.reason


Pinned = dict[str, tuple[Pin, ...]]


def new_pin(checkpoint_id: str, reason: str, by: str, guard: str | None = None) -> Pin:
    """A new pin."""
    now_s = round(time.time(), 3)
    text = reason[:MOST_TEXT], by[:MOST_TEXT]
    return Pin(secrets.token_hex(8), checkpoint_id, *text, now_s, guard)


def pins(opened: Opened, only: Iterable[str] | None = None) -> Pinned:
    """The pins by checkpoint: all, or `only` those of these. Raises StorageError."""
    wanted = None if only is None else set(only)
    found: Pinned = {}
    for name in sorted(opened.backend.names(PINS)):
        parts = _NAME.fullmatch(name)
        if parts and (wanted is None or parts[1] in wanted):
            with suppress(MissingError):  # removed meanwhile
                found[parts[1]] = (*found.get(parts[1], ()), _read(opened, parts[1], parts[2]))
    return found


def write_pin(opened: Opened, pin: Pin) -> None:
    """Write it durably; the caller holds the checkpoint. Raises StorageError."""
    header = opened.files.header(FileKind.PIN).new()
    text = json.dumps(asdict(pin), separators=(",", ":")).encode()
    sealed = opened.sealer.file(header, pin.name).seal(Box.PIN, 0, text)
    opened.files.write(pin.name, [header, sealed])


def copied(pin: Pin) -> Pin | None:
    """The pin of a checkpoint's copy: only operators' pins are copied; a guard needs one copy
    only.
    """
    return None if pin.guard else replace(pin, id=secrets.token_hex(8))


def orphans(opened: Opened, checkpoints: Callable[[], Iterable[str]]) -> dict[str, int]:
    """Pins without a checkpoint, with sizes: a writer was killed in between."""
    # In this order: a listed pin had its checkpoint before.
    names = opened.backend.names(PINS)
    there = set(checkpoints()) if names else set()
    return {
        f"{PINS}/{name}": size
        for name, size in names.items()
        if (parts := _NAME.fullmatch(name)) and parts[1] not in there
    }


def damaged_pins(opened: Opened) -> dict[str, str]:
    """The objects that are not valid pins, and why. Raises StorageError."""
    found = {}
    for name in opened.backend.names(PINS):
        parts = _NAME.fullmatch(name)
        if parts is None:
            found[f"{PINS}/{name}"] = "nothing of a store is called so"
            continue
        try:
            _open(opened, parts[1], parts[2])
        except MissingError:
            continue
        except DamagedError as exc:
            found[f"{PINS}/{name}"] = exc.why
    return found


def require_unpinned(opened: Opened, checkpoint_ids: Iterable[str]) -> None:
    """Raises RefusedError if one of them is pinned. The caller holds them."""
    for checkpoint_id, found in pins(opened, checkpoint_ids).items():
        raise pinned_error(checkpoint_id, found)


def pinned_error(checkpoint: str, found: Iterable[Pin]) -> RefusedError:
    """The error for a checkpoint (its name or id) that these pins keep from being removed."""
    remedies = {
        f"end it: vmckpt guard list (its run is {pin.guard})"
        if pin.guard
        else f"vmckpt checkpoint unpin {pin.checkpoint[:12]}"
        for pin in found
    }
    return RefusedError(
        f"checkpoint {checkpoint} is pinned: nothing was removed",
        why="; ".join(pin.in_words for pin in found),
        remedy="; ".join(sorted(remedies)),
    )


def _read(opened: Opened, checkpoint_id: str, pin_id: str) -> Pin:
    try:
        return _open(opened, checkpoint_id, pin_id)
    except DamagedError:
        return Pin(pin_id, checkpoint_id, "its pin is damaged and cannot be read", "", 0.0)


def _open(opened: Opened, checkpoint_id: str, pin_id: str) -> Pin:
    name = f"{PINS}/{checkpoint_id}-{pin_id}"
    data = opened.backend.read(name, 0, _MOST_BYTES)
    header = opened.files.header(FileKind.PIN).read(data, name)
    plain = opened.sealer.file(header, name).open(Box.PIN, 0, data[HEADER_BYTES:])
    with decoding(name):
        words = mapping(json_of(plain))
        reason, by, guard = words["reason"], words["by"], words["guard"]
        if not isinstance(reason, str) or not isinstance(by, str):
            raise TypeError("reason and by are texts")
        if not isinstance(guard, str | None):
            raise TypeError("guard is a text")
        text = reason[:MOST_TEXT], by[:MOST_TEXT]
        when_s = number(words["pinned_unix_s"], LATEST_UNIX_S)
        return Pin(pin_id, checkpoint_id, *text, float(when_s), guard and guard[:MOST_TEXT])
