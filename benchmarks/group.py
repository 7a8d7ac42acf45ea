"""Cuts through guests that talk to each other: is each consistent, and what do they cost?

Run: make bench BENCH=group, or python -m benchmarks.group PART [--cuts N] [--more] for pieces of a
few minutes; each adds to results/group.json, with --more to the cuts that are there. Three guests
of 96 MiB under TCG on two hosts of the lab say 100 numbered messages a second to each other one, by
UDP and by TCP: 1,200 a second in all.

- together: `checkpoint create --group`. Each cut is checked by the counts in the memory of its
  checkpoints; a client outside (`group_client.py`) asks each guest's TCP server all the time, one
  question after the other: the longest that it waits for an answer from 0.3 s before to 0.3 s
  after a cut is the stall. How long it waits before any cut is made, and the longest in all of the
  time that the command takes, are there for comparison. A pause is from where QEMU is told to stop
  to where it has said that the guest runs.
- apart: the same three at once, as three checkpoints without a group: what the check finds then.
- restored: the newest cut is gone back to, in place, some times; the guests' connections go on.
"""

import argparse
import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from typing import Any

import numpy as np

from benchmarks.group_client import Wait, Waits, client
from benchmarks.group_plot import draw
from benchmarks.parts import Found, measure, measured_before
from benchmarks.summary import Verdict
from tests.qemu.talking import Witness, guests, talking
from tests.qemu.world import World, qemu, world
from vmckpt.lab.labguest import LabGuest

HOMES = {"web": "lab-a", "db": "lab-a", "cache": "lab-b"}
RATE, MEMORY, SETTLE_S, PATIENCE_S = 100, "96M", 3.0, 30.0
BESIDE_S, CALM_S = 0.3, 10.0


@asynccontextmanager
async def a_world() -> AsyncIterator[tuple[World, list[LabGuest], Witness]]:
    """Three guests that talk, for the block."""
    with ExitStack() as stack:
        made = await asyncio.to_thread(stack.enter_context, world(qemu("10.0"), qemu("10.0")))
        every = guests(*HOMES, memory=MEMORY)
        try:
            async with talking(made, HOMES, every, RATE) as controls:
                await asyncio.sleep(SETTLE_S)
                yield made, every, Witness(made, HOMES, every)
                for control in controls.values():
                    said = await control.talk()
                    if said.wrong:
                        raise SystemExit(f"numbers over TCP were lost or doubled: {said}")
        finally:
            await asyncio.to_thread(stack.pop_all().close)


async def together(cuts: int) -> dict[str, Any]:
    async with a_world() as (made, _, witness):
        with client(made.state_dir, list(HOMES)) as waits:
            calm_unix_s = time.time()
            await asyncio.sleep(CALM_S)
            calm_ms = _ms(waits.between(calm_unix_s, time.time()))
            rows, began = [], time.monotonic()
            for number in range(cuts):
                began_unix_s = time.time()
                words = ("--group", ",".join(HOMES), "--name", f"cut-{number}")
                done = await asyncio.to_thread(made.vmckpt, "checkpoint", "create", *words)
                if done.code:
                    rows.append({"given_up": done.result["error"]["why"]})
                else:
                    rows.append(row(done.result, waits, began_unix_s, witness))
            took_s = time.monotonic() - began
    said = [one["said"] for one in rows if "said" in one]
    of_all = [one for of_one in calm_ms.values() for one in of_one]
    piece = {
        "cuts": len(rows),
        "messages_per_s": round((said[-1] - said[0]) / took_s, 1),
        "calm_ms": {f"p{p}": float(np.percentile(of_all, p)) for p in (50, 99, 100)},
    }
    return {"pieces": [piece], "cuts": rows}


def row(
    done: dict[str, Any], waits: Waits, began_unix_s: float, witness: Witness
) -> dict[str, Any]:
    """One cut: what it cost, and whether it is consistent."""
    ended_unix_s, members = time.time(), done["members"].values()
    first = min(one["stopping_unix_s"] for one in members) - BESIDE_S
    last = max(one["runs_unix_s"] for one in members) + BESIDE_S
    whole = waits.between(began_unix_s, max(ended_unix_s, last))
    beside = {name: [one for one in of_one if first <= one.asked_unix_s <= last]
              for name, of_one in whole.items()}  # fmt: skip
    found, said = witness.violations({vm: one["id"] for vm, one in done["members"].items()})
    seen = {
        "skew_ms": done["skew_ms"],
        "held_ms": [one["held_ms"] for one in members],
        "cut_pause_ms": [(one["runs_unix_s"] - one["stopping_unix_s"]) * 1e3 for one in members],
        "longest_pause_ms": [one["pause_ms"] for one in members],
        "stall_ms": [max(of_one, default=0.0) for of_one in _ms(beside).values()],
        "longest_wait_ms": [max(of_one, default=0.0) for of_one in _ms(whole).values()],
        "sent_twice": [of_one[-1].sent_twice - of_one[0].sent_twice for of_one in whole.values()],
        "took_s": max(one["took_s"] for one in members),
        "said": said,
        "violations": [one._asdict() for one in found],
    }
    print(json.dumps(seen), flush=True)
    return seen


