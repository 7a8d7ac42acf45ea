"""Cuts through guests that talk to each other: is each consistent, and what do they cost?

Run: make bench BENCH=group, or python -m benchmarks.group PART [--minutes N] for a piece of it.
Each cut is in results/group.json as it is made, and the next piece goes on until there are as many
as wanted, of one commit (`pieces.py`). All of them count for consistency; for times those of pieces
in which others used less than a tenth of the machine. Three guests of 96 MiB under TCG on two hosts
of the lab say 100 numbered messages a second to each other one, by UDP and TCP: 1,200 a second in
all.

- together: `checkpoint create --group`. Each cut is checked by the counts in the memory of its
  checkpoints; a client outside (`group_client.py`) asks each guest's TCP server all the time, one
  question after the other: the longest that it waits for an answer from 0.3 s before to 0.3 s
  after a cut is the stall. How long it waits before any cut is made, and the longest in all of the
  time that the command takes, are there for comparison. A pause is from where QEMU is told to stop
  to where it has said that the guest runs.
- apart: the same three at once, as three checkpoints without a group: what the check finds then.
- restored: a cut is gone back to, in place, as soon as it is made; the guests' connections go on.
"""

import argparse
import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import numpy as np

from benchmarks.group_client import Wait, Waits, client
from benchmarks.group_plot import draw
from benchmarks.parts import Found, conclude
from benchmarks.pieces import ALONE_PERCENT, Pieces, rows
from benchmarks.setting import await_quiet
from benchmarks.summary import Verdict
from tests.qemu.talking import Witness, guests, talking
from tests.qemu.world import World, qemu, world
from vmckpt.lab.guests.labguest import LabGuest

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


async def together(pieces: Pieces) -> None:
    async with a_world() as (made, _, witness):
        with client(made.state_dir, list(HOMES)) as waits, pieces.piece(str(made.state_dir)) as new:
            calm_unix_s = time.time()
            await asyncio.sleep(CALM_S)
            of_all = [one for of_one in _ms(waits.between(calm_unix_s, time.time())).values()
                      for one in of_one]  # fmt: skip
            calm = {f"p{p}": float(np.percentile(of_all, p)) for p in (50, 99, 100)}
            began_s, said = time.monotonic(), list[int]()
            while pieces.wants_more():
                began_unix_s = time.time()
                words = ("--group", ",".join(HOMES), "--name", f"cut-{pieces.count}")
                done = await asyncio.to_thread(made.vmckpt, "checkpoint", "create", *words)
                if done.code:
                    new.add({"given_up": done.result["error"]["why"]}, calm_ms=calm)
                    continue
                seen = row(done.result, waits, began_unix_s, witness)
                said.append(seen["said"])
                if len(said) == 1:
                    began_s = time.monotonic()
                rate = (said[-1] - said[0]) / max(time.monotonic() - began_s, 1e-9)
                new.add(seen, calm_ms=calm, messages_per_s=round(rate, 1))


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


async def apart(pieces: Pieces) -> None:
    """Three checkpoints at once that know nothing of each other."""
    async with a_world() as (made, _, witness):
        with pieces.piece(str(made.state_dir)) as new:
            while pieces.wants_more():
                points = await asyncio.gather(
                    *(
                        asyncio.to_thread(
                            made.ok, "checkpoint", "create", vm, "--name", f"{vm}-{pieces.count}"
                        )
                        for vm in HOMES
                    )
                )
                found, _ = witness.violations({one["vm"]: one["id"] for one in points})
                new.add(_shown({"violations": [one._asdict() for one in found]}))


