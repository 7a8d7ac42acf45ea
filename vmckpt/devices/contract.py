"""Input and output of a hook in the guest. Pure.

    HOOK PHASE < {"format": 1, "device": ID, "run": RUN, "limit_s": N}

It answers with one JSON object as the last line of its output, {"ok": true} or {"ok": false, "why":
..., "remedy": ...}, and exits with 0 only for the former. Every phase may be repeated, and then
does what is left to do: after a timeout, or if the agent died, its progress is unknown.
docs/devices.md says what each phase guarantees.
"""

import json
from enum import StrEnum
from typing import Any, NamedTuple, NotRequired, TypedDict

from vmckpt.codec import convert, require_within
from vmckpt.foreign import MalformedError, parse

FORMAT = 1
BY_HAND = "run it in the guest by hand"


class HookPhase(StrEnum):
    """In the order of a complete operation; abort replaces the rest of it."""

    PREFLIGHT = "preflight"
    QUIESCE = "quiesce"
    LOCK = "lock"
    CHECKPOINT = "checkpoint"
    RELEASE = "release"
    REATTACH = "reattach"
    RESTORE = "restore"
    RESUME = "resume"
    ABORT = "abort"


# Each with the phase that undoes it, while the device is plugged in.
PHASES_OUT = {
    HookPhase.QUIESCE: HookPhase.ABORT,
    HookPhase.LOCK: HookPhase.RESUME,
    HookPhase.CHECKPOINT: HookPhase.RESTORE,
    HookPhase.RELEASE: HookPhase.REATTACH,
}
PHASES_BACK = (HookPhase.REATTACH, HookPhase.RESTORE, HookPhase.RESUME)
# Moving a card's content takes time in proportion to its size: 80 GB at 3 GB/s are 27 s.
LIMITS_S = {
    HookPhase.PREFLIGHT: 30,
    HookPhase.QUIESCE: 60,
    HookPhase.LOCK: 60,
    HookPhase.CHECKPOINT: 600,
    HookPhase.RELEASE: 120,
    HookPhase.REATTACH: 120,
    HookPhase.RESTORE: 600,
    HookPhase.RESUME: 60,
    HookPhase.ABORT: 600,
}


class HookAnswer(NamedTuple):
    """A hook's answer. `restarted`: jobs that it could only end and start again.

    `from_guest`: why and remedy are the guest's own words.
    """

    ok: bool
    why: str = ""
    remedy: str = ""
    device_bytes: int = 0
    restarted: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    from_guest: bool = False


class _HookWords(TypedDict):
    """A hook's own words, unchanged: see `HookAnswer`."""

    ok: bool
    why: NotRequired[str | None]
    remedy: NotRequired[str | None]
    device_bytes: NotRequired[int | None]
    restarted: NotRequired[tuple[str, ...] | None]
    notes: NotRequired[tuple[str, ...] | None]


def request(device: str, run: str, limit_s: int) -> bytes:
    """The hook's input."""
    words = {"format": FORMAT, "device": device, "run": run, "limit_s": limit_s}
    return json.dumps(words).encode() + b"\n"


def read_answer(returncode: int, out: bytes, err: bytes) -> HookAnswer:
    """The hook's answer, also if it does not follow the contract."""
    last = _last_object(out)
    if last is None:
        output = err.decode(errors="replace").strip() or out.decode(errors="replace").strip()
        why = (
            f"it ended with {returncode} and did not answer{f': {output[-400:]}' if output else ''}"
        )
        return HookAnswer(False, why, BY_HAND)
    try:
        return _answer(convert(_HookWords, last), returncode)
    except MalformedError as exc:
        return HookAnswer(False, f"its answer is malformed: {exc}", BY_HAND)


def _answer(words: _HookWords, returncode: int) -> HookAnswer:
    """Raises MalformedError."""
    require_within("device_bytes", words.get("device_bytes"))
    restarted = words.get("restarted") or ()
    if not words["ok"] or returncode != 0:
        why = words.get("why") or f"it ended with {returncode} and does not say why"
        remedy = words.get("remedy") or ""
        return HookAnswer(False, why, remedy, restarted=restarted, from_guest=True)
    return HookAnswer(
        True,
        device_bytes=words.get("device_bytes") or 0,
        restarted=restarted,
        notes=words.get("notes") or (),
    )


def _last_object(out: bytes) -> dict[str, Any] | None:
    # Neither the hook's earlier output nor the answer's length may cost us much.
    last = out.rstrip().rpartition(b"\n")[2]
    try:
        found = parse(last)
    except MalformedError:
        return None
    return found if isinstance(found, dict) and found.get("ok") is not None else None
