"""Failovers by kill -9 at random moments, under a client that checks every answer.

Run: python -m benchmarks.replication_kills [--count 200] [--minutes 4] [--quiet]. The guest goes to
and fro. What dies is chosen by chance: the primary's QEMU and service together, or one of them.
Each kill is kept in results/replication_kills.json as it happens, so that it may be run in pieces;
those with --quiet were alone on the machine, and only their times count, of the last commit that
was run so.

The time from the kill to the client's next answer has four parts: until the standby notices (the
kernel frees a dead process's memory before it closes its sockets), until the term is held and the
primary certainly dead, until the guest runs, and until an answer comes: what was on its way is sent
again by TCP, after 200 ms at the least.
"""

import argparse
import asyncio
import json
import random
import signal
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from benchmarks.setting import RESULTS, machine, write_result
from tests.qemu.world import World, image, qemu, send, world
from vmckpt.errors import VmckptError
from vmckpt.hosts.processes.process import find_by_argument
from vmckpt.lab.guests.guest import KvClient
from vmckpt.lab.guests.labguest import LabGuest
from vmckpt.lease.clock import boottime_s
from vmckpt.replicate.control import ask
from vmckpt.replicate.operator.sides import last_status
from vmckpt.replicate.operator.stop import stop
from vmckpt.replicate.request import ServiceFiles
from vmckpt.replicate.status import PROMOTED, PROTECTED, ReplicaStatus

NAME = "bench"
LONGEST_WAIT_S, ANSWER_S, POLL_S = 1.5, 60.0, 0.05
LOAD = "rate=20M set=64M pattern=uniform content=text touch=line"
# Together: as when a host dies.
TOGETHER = "QEMU and service"
KINDS = (TOGETHER, TOGETHER, "QEMU", "service")
PARTS = ("noticed", "fenced", "resumed", "answered")


def failovers() -> dict[str, Any]:
    """What was found so far: how many kills, how many lost an answer; times of those alone."""
    kept = _kept()
    quiet = _timed(kept)
    return {
        "count": len(kept),
        "lost": sum(bool(one["lost"]) for one in kept),
        "to_first_answer_ms": sorted(one["to_answer_ms"] for one in quiet),
        "took_over_ms": sorted(one["parts_ms"]["resumed"] for one in quiet),
    }


def _kept() -> list[dict[str, Any]]:
    path = RESULTS / "replication_kills.json"
    found: list[dict[str, Any]] = json.loads(path.read_text())["kills"] if path.exists() else []
    return found


