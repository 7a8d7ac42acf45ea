"""What hooks are told and what is made of their answers."""

import json

import pytest

from vmckpt.devices.contract import LIMITS_S, PHASES_OUT, HookPhase, read_answer, request
from vmckpt.devices.journey import STEPS_OUT, Journey
from vmckpt.migrate.outcome.journal import BEFORE_COMMIT, STEPS
from vmckpt.ui.progress import PHASES
from vmckpt.vm.passthrough.passthrough import PHASES as NAMES
from vmckpt.vm.passthrough.passthrough import Passthrough, Strategy


def test_the_request() -> None:
    told = json.loads(request("gpu0", "run-1", 60))
    assert told == {"format": 1, "device": "gpu0", "run": "run-1", "limit_s": 60}


def test_the_phases_are_the_same_everywhere() -> None:
    assert tuple(phase.value for phase in HookPhase) == NAMES
    assert set(LIMITS_S) == set(HookPhase)
    assert all(step in BEFORE_COMMIT and step in PHASES for step in STEPS_OUT)
    assert STEPS.index("mirror") < STEPS.index(STEPS_OUT[0])
    assert STEPS.index("unplug") < STEPS.index("transfer")
    assert STEPS.index("verify") < STEPS.index("bring-back") < STEPS.index("release")


def test_an_answer_is_the_last_line() -> None:
    out = b'some noise\n{"ok": true, "device_bytes": 5, "restarted": ["train"], "notes": ["x"]}\n'
    answer = read_answer(0, out, b"")
    assert answer.ok
    assert (answer.device_bytes, answer.restarted, answer.notes) == (5, ("train",), ("x",))


@pytest.mark.parametrize(
    ("code", "out", "err", "why"),
    [
        (1, b'{"ok": false, "why": "MIG is on", "remedy": "off"}', b"", "MIG is on"),
        (1, b'{"ok": true}', b"", "it ended with 1"),
        (0, b"", b"", "did not answer"),
        (0, b"well done", b"", "did not answer: well done"),
        (2, b"", b"Traceback: boom", "boom"),
        (0, b"[1]", b"", "did not answer"),
        (0, b'{"ok": null}', b"", "did not answer"),
        (0, b'{"ok": true, "device_bytes": -1}', b"", "device_bytes is -1, not from 0"),
        (0, b'{"ok": true, "notes": [1]}', b"", "$.notes[0]"),
        (0, b'{"ok": 1}', b"", "Expected `bool`, got `int` - at `$.ok`"),
        (0, b'{"ok": false, "why": 7}', b"", "Expected `str | null`, got `int` - at `$.why`"),
    ],
)
def test_what_is_no_good_answer_says_why(code: int, out: bytes, err: bytes, why: str) -> None:
    answer = read_answer(code, out, err)
    assert not answer.ok
    assert why in answer.why


def test_the_way_out_is_taken_back_newest_first() -> None:
    """Every step has an undo, and only devices that are unplugged take part."""
    device = Passthrough("a", "edu", None, Strategy.HOOK_DETACH, "/hook", 0, {}, {})
    moved = device._replace(id="b", strategy=Strategy.VFIO_MIGRATION)
    journey = Journey((device, moved), "run", lambda _code, _text: None)
    steps = journey.steps_out(None)  # type: ignore[arg-type]
    assert tuple(step.name for step in steps) == STEPS_OUT
    assert all(step.undo is not None for step in steps)
    assert journey.ids == {"a", *(f"a-{number}" for number in range(1, 8))}
    assert list(PHASES_OUT.values()) == [
        HookPhase.ABORT,
        HookPhase.RESUME,
        HookPhase.RESTORE,
        HookPhase.REATTACH,
    ]
    nothing = Journey((moved,), "run", lambda _code, _text: None)
    assert not nothing.has_devices
    assert nothing.steps_out(None) == ()  # type: ignore[arg-type]
