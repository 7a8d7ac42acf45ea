"""What devices add to a forecast: time out and back, and memory to send."""

from typing import Any

import pytest

from vmckpt.events.record import RunRecord
from vmckpt.forecast.learned import device_moves, moved
from vmckpt.forecast.model.device_phases import (
    DeviceMove,
    device_phases,
    with_device_memory,
    with_devices,
)
from vmckpt.forecast.model.dirtying import DirtyCurve
from vmckpt.forecast.model.first_pass import Stretch
from vmckpt.forecast.model.forecast import Band, Forecast, TransferMode
from vmckpt.forecast.model.guest import Guest

GIB = 1 << 30


def test_without_a_move_nothing_is_made_up() -> None:
    found = device_phases(60 * GIB, [])
    assert (found.out_s, found.back_s, found.both_s, found.moves) == (None, None, None, 0)
    assert with_devices(way(), found) == way()


def test_more_to_save_takes_longer_at_the_pace_of_then() -> None:
    found = device_phases(60 * GIB, [DeviceMove(30 * GIB, 10.0, 4.0)])
    assert found.out_s == Band(20.0, 20.0, 20.0)
    assert found.both_s == Band(28.0, 28.0, 28.0)


def test_less_to_save_and_next_to_nothing_take_as_long_as_then() -> None:
    assert device_phases(GIB, [DeviceMove(30 * GIB, 10.0, 4.0)]).out_s == Band(10.0, 10.0, 10.0)
    assert device_phases(GIB, [DeviceMove(16, 1.0, 2.0)]).back_s == Band(2.0, 2.0, 2.0)


def test_the_band_is_of_the_moves_that_were() -> None:
    seen = [DeviceMove(16, float(took), 0.0) for took in range(11)]
    assert device_phases(16, seen).out_s == Band(1.0, 5.0, 9.0)


def test_a_ways_total_has_the_devices_in_it() -> None:
    found = device_phases(16, [DeviceMove(16, 1.0, 2.0)])
    with_them = with_devices(way(), found)
    assert with_them.total_s == Band(4.0, 5.0, 6.0)
    assert with_them.downtime_s == way().downtime_s


def test_what_they_hold_is_memory_to_send() -> None:
    guest = Guest(1000, 0.5, 0.2, 0.0, 1.0, DirtyCurve((), 1000), layout=(Stretch(500, 500),))
    fuller = with_device_memory(guest, 300 * 4096)
    assert fuller.zero_share == pytest.approx(0.2)
    assert fuller.ratio == pytest.approx((0.2 * 0.5 + 0.3) / 0.8)
    assert fuller.layout == ()
    assert with_device_memory(guest, 2000 * 4096).zero_share == 0
    assert with_device_memory(guest, 0) is guest


def test_moves_teach_it_and_the_rest_is_learned_without_it() -> None:
    one, back, undone = record(), record("b", "a"), record(outcome="undone")
    assert device_moves(
        [one, back, undone, record(device_out_s=0.0, device_back_s=0.0)], "a", "b"
    ) == [DeviceMove(GIB, 3.0, 1.5)]
    lesson = moved(one)
    assert lesson
    assert lesson.total_s == pytest.approx(20.0 - 4.5)


def way() -> Forecast:
    band = Band(1.0, 2.0, 3.0)
    return Forecast(TransferMode.PRECOPY, True, band, Band(0.1, 0.1, 0.1), band, Band(0, 0, 0), 3)


def record(source: str = "a", target: str = "b", **result: Any) -> RunRecord:
    came = {
        "outcome": "completed",
        "method": "precopy",
        "transfer_time_s": 9.0,
        "total_time_s": 20.0,
        "transferred_bytes": GIB,
        "device_bytes": GIB,
        "device_out_s": 3.0,
        "device_back_s": 1.5,
    }
    made = RunRecord("r", "migrate", {"source": source, "target": target}, result=came | result)
    made.samples = [{"normal_pages": 5, "status": "completed", "round": 1}]
    return made
