"""Metrics: what is written is what Prometheus' own client reads, and says what is known."""

from collections.abc import Sequence
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from tests.sides import side
from vmckpt.events.record import RunRecord
from vmckpt.forecast.measure.dirty_rate import TRACKING, DirtyRate
from vmckpt.forecast.model.dirtying import DirtyCurve, DirtyPoint
from vmckpt.metrics.families import add, observe, render
from vmckpt.metrics.migrations import migrations
from vmckpt.metrics.replications import replications
from vmckpt.metrics.schedules import schedules
from vmckpt.metrics.vms import Measured, dirty_rates, hosts, vms

pytestmark = pytest.mark.unit


def parsed(families: Sequence[Metric]) -> dict[str, Metric]:
    return {metric.name: metric for metric in text_string_to_metric_families(render(families))}


def values(metric: Metric) -> dict[tuple[str, ...], float]:
    return {(*sorted(sample.labels.values()),): sample.value for sample in metric.samples}


@given(st.text(), st.text(), st.floats(allow_nan=False))
def test_whatever_is_written_is_read_as_it_was(text: str, label: str, value: float) -> None:
    family = GaugeMetricFamily("vmckpt_test_bytes", text, labels=("vm",))
    add(family, (label,), value)
    add(family, ("unknown",), None)
    # The reader splits lines as Python does; Prometheus only at newlines.
    if any(len(words.splitlines()) > 1 or "\r" in words for words in (text, label)):
        return
    found = parsed([family])["vmckpt_test_bytes"]
    (sample,) = found.samples
    assert sample.labels == {"vm": label}
    assert sample.value == value


def test_a_family_without_samples_is_not_written() -> None:
    assert render([GaugeMetricFamily("vmckpt_nothing", "Nothing.")]) == ""


def test_a_histogram_counts_all_that_is_below() -> None:
    family = HistogramMetricFamily("vmckpt_test_seconds", "Times.", labels=("way",))
    observe(family, ("precopy",), [0.1, 0.5, 0.5, 9.0], (0.1, 1.0))
    found = parsed([family])["vmckpt_test_seconds"]
    assert found.type == "histogram"
    buckets = {s.labels["le"]: s.value for s in found.samples if s.name.endswith("_bucket")}
    assert buckets == {"0.1": 1, "1": 3, "+Inf": 4}
    rest = {s.name: s.value for s in found.samples if not s.name.endswith("_bucket")}
    assert rest == {"vmckpt_test_seconds_sum": pytest.approx(10.1), "vmckpt_test_seconds_count": 4}


def vm(name: str, **facts: Any) -> dict[str, Any]:
    return {
        "name": name, "host": "a", "driver": "qemu", "machine": "pc-q35-10.0", "accel": "tcg",
        "state": "running", "operation": None, "memory_bytes": 1 << 29, "vcpus": 2,
    } | facts  # fmt: skip


def test_vms_and_hosts_are_told() -> None:
    listed = [vm("web"), vm("db", state="paused", operation="migrate to b")]
    found = parsed([*hosts({"a": True, "b": False}), *vms(listed)])
    assert values(found["vmckpt_host_up"]) == {("a",): 1, ("b",): 0}
    assert values(found["vmckpt_vm_running"]) == {("a", "web"): 1, ("a", "db"): 0}
    assert values(found["vmckpt_vm_busy"]) == {("a", "web"): 0, ("a", "db"): 1}
    assert values(found["vmckpt_vm_memory_bytes"])["a", "web"] == 1 << 29
    assert found["vmckpt_vm_info"].samples[0].labels["machine"] == "pc-q35-10.0"


