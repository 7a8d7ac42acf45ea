"""Which changes and events an operator is notified of, and what a notification says."""

import json
from dataclasses import replace
from typing import Any

import pytest

from vmckpt.errors import UsageError
from vmckpt.fleet.schedule.notices import occasion_of
from vmckpt.fleet.schedule.run import Event
from vmckpt.notify.delivery import Receivers
from vmckpt.notify.notification import Notification, Occasion
from vmckpt.replicate.notices import Noticing
from vmckpt.replicate.status import ReplicaStatus, Role

pytestmark = pytest.mark.unit
PRIMARY = ReplicaStatus(
    role=Role.PRIMARY, state="copying", vm="web", run="r1", primary="a", standby="b", may_run=True
)
STANDBY = replace(PRIMARY, role=Role.STANDBY, state="following", may_run=None)


def noticed(*said: ReplicaStatus) -> list[str]:
    noticing = Noticing()
    return [one.event for status in said for one in noticing.noticed("a", status)]


def ended(ending: str, why: str = "") -> ReplicaStatus:
    return replace(PRIMARY, state="ended", ending=ending, why=why)


@pytest.mark.parametrize(
    ("said", "events"),
    [
        ([PRIMARY, replace(PRIMARY, state="protected")], ["protected"]),
        ([replace(PRIMARY, state="protected")] * 3, ["protected"]),
        # The first copy failed, or was stopped: its command says so.
        ([PRIMARY, ended("alone")], []),
        ([PRIMARY, ended("stopped")], []),
        # Its QEMU died in it: the guest is gone.
        ([PRIMARY, ended("lost")], ["protection-lost"]),
        # A status is seen five times a second, so not every one.
        (
            [replace(PRIMARY, state="protected"), replace(PRIMARY, state="alone"), ended("alone")],
            ["protected", "protection-lost"],
        ),
        ([replace(PRIMARY, state="protected"), ended("alone")], ["protected", "protection-lost"]),
        ([replace(PRIMARY, state="protected"), ended("stopped")], ["protected"]),
        ([replace(PRIMARY, state="protected"), ended("guest_off")], ["protected"]),
        # The standby tells of it.
        ([replace(PRIMARY, state="protected"), ended("yours")], ["protected"]),
        ([replace(PRIMARY, state="protected"), ended("replaced")], ["protected"]),
        # A recovery has one status alone.
        ([ended("alone")], ["protection-lost"]),
        ([ended("off")], ["protection-lost"]),
        ([ended("replaced")], []),
        ([STANDBY, replace(STANDBY, state="promoted")], ["failover"]),
        ([STANDBY, *[replace(STANDBY, state="promoted")] * 2], ["failover"]),
        ([replace(STANDBY, state="promoted")], ["failover"]),
        ([STANDBY, replace(STANDBY, state="ended")], []),
        (
            [PRIMARY, replace(PRIMARY, may_run=False), PRIMARY, replace(PRIMARY, may_run=False)],
            ["guest-paused", "guest-resumed", "guest-paused"],
        ),
        # It may not run, and that is how it ends.
        ([replace(PRIMARY, may_run=False), ended("replaced")], []),
    ],
)
def test_changes_of_a_protection(said: list[ReplicaStatus], events: list[str]) -> None:
    assert noticed(*said) == events


def test_what_a_notification_of_a_failover_says() -> None:
    (one,) = Noticing().noticed("b", replace(STANDBY, state="promoted", why="took\nover", term=2))
    said = json.loads(one.to_text())
    assert Notification.from_text(one.to_text()) == one
    machine, time = said.pop("machine"), said.pop("time")
    assert machine
    assert time.endswith("Z")
    assert said == {
        "schema": 1,
        "id": "r1/failover",
        "event": "failover",
        "vm": "web",
        "host": "b",
        "why": "took over",
        "details": {
            "run": "r1",
            "role": "standby",
            "primary": "a",
            "standby": "b",
            "state": "promoted",
            "term": 2,
        },
    }


def test_each_pause_of_a_guest_has_an_id_of_its_own() -> None:
    noticing, ids = Noticing(), set()
    for may_run in (True, False, True, False):
        ids |= {one.id for one in noticing.noticed("a", replace(PRIMARY, may_run=may_run))}
    assert len(ids) == 3


@pytest.mark.parametrize(
    ("event", "more", "occasion"),
    [
        ("failed", {"failures_before": 0}, Occasion.SCHEDULE_FAILED),
        ("failed", {"failures_before": 3}, None),
        # The schedule itself cannot be used; the scheduler tells of it once.
        ("failed", {"kind": "usage"}, Occasion.SCHEDULE_FAILED),
        ("missed", {"failures_before": 0}, Occasion.SCHEDULE_FAILED),
        ("missed", {"failures_before": 1}, None),
        ("late", {}, Occasion.SCHEDULE_FAILED),
        ("done", {"failures_before": 2}, Occasion.SCHEDULE_RECOVERED),
        ("skipped", {"failures_before": 2}, Occasion.SCHEDULE_RECOVERED),
        ("done", {"failures_before": 0}, None),
        ("damaged", {}, Occasion.STORE_DAMAGED),
        ("busy", {"failures_before": 0}, None),
        ("uncopied", {"failures_before": 1}, None),
        ("taken", {}, None),
        ("due", {}, None),
    ],
)
def test_events_of_a_schedule(event: str, more: dict[str, Any], occasion: Occasion | None) -> None:
    assert occasion_of(Event("nightly", "web", event, "text", more)) is occasion


@pytest.mark.parametrize(
    ("command", "webhook", "events", "why"),
    [
        ("mail 'ops", None, [], "No closing quotation"),
        (None, "ftp://h/x", [], "it takes http:// or https://"),
        (None, "https://", [], "it takes http:// or https://"),
        (None, "https://h:x/", [], "Port could not be cast"),
        (None, "https://me:secret@h/", [], "a user and a password in it are not sent"),
        ("mail", None, ["failovers"], "the events are: failover, protection-lost"),
    ],
)
def test_receivers_that_make_no_sense_are_refused(
    command: str | None, webhook: str | None, events: list[str], why: str
) -> None:
    with pytest.raises(UsageError) as caught:
        Receivers.parse(command, webhook, events)
    assert why in caught.value.why
    assert "secret" not in str(caught.value)


def test_which_events_receivers_want() -> None:
    assert not Receivers.parse(None, "", []).wants("failover")
    some = Receivers.parse("mail ops", None, ["failover"])
    assert [some.wants(one) for one in ("failover", "protected", "test")] == [True, False, True]
    assert Receivers.parse(None, "https://h/x", []).wants("protected")
