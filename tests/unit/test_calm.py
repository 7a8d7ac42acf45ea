"""Waiting for a calm moment: how long at most, and what is left of it."""

import asyncio
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from tests.unit.test_forecast import FORECASTS
from vmckpt.forecast.calm import MEASURE_S, wait_for_calm
from vmckpt.forecast.measure.dirty_rate import DirtyRate
from vmckpt.forecast.measure.last_measured import all_kept
from vmckpt.forecast.model.choose import Choice, Intent, judge
from vmckpt.forecast.model.dirtying import DirtyCurve, DirtyPoint
from vmckpt.forecast.model.forecast import TransferMode
from vmckpt.forecast.planner import MigrationPlan
from vmckpt.memory.observe import DirtyWindow
from vmckpt.options.migration import MigrationOptions

pytestmark = pytest.mark.unit

SEEN = DirtyRate(
    source="page-tracking", why="", took_s=MEASURE_S, ram_bytes=1 << 30,
    curve=DirtyCurve((DirtyPoint(MEASURE_S, 90.0, 100.0, 110.0),), 1 << 18),
    windows=(DirtyWindow(0.0, MEASURE_S, 100),), faults=100, ram=None, dirtied=None,
)  # fmt: skip


def waited(for_s: float, pages: list[float]) -> tuple[int, list[str]]:
    """How often it looked, at these many pages, and what was told."""
    looks, told = list(pages), list[str]()

    async def measure(measure_s: float) -> DirtyRate:
        point = DirtyPoint(measure_s, 0.0, looks.pop(0), 1e6)
        return replace(SEEN, took_s=measure_s, curve=DirtyCurve((point,), 1 << 18))

    asyncio.run(wait_for_calm("web", measure, for_s, told.append))
    return len(pages) - len(looks), told


def test_a_look_that_would_end_too_late_is_not_begun() -> None:
    looks, told = waited(0.9 * MEASURE_S, [100.0])
    assert looks == 0
    assert told == ["no calm moment within 1.80 s: continuing"]


def test_what_was_measured_last_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path))
    looks, (told,) = waited(600.0, [900.0, 800.0, 900.0, 900.0, 500.0, 900.0])
    assert looks == 5
    assert told.startswith("calm: 'web' dirties")
    ((name, _, measured),) = all_kept()
    assert (name, measured.working_set_bytes) == ("web", 500 * 4096)


def spare_s(intent: Intent, way: TransferMode | None) -> float:
    offers = tuple(judge(one, intent) for one in FORECASTS)
    choice = Choice(way, "")
    return MigrationPlan(
        "web", "a", "b", SEEN, offers, (), (), choice, intent, MigrationOptions(), ()
    ).spare_s


def test_what_may_be_waited_leaves_the_time_to_plan_anew_and_to_move() -> None:
    hybrid = FORECASTS[2].total_s.p90
    wanted = Intent(finish_within_s=100.0, gone_s=9.0)
    assert spare_s(wanted, TransferMode.HYBRID) == pytest.approx(91 - 1.25 * (9 + hybrid))
    # Where nothing keeps the constraints as it is, a calm moment may.
    assert spare_s(wanted, None) == 91 - 1.25 * 9
    assert spare_s(Intent(finish_within_s=20.0, gone_s=9.0), TransferMode.HYBRID) == 0.0
    assert spare_s(Intent(gone_s=9.0), TransferMode.HYBRID) == inf
