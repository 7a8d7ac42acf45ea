"""The planner on real guests: calibrated, planned, moved, and put to the test."""

import asyncio
import json
import re
import time
from math import inf
from pathlib import Path

import pytest

from tests.qemu.world import World, image, qemu, world
from vmckpt.lab.guests.labguest import LabGuest
from vmckpt.units import parse_duration_s

WAYS = {"precopy", "auto-converge", "multifd", "zstd", "hybrid", "postcopy", "stop"}


def test_a_guest_moves_by_plan_and_the_forecast_is_scored() -> None:
    guest = LabGuest("one", 1, image(), disk=None)
    with world(qemu("10.0"), qemu("10.0")) as made:
        made.run_guest(guest, "lab-a")
        unknown = made.vmckpt("plan", "one", "lab-b")
        assert unknown.code == 4
        assert unknown.error["remedy"].endswith("vmckpt host calibrate lab-a lab-b")
        assert made.vmckpt("migrate", "one", "lab-b", "--plan", "--max-downtime", "2s").code == 4

        done = made.ok("host", "calibrate", "lab-a", "lab-b", "--size", "64M")
        known = {(link["source"], link["sending"]) for link in done["links"]}
        assert {("lab-a", "plain"), ("lab-b", "plain"), ("lab-a", "multifd")} <= known
        assert [vm["name"] for vm in made.ok("vm", "list")["vms"]] == ["one"]

        async def load() -> None:
            control = await guest.control(made.lab)
            await control.load_memory("rate=10M set=32M pattern=uniform content=random")
            await control.close()

        asyncio.run(load())
        plan = made.ok("plan", "one", "lab-b", "--for", "2s", "--never-risk-postcopy")
        assert {way["way"] for way in plan["ways"]} == WAYS
        risky = {w["way"] for w in plan["ways"] if "no --never-risk-postcopy" in w["misses"]}
        assert risky == {"hybrid", "postcopy"}
        assert plan["way"] in WAYS - {"hybrid", "postcopy", "stop"}
        for way in plan["ways"]:
            # null: it does not end.
            low, middle, high = (inf if value is None else value for value in way["total_s"])
            assert low <= middle <= high

        impossible = made.vmckpt("plan", "one", "lab-b", "--for", "1s", "--finish-within", "1ms")
        assert impossible.code == 4
        assert impossible.result["change"].startswith("--finish-within ")
        # Looking at the guest takes its part of the time.
        # Another way that takes less time may stand after it, with its longer downtime.
        needed, way = re.findall(
            r"(\S+) would be enough for ([a-z-]+)", impossible.result["change"]
        )[0]
        (named,) = [one for one in impossible.result["ways"] if one["way"] == way]
        assert parse_duration_s(needed) > named["total_s"][2] + 1
        refused = made.vmckpt("migrate", "one", "lab-b", "--finish-within", "1ms")
        assert (refused.code, refused.error["remedy"][:16]) == (4, "--finish-within ")
        for words in (
            ("--max-downtime", "200"),
            ("--max-slowdown", "20"),
            ("--finish-by", "25:00"),
        ):
            assert made.vmckpt("plan", "one", "lab-b", *words).code == 2

        tells_beforehand_what_no_bandwidth_holds(made)
        moved = made.ok("migrate", "one", "lab-b", "--max-downtime", "5s", "--finish-within", "5m")
        record = json.loads(Path(moved["run_record"]).read_text())
        forecast = record["forecast"]["forecast"]
        assert forecast["way"] in WAYS
        assert 0 < forecast["total_s"][0] < moved["total_time_s"] * 20
        assert record["forecast"]["dirty_rate"]["source"] == "page-tracking"
        # What the guest never touched, its memory file does not hold.
        assert 0 < record["request"]["hole_pages"] < record["samples"][-1]["zero_pages"]

        scored = made.ok("runs", "score")
        assert [line["moves"] for line in scored["ways"]] == [1, 1]
        assert scored["moves"][0]["run"] == moved["run"]
        page, picture = made.state_dir / "run.html", made.state_dir / "run.png"
        drawn = made.ok("report", moved["run"], "--html", str(page), "--png", str(picture))
        assert "forecast time" in drawn["facts"]
        assert "<svg" in page.read_text()
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert made.vmckpt("report", moved["run"], "--png", "run.gif").code == 2
        comes_back_in_time(made)


def tells_beforehand_what_no_bandwidth_holds(made: World) -> None:
    """Before it moves at all."""
    words = (
        "--method", "hybrid", "--max-bandwidth", "200MB", "--plan", "--max-downtime", "5s",
        "--dry-run",
    )  # fmt: skip
    dry = made.vmckpt("migrate", "one", "lab-b", *words)
    assert dry.code == 0
    assert "plan: the bandwidth limit holds until post-copy begins" in dry.stderr


def comes_back_in_time(made: World) -> None:
    """After two plans there is no time for the five looks that tell a calm moment."""
    wishes = ("--finish-within", "30s", "--wait-for-calm", "1h")
    began_s = time.monotonic()
    back = made.vmckpt("migrate", "one", "lab-a", *wishes)
    assert time.monotonic() - began_s < 30
    assert back.code == 0, back.stderr
    assert "no calm moment within" in back.stderr
    assert "contrary to the forecast" not in back.stderr


POLICY = """\
[[when]]
stalls = 3
do = "postcopy"
"""


@pytest.mark.long
def test_a_policy_ends_what_would_not_and_can_be_tried_on_paper_first() -> None:
    guest = LabGuest("one", 1, image(), disk=None)
    with world(qemu("10.0"), qemu("10.0")) as made:
        policy = made.state_dir / "policy.toml"
        policy.write_text(POLICY)
        made.run_guest(guest, "lab-a")

        async def load() -> None:
            control = await guest.control(made.lab)
            await control.load_memory("rate=100M set=16M pattern=uniform content=random")
            await control.close()

        asyncio.run(load())
        slow = ("--method", "precopy", "--bandwidth", "20MB", "--max-downtime", "5ms")
        words = ("migrate", "one", "lab-b", *slow, "--policy", str(policy))
        observed = made.vmckpt(*words, "--observe-only", "--timeout", "20s")
        assert observed.code == 8
        assert "it would be switching to post-copy" in observed.stderr
        (watched,) = made.ok("runs", "list")["runs"]
        replayed = made.ok("replay", watched["run"], "--policy", str(policy))
        assert [decision["act"] for decision in replayed["decisions"]] == ["postcopy"]
        assert made.ok(*words)["method"] == "postcopy"
        refused = made.vmckpt(*words[:2], "lab-a", *words[3:], "--never-risk-postcopy")
        assert (refused.code, "postcopy-risk" in refused.error["why"]) == (4, True)
        assert made.vmckpt("migrate", "one", "lab-a", "--observe-only").code == 2
