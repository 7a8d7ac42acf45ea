"""How fast a host's processors are, looked at now and then."""

import time

import pytest

from vmckpt.memory.pace import COPIED_BYTES, LOOK_EVERY_S, Pace

pytestmark = pytest.mark.unit


def test_the_median_look_tells_and_looks_are_far_enough_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, used_s = 100.0, iter((1.0, 1.2, 2.0, 2.1, 3.0, 3.9))
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    monkeypatch.setattr(time, "thread_time", lambda: next(used_s))
    pace = Pace()
    assert pace.copying_s is None
    for _ in range(3):
        pace.look()
        pace.look()  # too soon
        now_s += LOOK_EVERY_S
    assert pace.copying_s == pytest.approx(0.2 * 2**30 / COPIED_BYTES)
    assert next(used_s, None) is None
