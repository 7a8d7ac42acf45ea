"""The live display: what it leaves on the screen."""

import re

import pytest

from vmckpt.events.types import Emit, PhaseBegan
from vmckpt.ui.live import live_display


def phases(emit: Emit, *at_s: float) -> None:
    for when_s, name in zip(at_s, ("prepare", "transfer", "release"), strict=True):
        emit(PhaseBegan(when_s, name))


def test_each_phase_has_its_time_in_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    with live_display("web: a -> b") as emit:
        phases(emit, 0.0, 0.0, 0.0)
    lines = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r" ✓ releasing the source  [\d.]+ [mu]?s\s*", lines[-1])


def test_a_phase_whose_end_was_not_seen_has_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    with live_display("run 1") as emit:
        phases(emit, 0.0, 2.0, 97.0)
    told = [line.rstrip() for line in capsys.readouterr().err.splitlines()[-3:]]
    assert told == [
        " ✓ starting QEMU on the destination  2.00 s",
        " ✓ sending memory  1m35s",
        " ✓ releasing the source",
    ]
