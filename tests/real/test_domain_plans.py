"""Plans for libvirt domains: what was said beforehand, and what came of it."""

import asyncio
import json
import time
from typing import Any

import pytest

from tests.qemu.world import loaded
from tests.real.domains import GUEST, states
from tests.real.machines import Machines
from vmckpt.lab.guests.guest import GuestControl

pytestmark = [pytest.mark.qemu, pytest.mark.timeout(600)]
NAME = GUEST.name
TLS = ("--tls", "require")
# A forecast that is further off than this is wrong, however busy the machine: its own p10 to p90
# is narrower.
TIMES = 2.0


def record(made: Machines, run: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((made.state_dir / f"runs/{run}.json").read_text())
    return found


def test_what_a_plan_says_of_a_domain_is_measured_and_scored_like_any(domain: Machines) -> None:
    measuring = domain.begin("host", "calibrate", "lab-a", "lab-b", "--size", "128M")
    _, said = measuring.communicate(timeout=300)
    assert measuring.returncode == 0, said

    async def move() -> list[dict[str, Any]]:
        async with loaded(domain, GUEST):
            planned = await asyncio.to_thread(domain.ok, "plan", NAME, "lab-b", "--for", "4s")
            assert planned["dirty_rate"]["source"] == "page-tracking"
            assert planned["way"]
            # libvirt's part has not been seen yet: that is said.
            assert any("no migration of a domain" in note for note in planned["notes"]), planned
            words = ("--plan", "--finish-within", "60s", "--max-downtime", "2s", *TLS)
            return [
                await asyncio.to_thread(domain.ok, "migrate", NAME, host, *words)
                for host in ("lab-b", "lab-a", "lab-b", "lab-a")
            ]

    moves = asyncio.run(move())
    assert states(domain) == {"lab-a": "running"}
    by_run = {move["run"]: move for move in domain.ok("runs", "score")["moves"]}
    for moved in moves:
        scored = by_run[moved["run"]]
        assert scored["total_s"] == moved["total_time_s"]
        assert scored["pause_s"] == pytest.approx(moved["guest_downtime_ms"] / 1e3)
        _, expected_s, _ = scored["forecast_total_s"]
        assert expected_s / TIMES < scored["total_s"] < expected_s * TIMES, scored
        assert scored["pause_s"] < 2.0, scored
        assert record(domain, moved["run"])["request"]["driver"] == "libvirt"
    # By now its own migrations have taught.
    again = domain.ok("plan", NAME, "lab-b", "--for", "2s")
    assert not any("no migration of a domain" in note for note in again["notes"])


def test_a_constraint_that_no_method_meets_leaves_the_domain_where_it_is(domain: Machines) -> None:
    for host in ("lab-b", "lab-a"):
        domain.ok("migrate", NAME, host)
    refused = domain.vmckpt("migrate", NAME, "lab-b", "--finish-within", "100ms")
    assert (refused.code, "meets the constraints" in refused.error["what"]) == (4, True)
    assert "--finish-within" in refused.error["remedy"]
    assert states(domain) == {"lab-a": "running"}


def test_a_calm_moment_is_waited_for(domain: Machines) -> None:
    async def calm_later(control: GuestControl) -> None:
        await asyncio.sleep(14.0)
        await control.load_memory("rate=1M set=1M pattern=uniform content=random")

    async def move() -> tuple[dict[str, Any], str]:
        control = await GUEST.control(domain.lab)
        await control.load_memory("rate=40M set=64M pattern=uniform content=random")
        began_s = time.monotonic()
        later = asyncio.ensure_future(calm_later(control))
        words = ("migrate", NAME, "lab-b", "--wait-for-calm", "60s")
        done = await asyncio.to_thread(domain.vmckpt, *words)
        assert done.code == 0, done.stderr
        assert time.monotonic() - began_s > 14.0
        await later
        await control.close()
        return done.result, done.stderr

    moved, said = asyncio.run(move())
    assert moved["outcome"] == "completed"
    assert f"calm: '{NAME}' dirties" in said