def test_a_dirty_rate_is_of_distinct_pages_and_says_how_old_it_is() -> None:
    curve = DirtyCurve((DirtyPoint(1.0, 90, 100, 110), DirtyPoint(8.0, 290, 300, 310)), 131072)
    rate = DirtyRate(TRACKING, "", 8.0, 1 << 29, curve, (), 0, None, None)
    found = parsed(dirty_rates([Measured("web", 1700000000.5, rate)]))
    labels = (TRACKING, "web")
    expected = {
        "vmckpt_vm_dirty_rate_bytes_per_second": 100 * 4096,
        "vmckpt_vm_working_set_bytes": 300 * 4096,
        "vmckpt_vm_dirty_rate_measured_seconds": 8,
        "vmckpt_vm_dirty_rate_measured_timestamp_seconds": 1700000000.5,
    }
    assert {name: values(metric) for name, metric in found.items()} == {
        name: {labels: value} for name, value in expected.items()
    }


def run(run_id: str, outcome: str | None, **result: Any) -> RunRecord:
    band = {"total_s": [1.0, 2.0, 3.0], "downtime_s": [0.01, 0.02, 0.03], "slowdown": [0, 0, 0],
            "sent_bytes": [1, 2, 3]}  # fmt: skip
    forecast = {"way": "precopy", "ends": True, "rounds": 3, "slow_s": 0.0, **band}
    return RunRecord(
        run_id,
        "migrate",
        {"vm": "web", "method": "auto"},
        began_unix_s=1000.0,
        result=None if outcome is None else {"outcome": outcome, **result},
        forecast={"forecast": forecast, "reason": ""},
    )


def test_migrations_are_counted_from_their_records() -> None:
    done = {"method": "precopy", "total_time_s": 2.2, "transferred_bytes": 10, "downtime_ms": 40}
    records = [
        run("1", "completed", **done),
        run("2", "completed", **done | {"total_time_s": 4.0, "guest_downtime_ms": 200.0}),
        run("3", "timed-out"),
        run("4", None),
        RunRecord("5", "migrate", {"vm": "calibrate-1"}, result={"outcome": "completed"}),
    ]
    found = parsed(migrations(records))
    assert values(found["vmckpt_migrations"]) == {
        ("completed", "precopy"): 2,
        ("auto", "timed-out"): 1,
    }
    assert values(found["vmckpt_migrations_unfinished"]) == {(): 1}
    sums = {s.name: s.value for m in found.values() for s in m.samples if "_sum" in s.name}
    assert sums["vmckpt_migration_duration_seconds_sum"] == pytest.approx(6.2)
    assert sums["vmckpt_migration_downtime_seconds_sum"] == pytest.approx(0.24)
    assert sums["vmckpt_forecast_duration_error_ratio_sum"] == pytest.approx(1.1)
    assert sums["vmckpt_forecast_downtime_error_seconds_sum"] == pytest.approx(0.2)
    assert values(found["vmckpt_migration_sent_bytes"]) == {("precopy",): 20}
    assert values(found["vmckpt_forecasts"]) == {("precopy",): 2}
    assert values(found["vmckpt_forecasts_inside"]) == {("precopy",): 1}
    assert values(found["vmckpt_forecasts_wrong_end"]) == {(): 1}
    assert values(found["vmckpt_migration_last_begun_timestamp_seconds"]) == {("web",): 1000}
    assert render(migrations([])) == ""


def said(role: str, **more: Any) -> dict[str, Any]:
    about = {"vm": "web", "role": role, "host": role[0], "answers": True, "state": "protected"}
    return about | more


def told(*sides: dict[str, Any]) -> list[Metric]:
    return replications([side(**one) for one in sides])


