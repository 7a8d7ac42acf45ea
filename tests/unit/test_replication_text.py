"""A replication in words."""

import time
from typing import Any

import pytest

from tests.sides import side
from vmckpt.foreign import MalformedError
from vmckpt.metrics.replications import replications
from vmckpt.replicate.status import ReplicaStatus
from vmckpt.ui.replication import event_text, status_text

PRIMARY: dict[str, Any] = {
    "role": "primary", "host": "lab-a", "answers": True, "vm": "web", "primary": "lab-a",
    "standby": "lab-b", "state": "protected", "ending": None, "why": "", "term": 3,
    "may_run": True, "output_commit": True, "epoch_ms": 25.0, "epoch_is_auto": False,
    "sent_bytes": 3 << 20, "raw_bytes": 9 << 20, "epochs": 7, "epochs_per_s": 30.0,
    "pause_p50_ms": 4.5, "pause_p99_ms": 9.0, "output_latency_p50_ms": 22.0,
    "output_latency_p99_ms": 40.0, "acknowledged_epoch": 6, "rpo_now_ms": 31.0,
    "tracker": "page protection",
}  # fmt: skip
STANDBY: dict[str, Any] = {
    "role": "standby", "host": "lab-b", "answers": True, "vm": "web", "primary": "lab-a",
    "standby": "lab-b", "state": "following", "why": "", "term": 3, "epoch": 6,
    "heard_ms_ago": 12.0, "received_bytes": 3 << 20, "took_over_ms": None,
}  # fmt: skip


def text(*said: dict[str, Any]) -> str:
    return status_text("web", [side(**one) for one in said])


def test_a_protected_vm() -> None:
    assert text(PRIMARY, STANDBY).splitlines() == [
        "web: lab-a -> lab-b",
        "  primary     lab-a, protected, term 3",
        "  safe until  31 ms ago (epoch 6)",
        "  epochs      30 per second, of 25 ms",
        "  pauses      median 4.5 ms, p99 9 ms",
        "  tracking    page protection",
        "  output      held until safe, median 22 ms, p99 40 ms",
        "  sent        3.00 MiB for 9.00 MiB written",
        "  standby     lab-b, following, term 3",
        "  has epoch   6",
        "  heard       12 ms ago, 3.00 MiB so far",
    ]


def test_the_protection_of_now_is_at_the_head() -> None:
    old = PRIMARY | {"host": "z", "primary": "z", "answers": False, "state": "ended", "term": 1}
    assert text(old, PRIMARY, STANDBY).startswith("web: lab-a -> lab-b\n")
    assert text(STANDBY).startswith("web: lab-a -> lab-b\n")


def test_disks_are_told_of_where_there_are_any() -> None:
    told = text(PRIMARY | {"disk_bytes": 4 << 20, "disk_bytes_not_sent": 1 << 20})
    assert "disks       4.00 MiB, 1.00 MiB already identical" in told


def test_how_the_other_side_is_heard_over_each_path() -> None:
    paths = {
        "paths": {"replication": "heard", "second": "silent"},
        "path_addresses": {"replication": ("10.0.1.1", "10.0.1.2"), "second": ("10.1.1", "10.1.2")},
        "path_heard_ms_ago": {"replication": 3.0, "second": 2500.0},
        "second_path_lacks": "",
    }
    lines = text(PRIMARY | paths).splitlines()
    assert "  connection  10.0.1.1 hears 10.0.1.2" in lines
    assert "  2nd path    SILENT: 10.1.2 is not heard at 10.1.1, for 2.50 s" in lines
    paths["paths"] = {"replication": "waiting", "second": "one way"}
    lines = text(STANDBY | paths).splitlines()
    assert "  connection  nothing came from 10.0.1.2 to 10.0.1.1 yet" in lines
    assert "  2nd path    ONE WAY: 10.1.1 hears 10.1.2, which hears nothing" in lines
    paths |= {"paths": {"second": "none"}, "second_path_lacks": "lab-b has one address only"}
    assert "2nd path    none: lab-b has one address" in text(PRIMARY | paths)
    assert "2nd path" not in text(PRIMARY | paths | {"answers": False})


