"""Migrations steered while they run, on real guests: the guest slowed, the link shared."""

import asyncio
import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.qemu.world import World, image, qemu, world
from vmckpt.lab.guests.labguest import LabGuest
from vmckpt.migrate.shared_link import CHECK_S

POLICY = """\
[[when]]
stalls = 2
do = "throttle"
by_percent = 40
most_percent = 70

[[when]]
passes = 6
do = "postcopy"
"""
LIMIT = 40_000_000
CALM = "rate=1M set=8M pattern=uniform content=random"


def test_a_guest_is_slowed_by_policy_and_two_that_move_at_once_share_the_link() -> None:
    guests = [LabGuest(f"g{number}", number, image(), disk=None) for number in (1, 2)]
    with world(qemu("10.0"), qemu("10.0")) as made:
        policy = made.state_dir / "policy.toml"
        policy.write_text(POLICY)
        for guest in guests:
            made.run_guest(guest, "lab-a")
        asyncio.run(load(made, guests[0], "rate=60M set=16M pattern=uniform content=random"))
        slow = ("--bandwidth", "20MB", "--max-downtime", "5ms")
        moved = made.ok("migrate", "g1", "lab-b", *slow, "--policy", str(policy))
        record = json.loads(Path(moved["run_record"]).read_text())
        throttles = [sample["throttle_percent"] for sample in record["samples"]]
        # 1 %: the least that QEMU may take; then one step, and the other as far as it is allowed.
        assert set(throttles) == {0, 1, 40, 70} or set(throttles) == {0, 40, 70}
        assert all(before <= after for before, after in pairwise(throttles) if after)
        told = [event["text"] for event in record["events"] if event.get("code") == "policy"]
        assert [words.split(":")[0] for words in told] == [
            "slowing the guest's processors by 40 %",
            "slowing the guest's processors by 70 %",
            "switching to post-copy",
        ]
        assert moved["method"] == "postcopy"
        replayed = made.ok("replay", moved["run"], "--policy", str(policy))["decisions"]
        assert [one["act"] for one in replayed] == ["throttle", "throttle", "postcopy"]
        made.ok("migrate", "g1", "lab-a", "--method", "stop")

        asyncio.run(load(made, guests[0], CALM))
        asyncio.run(load(made, guests[1], "rate=60M set=64M pattern=uniform content=random"))
        how = ("lab-b", "--bandwidth", str(LIMIT), "--method", "precopy")
        begun = [made.begin("migrate", guest.name, *how) for guest in guests]
        outs = [begun[0].communicate(timeout=90)]
        # The other cannot end until its guest writes less: it has the link for itself first.
        time.sleep(3 * CHECK_S)
        asyncio.run(load(made, guests[1], CALM))
        outs.append(begun[1].communicate(timeout=90))
        assert [command.returncode for command in begun] == [0, 0], outs
        found = [json.loads(Path(json.loads(out)["run_record"]).read_text()) for out, _ in outs]
        alone = shared(found)
        for record in found:
            notes = [event["text"] for event in record["events"] if event.get("code") == SHARED]
            assert notes[0] == "another migration uses the link: continuing, at 19.1 MiB/s"
        assert "alone again: continuing, at 38.1 MiB/s" in str(found[1]["events"])
        assert alone > 0.55 * LIMIT


SHARED = "shared-link"


async def load(made: World, guest: LabGuest, words: str) -> None:
    control = await guest.control(made.lab)
    await control.load_memory(words)
    await control.close()


def shared(found: list[dict[str, Any]]) -> float:
    """Both sent at most their share; how fast the one sent that was alone then."""
    courses = [
        [(one["began_unix_s"] + s["at_s"], s["transferred_bytes"]) for s in one["samples"]
         if s["status"] == "active"]
        for one in found
    ]  # fmt: skip
    # The first look is at once, the next ones each second.
    began, ended = max(course[0][0] for course in courses) + 1.2, min(c[-1][0] for c in courses)
    rates = [rate(course, began, ended) for course in courses]
    assert all(0 < one < 0.65 * LIMIT for one in rates), rates
    last = max(courses, key=lambda course: course[-1][0])
    return rate(last, ended + 1.5, last[-1][0])


def rate(course: list[tuple[float, int]], began: float, ended: float) -> float:
    """Bytes a second between two instants; 0 where there are not two looks between them."""
    inside = [look for look in course if began <= look[0] <= ended]
    if len(inside) < 3:
        return 0.0
    (first_s, first), (last_s, last) = inside[0], inside[-1]
    return (last - first) / (last_s - first_s)
