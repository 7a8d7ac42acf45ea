"""What a calibration tells while it goes on."""

import pytest

from vmckpt.events.types import Event, Note, PhaseBegan
from vmckpt.migrate.calibrate import _as_one

pytestmark = pytest.mark.unit


def test_a_move_is_one_step_in_the_time_of_all_of_them() -> None:
    told: list[Event] = []
    emit = _as_one(told.append, 7.0)
    emit(PhaseBegan(0.5, "transfer"))
    emit(Note(0.75, "slow", "it is slow"))
    assert told == [Note(7.75, "slow", "it is slow")]
