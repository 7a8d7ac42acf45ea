"""Figures of a primary, as its status has them."""

import time

import pytest

from vmckpt.epoch.epoch import Epoch, Pages, Pause
from vmckpt.memory.ram_file import PAGE_BYTES
from vmckpt.replicate.primary.figures import PrimaryFigures
from vmckpt.replicate.status import ReplicaStatus, Role

pytestmark = pytest.mark.unit
STATUS = ReplicaStatus(role=Role.PRIMARY, state="protected")


def test_figures_are_of_the_pauses_and_epochs_so_far() -> None:
    figures = PrimaryFigures()
    assert figures.added_to(STATUS).pause_p50_ms is None
    assert figures.added_to(STATUS).lag_ms is None
    for number in range(100):
        pause = Pause(0.001 * (number + 1), 0.0, 0.0, 0.0)
        figures.taken(
            Epoch(number, Pages(((0, PAGE_BYTES),), bytes(PAGE_BYTES)), b"", b"state", pause)
        )
    figures.safe(99, 0.0)
    told = figures.added_to(STATUS)
    assert (told.epochs, told.dirty_pages, told.acknowledged_epoch) == (100, 100, 99)
    assert (told.pause_p50_ms, told.pause_p99_ms, told.pause_worst_ms) == (51, 100, 100)
    assert told.lag_ms is not None
    assert told.lag_ms >= 0


def test_what_a_failover_would_lose_now_is_as_old_as_the_last_safe_epoch() -> None:
    figures, began_s = PrimaryFigures(), time.monotonic()
    assert figures.added_to(STATUS).rpo_now_ms is None
    figures.safe(1, began_s - 0.5)
    assert (
        figures.added_to(STATUS).output_latency_p50_ms is None
    )  # since when it was sent is unknown
    figures.safe(2, began_s - 0.3)
    told = figures.added_to(STATUS)
    late_ms = (time.monotonic() - began_s) * 1e3
    assert told.rpo_now_ms is not None
    assert told.output_latency_p50_ms is not None
    assert 300 <= told.rpo_now_ms <= 300.1 + late_ms
    assert 400 <= told.output_latency_p50_ms <= 400.1 + late_ms