def test_replications_are_told_in_seconds_and_bytes() -> None:
    primary = said(
        "primary", epochs=100, epochs_per_s=29.7, pause_p50_ms=5.1, pause_p99_ms=10.2,
        pause_worst_ms=11.0, safe_after_p50_ms=15.0, lag_ms=20.0, epoch_ms=25.0, sent_bytes=1000,
        raw_bytes=9000, dirty_pages=3, term=2, output_commit=True, slowed_percent=25,
    )  # fmt: skip
    found = parsed(told(primary, said("standby")))
    prefix = "vmckpt_replication_"
    assert values(found[prefix + "up"]) == {("p", "primary", "web"): 1, ("s", "standby", "web"): 1}
    one = {name.removeprefix(prefix): list(values(m).values()) for name, m in found.items()}
    assert one["protected"] == [1]
    assert one["pause_seconds"] == pytest.approx([0.0051, 0.0102, 0.011])
    assert one["lag_seconds"] == pytest.approx([0.02])
    assert one["rpo_seconds"] == pytest.approx([0.035])
    assert one["output_latency_seconds"] == pytest.approx([0.0275])
    assert one["slowed_ratio"] == [0.25]
    assert (one["epochs"], one["sent_bytes"], one["term"]) == ([100], [1000], [2])
    free = parsed(told(primary | {"output_commit": False, "lag_ms": None}))
    assert list(values(free[prefix + "output_latency_seconds"]).values()) == [0]
    assert prefix + "rpo_seconds" not in free


def test_each_path_on_which_the_other_side_is_heard_is_told() -> None:
    primary = said("primary", paths={"replication": "heard", "second": "one way"})
    standby = said("standby", paths={"replication": "heard", "second": "none"})
    gone = said("standby", host="t", answers=False, paths={"second": "heard"})
    found = parsed(told(primary, standby, gone))
    assert values(found["vmckpt_replication_path_up"]) == {
        ("p", "primary", "replication", "web"): 1,
        ("p", "primary", "second", "web"): 0,
        ("replication", "s", "standby", "web"): 1,
    }


def test_a_service_that_is_gone_protects_nothing_and_tells_no_figures() -> None:
    found = parsed(told(said("primary", answers=False, epochs=100), said("standby")))
    assert values(found["vmckpt_replication_protected"]) == {("p", "web"): 0}
    assert "vmckpt_replication_epochs" not in found


def test_a_vm_is_protected_or_not_whatever_its_earlier_hosts_have_on_record() -> None:
    """An alert went off for as long as a record was there, and none after a failover."""
    old = said("primary", host="a", answers=False, state="ended", term=1)
    lost = said("primary", host="b", answers=False, state="dead")
    over = said("standby", host="b", answers=False, state="promoted", term=2)
    other = said("standby", host="c", answers=False, state="promoted", term=1, vm="db")
    now = said("primary", host="b", term=3)
    name = "vmckpt_replication_protected"
    for sides in ([old, over, other], [other, over, old]):
        assert values(parsed(told(*sides))[name]) == {("b", "web"): 0, ("c", "db"): 0}
    for sides in ([now, said("standby", host="c"), old], [old, lost, now]):
        assert values(parsed(told(*sides))[name]) == {("b", "web"): 1}


def test_infinity_is_spelt_as_prometheus_spells_it() -> None:
    family = GaugeMetricFamily("vmckpt_test", "Test.", labels=("x",))
    add(family, ("y",), inf)
    add(family, ("z",), -inf)
    lines = ['vmckpt_test{x="y"} +Inf', 'vmckpt_test{x="z"} -Inf']
    assert render([family]).splitlines()[2:] == lines


def test_schedules_have_what_an_alarm_is_made_of() -> None:
    told = {
        "schedule": "nightly", "vm": "web", "next_unix_s": 2000.0, "last_done_unix_s": 1000.0,
        "runs_done": 7, "runs_failed": 2, "failures": 1, "interval": None,
    }  # fmt: skip
    auto = told | {
        "schedule": "auto",
        "last_done_unix_s": None,
        "interval": {"every_s": 322.0, "mtbf_s": 2592000.0},
    }
    found = parsed(schedules([told, auto]))
    prefix = "vmckpt_schedule_"
    assert values(found[f"{prefix}next_due_timestamp_seconds"])["nightly", "web"] == 2000
    # Of one that was never done nothing is said.
    success = values(found[f"{prefix}last_success_timestamp_seconds"])
    assert success == {("nightly", "web"): 1000}
    assert values(found[f"{prefix}failures"])["auto", "web"] == 2
    assert values(found[f"{prefix}failures_in_a_row"])["nightly", "web"] == 1
    assert values(found[f"{prefix}interval_seconds"]) == {("auto", "web"): 322}