def _timed(kept: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    quiet = [one for one in kept if one["quiet"] and not one["lost"]]
    return [one for one in quiet if one.get("commit") == quiet[-1].get("commit")]


def main(count: int, minutes: float, *, quiet: bool) -> None:
    """So many kills in all, or as many of them as fit the time; written as they happen."""
    kept, here = _kept(), machine()  # before what is written makes it another commit
    deadline_s = time.monotonic() + 60 * minutes
    with world(qemu("10.0"), qemu("10.0")) as made:
        guest = LabGuest(NAME, 1, image(), disk=None)
        made.run_guest(guest, "lab-a")
        asyncio.run(
            kills(made, guest, kept, count=count, deadline_s=deadline_s, here=here, quiet=quiet)
        )
    found = {"machine": here, **summary(kept), "kills": kept}
    write_result("replication_kills", found)
    print(json.dumps(summary(kept), indent=1))


async def kills(
    made: World,
    guest: LabGuest,
    kept: list[dict[str, Any]],
    *,
    count: int,
    deadline_s: float,
    here: dict[str, Any],
    quiet: bool,
) -> None:
    """Failovers there and back until `kept` has `count`, or the time is over."""
    control = await guest.control(made.lab)
    await control.load_memory(LOAD)
    home, standby = "lab-a", "lab-b"
    while len(kept) < count and time.monotonic() < deadline_s:
        chance = random.Random()
        kind = chance.choice(KINDS)
        await _protect(made, guest.name, standby)
        client = await guest.key_value(made.lab)
        checking = Checking(client, f"kill{len(kept)}-{random.getrandbits(32)}")
        await asyncio.sleep(chance.uniform(0.3, LONGEST_WAIT_S))
        await _require_protected(made, home, guest.name)
        await asyncio.sleep(chance.uniform(0.0, 0.1))
        killed_s = _kill(made, home, guest.name, kind)
        status = await _promoted(made, standby, guest.name)
        lost, answered_s = "", takeover(status)[-1]
        try:
            answered_s = await checking.first_answer(answered_s)
        except (VmckptError, AssertionError, TimeoutError) as exc:
            lost = f"{type(exc).__name__}: {exc}"
        lost = lost or await checking.end()
        memory = await control.verify_memory()
        one = {
            "kind": kind,
            "lost": lost or ("" if memory.sound else f"memory: {memory}"),
            "quiet": quiet,
            "commit": here["commit"],
            "to_answer_ms": round((answered_s - killed_s) * 1e3, 2),
            "parts_ms": parts(status, killed_s, answered_s),
        }
        kept.append(one)
        print(len(kept), json.dumps(one), flush=True)
        write_result("replication_kills", {"machine": here, **summary(kept), "kills": kept})
        await stop(guest.name, [made.asked(home), made.asked(standby)])
        home, standby = standby, home
    await control.close()


async def _protect(made: World, name: str, standby: str) -> None:
    """On a machine that others keep busy a standby may be silent for too long as it begins."""
    while (done := await asyncio.to_thread(made.vmckpt, "replicate", "start", name, standby)).code:
        print(f"not protected yet: {done.stderr}", flush=True)
        if "the standby is silent" not in done.stderr:
            raise AssertionError(done.stderr)


def takeover(status: ReplicaStatus) -> tuple[float, float, float]:
    """When the primary's end was noticed, when it was certainly dead, when the guest ran again.

    Answers that come before the last were on their way at the kill.
    """
    noticed_s, fencing_ms = status.noticed_boottime_s, status.fencing_ms
    if noticed_s is None or fencing_ms is None or status.took_over_ms is None:
        raise SystemExit(f"the standby does not say how long it took: {status}")
    fenced_s = noticed_s + fencing_ms / 1e3
    return noticed_s, fenced_s, fenced_s + status.took_over_ms / 1e3


def parts(status: ReplicaStatus, killed_s: float, answered_s: float) -> dict[str, float]:
    """What the time from the kill to the answer went into; they add up to it."""
    ends = [*takeover(status), answered_s]
    begins = [killed_s, *ends[:-1]]
    return {
        part: round((end - begin) * 1e3, 2)
        for part, begin, end in zip(PARTS, begins, ends, strict=True)
    }


def summary(kept: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """How many lost something, and the times of those that were measured alone."""
    everyone = list(kept)
    found: dict[str, Any] = {"count": len(everyone), "lost": sum(bool(k["lost"]) for k in everyone)}
    found["by_kind"] = {
        kind: sum(k["kind"] == kind for k in everyone) for kind in sorted(set(KINDS))
    }
    for kind in sorted(set(KINDS)):
        ours = [k for k in _timed(everyone) if k["kind"] == kind]
        if not ours:
            continue
        rows = {"to_answer": [k["to_answer_ms"] for k in ours]}
        rows |= {part: [k["parts_ms"][part] for k in ours] for part in PARTS}
        found[f"quiet, {kind}"] = {"count": len(ours)} | {
            f"{name}_ms": [round(quantile(values, q), 1) for q in (0.5, 0.99, 1.0)]
            for name, values in rows.items()
        }
    return found


def quantile(values: list[float], part: float) -> float:
    """The value below which that part of them lies, one that was measured."""
    return sorted(values)[min(len(values) - 1, int(part * len(values)))]


class Checking:
    """A client that counts, each answer one more than the last, over one connection.

    Times are CLOCK_BOOTTIME, as the services'.
    """

    def __init__(self, client: KvClient, key: str) -> None:
        self._client, self._key = client, key
        self._answered = asyncio.Condition()
        self._answers_s: list[float] = []
        self._task = asyncio.ensure_future(self._check())

    async def first_answer(self, after_s: float) -> float:
        """When the first answer after an instant came. Raises its error."""
        async with asyncio.timeout(ANSWER_S):
            while not self._answers_s or self._answers_s[-1] <= after_s:
                if self._task.done():
                    self._task.result()
                async with self._answered:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._answered.wait(), POLL_S)
        return next(at for at in self._answers_s if at > after_s)

    async def end(self) -> str:
        """Close the connection; what was wrong with an answer until now."""
        self._task.cancel()
        await asyncio.wait({self._task})
        await self._client.close()
        error = None if self._task.cancelled() else self._task.exception()
        return f"{type(error).__name__}: {error}" if error else ""

    async def _check(self) -> None:
        expected = 0
        while True:
            expected += 1
            assert await self._client.incr(self._key) == expected  # noqa: S101
            self._answers_s.append(boottime_s())
            async with self._answered:
                self._answered.notify_all()


def _kill(made: World, home: str, name: str, kind: str) -> float:
    current = made.state(home) / "vms" / name / "vm.json"
    qemus = [p for p in made.qemus(name) if p.pid == json.loads(current.read_text())["pid"]]
    services = find_by_argument(f"replica\0primary\0{made.state(home)}")
    killed_s = boottime_s()
    if kind != "QEMU":
        send(signal.SIGKILL, services)
    if kind != "service":
        send(signal.SIGKILL, qemus)
    return killed_s


async def _require_protected(made: World, home: str, name: str) -> None:
    """On a busy machine the standby may have been given up: then a kill is the guest's end."""
    host = made.asked(home)
    status = await ask(host, ServiceFiles.of(host, name), "status")
    if status.state != PROTECTED:
        raise SystemExit(f"it is not protected any more; begin anew: {status}")


async def _promoted(made: World, standby: str, name: str) -> ReplicaStatus:
    """The standby's last word. A command that asked would be in the way of what is measured."""
    host, given_up_s = made.asked(standby), time.monotonic() + ANSWER_S
    while True:
        status = await last_status(host, ServiceFiles.of(host, name))
        if status is not None and status.state == PROMOTED:
            return status
        if time.monotonic() > given_up_s:
            raise SystemExit(f"nobody has taken over: {status}")
        await asyncio.sleep(POLL_S)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--quiet", action="store_true")
    given = parser.parse_args()
    main(given.count, given.minutes, quiet=given.quiet)