def _ms(waits: dict[str, list[Wait]]) -> dict[str, list[float]]:
    return {name: [one.waited_s * 1e3 for one in of_one] for name, of_one in waits.items()}


async def apart(cuts: int) -> dict[str, Any]:
    """Three checkpoints at once that know nothing of each other."""
    rows = []
    async with a_world() as (made, _, witness):
        for number in range(cuts):
            points = await asyncio.gather(
                *(
                    asyncio.to_thread(
                        made.ok, "checkpoint", "create", vm, "--name", f"{vm}-{number}"
                    )
                    for vm in HOMES
                )
            )
            found, _ = witness.violations({one["vm"]: one["id"] for one in points})
            rows.append({"violations": [one._asdict() for one in found]})
            print(json.dumps(rows[-1]), flush=True)
    return {"cuts": rows}


async def restored(times: int) -> dict[str, Any]:
    """Back to a cut, all together; each time the guests' connections have to go on."""
    took = []
    async with a_world() as (made, every, witness):
        for number in range(times):
            words = ("--group", ",".join(HOMES), "--name", f"cut-{number}")
            done = await asyncio.to_thread(made.ok, "checkpoint", "create", *words)
            found, _ = witness.violations({vm: one["id"] for vm, one in done["members"].items()})
            began_s = time.monotonic()
            back = ("checkpoint", "restore", "--group", f"cut-{number}", "--in-place")
            await asyncio.to_thread(made.ok, *back)
            took.append({"took_s": time.monotonic() - began_s, "violations": len(found)})
            for guest in every:
                await goes_on(made, guest)
                while (  # noqa: ASYNC110 - nobody tells
                    await asyncio.to_thread(made.ok, "vm", "show", guest.name)
                )["operation"]:
                    await asyncio.sleep(0.2)
            print(json.dumps(took[-1]), flush=True)
    return {"times": took}


async def goes_on(made: World, guest: LabGuest) -> None:
    """It hears the others again, over the connections that it had, and all of it in order."""
    control = await guest.control(made.lab)
    before = await control.talk()
    given_up_s = time.monotonic() + PATIENCE_S
    while (now := await control.talk()).tcp_heard < before.tcp_heard + 4 * RATE:
        if time.monotonic() > given_up_s:
            raise SystemExit(f"{guest.name} hears nothing any more: {now}")
        await asyncio.sleep(0.1)
    if now.wrong:
        raise SystemExit(f"{guest.name}: numbers over TCP were lost or doubled: {now}")
    await control.close()


def verdicts(found: dict[str, Any]) -> list[Verdict]:
    judged = []
    cuts = found.get("together", {}).get("cuts", [])
    had = [one for one in cuts if "said" in one]
    if had:
        wrong = sum(bool(one["violations"]) for one in had)
        judged += [
            Verdict("cuts that are not consistent", wrong, 0),
            Verdict("cuts given up", len(cuts) - len(had), 0),
            Verdict("pause at the cut, longest, ms", _most(had, "cut_pause_ms"), 15.0),
            Verdict("pause at the cut, median, ms", _median(had, "cut_pause_ms"), 15.0),
            Verdict("pause at the cut, p99, ms", _percentile(had, "cut_pause_ms", 99), 15.0),
            Verdict("longest pause of a checkpoint, ms", _most(had, "longest_pause_ms"), 15.0),
            Verdict("TCP stall, p99, ms", _percentile(had, "stall_ms", 99), 60.0),
        ]
    return judged


def _most(rows: list[dict[str, Any]], name: str) -> float:
    return max(float(value) for one in rows for value in one[name])


def _median(rows: list[dict[str, Any]], name: str) -> float:
    return _percentile(rows, name, 50)


def _percentile(rows: list[dict[str, Any]], name: str, percent: float) -> float:
    return float(np.percentile([value for one in rows for value in one[name]], percent))


PARTS: dict[str, tuple[Callable[[int], Coroutine[Any, Any, dict[str, Any]]], int]] = {
    "together": (together, 100),
    "apart": (apart, 10),
    "restored": (restored, 5),
}


async def measured(part: str, cuts: int | None, *, more: bool) -> Found:
    """One part; with `more` its cuts are added to those of before."""
    work, usual = PARTS[part]
    seen = await work(cuts or usual)
    if more and (before := measured_before("group").get(part)):
        for name in {"pieces", "cuts"} & seen.keys():
            seen[name] = before[name] + seen[name]
    return seen


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="cuts through groups, measured")
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[])
    parser.add_argument("--cuts", type=int, help="how many, instead of the usual number")
    parser.add_argument("--more", action="store_true", help="add to what was measured before")
    given = parser.parse_args()
    chosen = {
        part: partial(measured, part, given.cuts, more=given.more) for part in given.parts or PARTS
    }
    measure("group", chosen, verdicts, draw, PATIENCE_S)