def test_what_is_unsafe_and_what_is_wrong_is_said() -> None:
    bad = text(PRIMARY | {"output_commit": False, "may_run": False})
    assert "output      NOT HELD" in bad
    assert "guest       STOPPED: its lease has ended" in bad


def test_who_has_died_has_a_last_word_or_none() -> None:
    dead = {"role": "primary", "vm": "web", "state": "dead", "why": "killed", "host": "lab-a"}
    words = text(dead | {"answers": False}, STANDBY | {"took_over_ms": 8.25})
    assert "primary    lab-a, dead: killed" in words
    assert "took over  in 8.25 ms" in words
    begun = PRIMARY | {"pause_p50_ms": None, "output_latency_p50_ms": None, "rpo_now_ms": None}
    assert "pauses    none yet" in text(begun)


def test_an_event() -> None:
    event = {"time": "2026-11-22T18:00:00.000Z", "host": "lab-a", "role": "primary", "term": 3}
    alone = event | {"state": "ended", "ending": "alone", "why": "the standby is lost"}
    assert event_text(alone).endswith("ended, term 3: the standby is lost")
    assert "output not held" in event_text(event | {"state": "x", "output_commit": False})
    assert "may not run" in event_text(event | {"state": "protected", "may_run": False})
    one = event | {"state": "protected", "paths": {"replication": "heard", "second": "silent"}}
    assert event_text(one).endswith("protected, second path silent, term 3")
    both = event | {"state": "protected", "paths": {"replication": "heard", "second": "heard"}}
    assert event_text(both).endswith("protected, heard over both paths, term 3")


def test_an_events_time_is_shown_in_the_local_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    event = {"time": "2026-11-22T18:00:00.042Z", "host": "lab-a", "state": "ended"}
    try:
        for zone, shown in (
            ("Europe/Berlin", "2026-11-22 19:00:00.042"),
            ("America/New_York", "2026-11-22 13:00:00.042"),
            ("UTC", "2026-11-22 18:00:00.042"),
        ):
            monkeypatch.setenv("TZ", zone)
            time.tzset()
            assert event_text(event).startswith(f"{shown}  lab-a ?")
        assert event_text(event | {"time": "yesterday"}).startswith("yesterday  lab-a ?")
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("value", [None, "missing"])
@pytest.mark.parametrize("role", ["primary", "standby"])
def test_what_a_service_of_another_version_does_not_say_is_not_known(
    role: str, value: str | None
) -> None:
    """In no field: of a status only the role and the state are sure."""
    whole = PRIMARY if role == "primary" else STANDBY
    whole = whole | {
        "paths": {"replication": "heard", "second": "silent"},
        "path_addresses": {"replication": ["a", "b"], "second": ["c", "d"]},
        "path_heard_ms_ago": {"replication": 3.0, "second": 2500.0},
        "disk_bytes": 1, "disk_bytes_not_sent": 1, "lease_s": 3.0, "arbiter": "x",
    }  # fmt: skip
    sure = {"role", "state", "host", "answers"}
    for name in whole.keys() - sure:
        said = {key: one for key, one in whole.items() if key != name}
        if value is None:
            said[name] = None
        assert text(said)
        assert replications([side(**said)])
    least = {key: whole[key] for key in sure}
    assert text(least)
    assert replications([side(**least)])


@pytest.mark.parametrize(
    "wrong",
    [
        {"epoch_ms": "25"}, {"rpo_now_ms": []}, {"may_run": "yes"}, {"paths": "x"}, {"vm": 7},
        {"path_addresses": {"second": []}}, {"path_heard_ms_ago": {"second": "x"}}, {"why": {}},
    ],
)  # fmt: skip
def test_what_is_of_another_type_is_no_status(wrong: dict[str, Any]) -> None:
    with pytest.raises(MalformedError):
        ReplicaStatus.from_json(PRIMARY | wrong)