async def restored(pieces: Pieces) -> None:
    """Back to a cut, all together; each time the guests' connections have to go on."""
    async with a_world() as (made, every, witness):
        with pieces.piece(str(made.state_dir)) as new:
            while pieces.wants_more():
                name = f"cut-{pieces.count}"
                words = ("--group", ",".join(HOMES), "--name", name)
                done = await asyncio.to_thread(made.ok, "checkpoint", "create", *words)
                points = {vm: one["id"] for vm, one in done["members"].items()}
                found, _ = witness.violations(points)
                began_s = time.monotonic()
                back = ("checkpoint", "restore", "--group", name, "--in-place")
                await asyncio.to_thread(made.ok, *back)
                took_s = time.monotonic() - began_s
                for guest in every:
                    await goes_on(made, guest)
                    await settled(made, guest)
                new.add(_shown({"took_s": took_s, "violations": [one._asdict() for one in found]}))


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    print(json.dumps(row), flush=True)
    return row


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


async def settled(made: World, guest: LabGuest) -> None:
    """Nothing is done to it any longer: all of its memory has come."""
    given_up_s = time.monotonic() + PATIENCE_S
    while (await asyncio.to_thread(made.ok, "vm", "show", guest.name))["operation"]:
        if time.monotonic() > given_up_s:
            raise SystemExit(f"{guest.name}'s restore does not come to its end")
        await asyncio.sleep(0.2)


def verdicts(found: Found) -> list[Verdict]:
    """What all cuts have to be, and how long things took in those that were alone here."""
    judged = []
    every = rows(found, "together")
    had = [one for one in every if "said" in one]
    if every:
        wrong = sum(bool(one["violations"]) for one in had)
        judged += [
            Verdict(f"cuts that are not consistent, of {len(every)}", wrong, 0),
            Verdict(f"cuts given up, of {len(every)}", len(every) - len(had), 0),
        ]
    if timed := [one for one in rows(found, "together", alone=True) if "said" in one]:
        of = f"of {len(timed)} cuts alone here"
        judged += [
            Verdict(f"pause at the cut, longest, ms, {of}", _most(timed, "cut_pause_ms"), 15.0),
            Verdict("pause at the cut, median, ms", _percentile(timed, "cut_pause_ms", 50), 15.0),
            Verdict("pause at the cut, p99, ms", _percentile(timed, "cut_pause_ms", 99), 15.0),
            Verdict("longest pause of a checkpoint, ms", _most(timed, "longest_pause_ms"), 15.0),
            Verdict("TCP stall, p99, ms", _percentile(timed, "stall_ms", 99), 60.0),
        ]
    if times := rows(found, "restored"):
        wrong = sum(bool(one["violations"]) for one in times)
        judged.append(Verdict(f"cuts gone back to, not consistent, of {len(times)}", wrong, 0))
    return judged


def _most(every: list[dict[str, Any]], name: str) -> float:
    return max(float(value) for one in every for value in one[name])


def _percentile(every: list[dict[str, Any]], name: str, percent: float) -> float:
    return float(np.percentile([value for one in every for value in one[name]], percent))


PARTS: dict[str, tuple[Callable[[Pieces], Coroutine[Any, Any, None]], int]] = {
    "together": (together, 100),
    "apart": (apart, 10),
    "restored": (restored, 5),
}


async def measured(part: str, count: int | None, minutes: float, *, again: bool) -> None:
    """As much of one part as fits the time, unless all of it is there.

    SIGTERM ends it like its time: what it has measured stays, and the lab goes.
    """
    work, usual = PARTS[part]
    if me := asyncio.current_task():
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, me.cancel)
    pieces = Pieces("group", part, goal=count or usual, minutes=minutes, again=again)
    if pieces.wants_more():
        await work(pieces)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="cuts through groups, measured")
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[])
    parser.add_argument("--cuts", type=int, help="how many in all, instead of the usual number")
    parser.add_argument("--minutes", type=float, default=600, help="begin no cut after so long")
    parser.add_argument("--again", action="store_true", help="forget the cuts so far")
    given = parser.parse_args()
    for chosen in given.parts or PARTS:
        asyncio.run(await_quiet(ALONE_PERCENT, PATIENCE_S))
        try:
            asyncio.run(measured(chosen, given.cuts, given.minutes, again=given.again))
        except asyncio.CancelledError:
            break
    conclude("group", verdicts, draw)
