"""Every fault at every step of a replication: no answer taken back, one guest, and a reason said.

A client counts in the guest over one TCP connection all the time and checks every answer. Each case
begins a protection, has something die, freeze or break, waits for what comes of it, and protects
the guest again from where it then is. A sample runs every time, all of it with --long, with counts.
The arbiter's faults are in tests/real/test_replication.py.
"""

import asyncio
import json
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from tests.counting import Counting
from tests.qemu.world import World, fill, image, qemu, world
from tests.waiting import eventually
from vmckpt.errors import HostDownError
from vmckpt.hosts.processes.process import find_by_argument
from vmckpt.lab.guests.guest import GuestControl
from vmckpt.lab.guests.labguest import LabGuest
from vmckpt.lab.network import set_link, shape_link
from vmckpt.lab.processes import run, tool
from vmckpt.lease.file_store import FileStore
from vmckpt.replicate.control import ask
from vmckpt.replicate.request import ServiceFiles

NAME, LOAD = "guest", "rate=10M set=32M pattern=uniform content=random"
FIRST, PROTECTED, HANDED_OVER = "first copy", "protected", "being handed over"
STEPS = (FIRST, PROTECTED)
VICTIMS = ("qemu", "primary", "standby", "waiting qemu", "guard", "both services", "all of primary")
# Longer than the lease (3 s) and the standby's patience with the primary (4 s).
FROZEN_S, CUT_S = 8.0, 8.0
# For longer than any command to QEMU waits (10 s), as one whose storage hangs.
LONG_FROZEN_S, HANGS = 14.0, "freeze for long"
# From the asking on, in which the last epoch, the term and the guest go over.
HANDING_OVER_S = 0.15
FLIPS = {f"what the {role} sends": role for role in ("primary", "standby")}
FLIPPING = Path(__file__).parents[1] / "flipping"
ARBITER = "arbiter"
NETWORK = ("cut", "cut to the standby", "cut to the primary", "slow", "very slow")
SLOW_BYTES_PER_S = {"slow": 4 << 20, "very slow": 256 << 10}
FULL, SMALL = "standby's disk full", ("vms", "replicas")
SETTLED_S = 90.0
# What a case may come to. A guest that died before anybody had its state is lost, and that is said.
ALONE, TOOK_OVER, GOES_ON, LOST = "alone", "took over", "goes on protected", "lost, unprotected"
SHUT_DOWN = "primary's host"
SAMPLE = (
    ("protected", "kill", "guard"),
    ("protected", "shut down", SHUT_DOWN),
)
SAMPLE_OF_PAIRS = (("guard", ARBITER), ("primary", "cut"))
MATRIX: Counter[tuple[str, str]] = Counter()
GAPS_MS: dict[str, list[float]] = {}


@dataclass(frozen=True, slots=True)
class Case:
    step: str
    does: str
    to: str
    also: "Case | None" = None

    def __str__(self) -> str:
        also = f" and {self.also.does} {self.also.to}" if self.also else ""
        return f"{self.does} {self.to}{also}, {self.step}"

    @property
    def faults(self) -> tuple["Case", ...]:
        """Those that happen at once; one that takes its time comes last."""
        return (self,) if self.also is None else (self, self.also)

    def kills(self, *victims: str) -> bool:
        return any(one.does == "kill" and one.to in victims for one in self.faults)


SINGLE = [
    *(Case(PROTECTED, does, to) for does in ("kill", "freeze") for to in VICTIMS[:5]),
    Case(PROTECTED, "take away", ARBITER),
    Case(PROTECTED, "link", "cut"),
]
PAIRS = [
    Case(PROTECTED, one.does, one.to, also=other)
    for one, other in combinations(SINGLE, 2)
    if one.to != other.to
]
ALL = [
    *(Case(step, does, to) for step in STEPS for does in ("kill", "freeze") for to in VICTIMS),
    *(Case(step, "link", to) for step in STEPS for to in NETWORK),
    *(Case(step, "disk", FULL) for step in STEPS),
    *(Case(step, "flip a bit of", to) for step in STEPS for to in FLIPS),
    *(Case(HANDED_OVER, does, to) for does in ("kill", "freeze") for to in VICTIMS),
    Case(HANDED_OVER, "link", "cut"),
    Case(PROTECTED, "disk", f"{FULL}, then kill all of primary"),
    *(Case(step, "shut down", SHUT_DOWN) for step in (*STEPS, HANDED_OVER)),
    *PAIRS,
    Case(PROTECTED, HANGS, "qemu", also=Case(PROTECTED, "kill", "standby")),
]


def marked() -> Iterator[Any]:
    for case in ALL:
        is_sample = (case.step, case.does, case.to) in SAMPLE and not case.also
        if case.also and case.does == "freeze":
            is_sample = (case.to, case.also.to) in SAMPLE_OF_PAIRS
        yield pytest.param(case, marks=[] if is_sample else [pytest.mark.long], id=str(case))


@pytest.fixture(scope="module")
def made() -> Iterator[World]:
    MATRIX.clear()
    GAPS_MS.clear()
    with world(qemu("10.0"), qemu("10.0")) as one, pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(FLIPPING))
        environment.setenv("VK_FLIP", str(one.state_dir))
        yield one
    print(f"\n{sum(MATRIX.values())} faults, and what came of them:")
    for (fault, outcome), count in sorted(MATRIX.items()):
        gaps = " ".join(f"{gap:.0f}" for gap in GAPS_MS[fault])
        print(f"  {count:3d}  {fault}: {outcome} (longest wait for an answer, ms: {gaps})")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", list(marked()))
def test_fault(made: World, case: Case) -> None:
    guest = LabGuest(NAME, 1, image(), memory="160M", disk=None)
    home = home_of(made, guest)
    away = "lab-b" if home == "lab-a" else "lab-a"
    try:
        with small(made, case, away):
            asyncio.run(run_case(made, guest, case, home, away))
    finally:
        made.vmckpt("replicate", "stop", NAME)


def home_of(made: World, guest: LabGuest) -> str:
    """Where the guest runs; started again when the last case lost it."""
    for vm in made.ok("vm", "list")["vms"]:
        if vm["state"] == "running":
            return str(vm["host"])
        made.ok("vm", "rm", vm["name"])
    made.run_guest(guest, "lab-a")
    return "lab-a"


async def run_case(made: World, guest: LabGuest, case: Case, home: str, away: str) -> None:
    control = await guest.control(made.lab)
    await control.load_memory(LOAD)
    client = await guest.key_value(made.lab)
    counting = Counting(client)
    try:
        outcome = await struck(made, case, home, away, counting)
        await judge(made, case, outcome, control, counting)
    finally:
        await counting.end()
        await control.close()
    if outcome != LOST:
        # Nothing stands in the way of the next protection.
        await asyncio.to_thread(made.vmckpt, "replicate", "stop", NAME)  # it may be over
        begun = await command(made, "replicate", "start", NAME, where(made, other=True))
        assert begun["state"] == "protected"


async def struck(made: World, case: Case, home: str, away: str, counting: Counting) -> str:
    """Protect it, with the fault in its step; what came of it."""
    starting = made.begin("replicate", "start", NAME, away)
    try:
        if case.step == FIRST:
            await copying(made, home)
        else:
            await asyncio.to_thread(starting.wait, 60)
            # Anywhere in an epoch.
            await asyncio.sleep(random.uniform(0.5, 0.6))
        if case.step == HANDED_OVER:
            handing = asyncio.ensure_future(hand_over(made, home))
            await asyncio.sleep(random.uniform(0.0, HANDING_OVER_S))
        async with AsyncExitStack() as stack:
            for fault in case.faults:
                await stack.enter_async_context(struck_by(made, fault, home, away))
            outcome = await settled(made, case, home)
        if case.does == "shut down" and case.step == PROTECTED:
            assert outcome == TOOK_OVER
        # One that the standby had by then is not protected any longer.
        assert outcome != LOST or case.step != HANDED_OVER or await has_term(made, away)
        if outcome != LOST:  # a guest that died gives no more answers
            await counting.more_than(counting.answers + 1)
    finally:
        if case.step == HANDED_OVER:
            await handing
        out, err = await asyncio.to_thread(starting.communicate, timeout=150)
    assert "Traceback" not in err, err
    assert case.step == FIRST or starting.returncode == 0, out + err
    return outcome


def at_home(made: World, host: str) -> bool:
    """Whether the guest has gone over to a host: from here on it runs there."""
    return (made.state(host) / "vms" / NAME / "vm.json").exists()


async def hand_over(made: World, home: str) -> None:
    """Ask for it as `replicate failover` does; a service that dies over it gives no answer."""
    host = made.asked(home)
    with suppress(HostDownError):
        await ask(host, ServiceFiles.of(host, NAME), "failover")


@asynccontextmanager
async def struck_by(made: World, case: Case, home: str, away: str) -> AsyncIterator[None]:
    """For the block, or once: the fault."""
    if case.does == "link":
        async with broken(made, case.to, home, away):
            yield
    elif case.to in FLIPS:
        asked = made.state_dir / FLIPS[case.to]
        asked.touch()
        yield
        assert not asked.exists(), "nothing was sent"
    elif case.does == "disk":
        for directory in SMALL:
            fill(made.state(away) / directory / "filled")
        if "then kill" in case.to:
            send(signal.SIGKILL, pids(made, "all of primary", home, away))
        else:
            await asyncio.sleep(2.0)
        yield
    elif case.to == ARBITER:
        with arbiter_away(made):
            yield
    elif case.does == "shut down":
        which = pids(made, case.to, home, away)
        random.shuffle(which)
        send(signal.SIGTERM, which)  # as a host's service manager does, to all at once
        yield
    else:
        which = pids(made, case.to, home, away)
        if case.step == HANDED_OVER and at_home(made, away):
            which = []  # too late: it is a guest like any other by now
        else:
            assert which or case.step == HANDED_OVER, f"there is no {case.to}"
        send(signal.SIGKILL if case.does == "kill" else signal.SIGSTOP, which)
        frozen_s = LONG_FROZEN_S if case.does == HANGS else FROZEN_S
        thaw = asyncio.get_running_loop().call_later(frozen_s, send, signal.SIGCONT, which)
        try:
            yield
        finally:
            thaw.cancel()
            send(signal.SIGCONT, which)


@contextmanager
def arbiter_away(made: World) -> Iterator[None]:
    """For CUT_S its directory is none, as when what it was mounted on has gone."""
    leases = made.state_dir / "leases"
    away = leases.with_name("leases-away")

    def come_back() -> None:
        if away.exists():
            leases.unlink()
            away.rename(leases)

    leases.rename(away)
    leases.touch()
    back = asyncio.get_running_loop().call_later(CUT_S, come_back)
    try:
        yield
    finally:
        back.cancel()
        come_back()


@asynccontextmanager
async def broken(made: World, how: str, home: str, away: str) -> AsyncIterator[None]:
    """A link that is cut, each way or one way, or slow, for CUT_S."""
    lab = made.lab
    if how == "cut":
        await set_link(lab, away, up=False)
    elif how in SLOW_BYTES_PER_S:
        await shape_link(lab, away, SLOW_BYTES_PER_S[how])
    else:
        # What leaves this host is dropped: no packet is so small.
        enter = lab.host(home if how == "cut to the standby" else away).enter
        drop = ["root", "tbf", "rate", "8bit", "burst", "1", "latency", "1ms"]
        await run([*enter, tool("tc"), "qdisc", "replace", "dev", "mig0", *drop], lab.directory)
    try:
        await asyncio.sleep(CUT_S)
        yield
    finally:
        await set_link(lab, away, up=True)
        for host in (home, away):
            await shape_link(lab, host, None)


@contextmanager
def small(made: World, case: Case, host: str) -> Iterator[None]:
    """For the block the disk of a host that is to be full is a small one; the guest leaves it."""
    if case.does != "disk":
        yield
        return
    with ExitStack() as stack:
        for directory in SMALL:
            (made.state(host) / directory).mkdir(mode=0o700, exist_ok=True)
            stack.enter_context(made.small(host, directory, 1 << 20))
        try:
            yield
        finally:
            for directory in SMALL:
                (made.state(host) / directory / "filled").unlink(missing_ok=True)
            made.vmckpt("replicate", "stop", NAME)
            if where(made) == host:
                made.ok("migrate", NAME, where(made, other=True))


def pids(made: World, victim: str, home: str, away: str) -> list[int]:
    def of(mark: str) -> list[int]:
        return [process.pid for process in find_by_argument(mark)]

    def qemus(host: str) -> list[int]:
        return of(f"-pidfile\0{made.state(host)}")

    roles = {role: of(f"replica\0{role}\0{made.state_dir}") for role in ("primary", "standby")}
    return {
        "qemu": qemus(home),
        "waiting qemu": qemus(away),
        **roles,
        "guard": of(f"guard.py\0{made.state(home)}"),
        SHUT_DOWN: [*qemus(home), *roles["primary"], *of(f"guard.py\0{made.state(home)}")],
        "both services": [*roles["standby"], *roles["primary"]],
        "all of primary": [*roles["primary"], *qemus(home)],
    }[victim]


def send(number: signal.Signals, which: list[int]) -> None:
    for pid in which:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


async def command(made: World, *words: str) -> dict[str, Any]:
    return await asyncio.to_thread(made.ok, *words)


async def copying(made: World, home: str) -> None:
    """Return when the primary's service has just begun its first copy."""
    ear = made.state(home) / "replicas" / NAME / "control.sock"
    async with asyncio.timeout(60):
        while not ear.exists():  # noqa: ASYNC110 - no one tells
            await asyncio.sleep(0.001)


async def settled(made: World, case: Case, home: str) -> str:
    """What came of it, when nothing is under way any longer; and that both sides say why."""
    loop = asyncio.get_running_loop()
    # What goes on did so for longer than anything may take to be found out.
    is_brief = all(one.does == "kill" for one in case.faults)
    goes_on_from_s = loop.time() + (3.0 if is_brief else FROZEN_S + 3.0)
    not_settled_s = loop.time() + SETTLED_S
    while True:
        done = await asyncio.to_thread(made.vmckpt, "replicate", "status", NAME)
        sides = {side["role"]: side for side in done.result.get("sides", [])}
        if loop.time() > not_settled_s:
            pytest.fail(f"not settled: {json.dumps(sides, indent=1)}")
        if outcome := outcome_of(made, sides):
            if outcome != GOES_ON:
                assert not sides or any(side["why"] for side in sides.values()), sides
                return outcome
            if loop.time() > goes_on_from_s:
                return outcome
        await asyncio.sleep(0.2)


def outcome_of(made: World, sides: dict[str, Any]) -> str | None:
    primary, standby = sides.get("primary", {}), sides.get("standby", {})
    lives = bool(find_by_argument(f"replica\0primary\0{made.state_dir}"))
    if standby.get("state") == "promoted":
        return TOOK_OVER
    if primary.get("state") == "ended" and not lives:
        if not made.qemus(NAME):
            return LOST
        return ALONE if "alone" in primary["why"] or "stopped" in primary["why"] else None
    if primary.get("state") == "protected" and primary.get("answers"):
        return GOES_ON
    if not sides and not lives:  # the beginning was undone
        return ALONE if made.qemus(NAME) else LOST
    return None


async def has_term(made: World, host: str) -> bool:
    found = await FileStore(made.state_dir / "leases").read(NAME)
    return found is not None and found.record.holder.startswith(f"{host}/")


async def judge(
    made: World, case: Case, outcome: str, control: GuestControl, counting: Counting
) -> None:
    """It is as the case allows, and the guest lost nothing."""
    guest_died = case.does == "shut down" or case.kills("qemu", "all of primary")
    # Two faults may take both copies; a QEMU that is paused cannot go on with the guest.
    both_died = case.kills("qemu") and any(
        (one.does, one.to) != ("freeze", "standby") and one.to in ("standby", "waiting qemu")
        for one in case.faults
    )
    may_be_lost = (case.step == FIRST and guest_died) or both_died
    assert outcome != LOST or may_be_lost or case.step == HANDED_OVER, outcome
    MATRIX[(str(case), outcome)] += 1
    GAPS_MS.setdefault(str(case), []).append(counting.longest_ms)
    if outcome == LOST:
        return
    memory = await control.verify_memory()
    assert memory.sound, memory
    await counting.more_than(counting.answers)
    where(made)


def running(made: World) -> list[str]:
    """The hosts where a guest runs at this moment."""
    return [vm["host"] for vm in made.ok("vm", "list")["vms"] if vm["state"] == "running"]


def where(made: World, *, other: bool = False) -> str:
    """The one host where the guest runs; or the other one."""
    found = list[str]()

    def is_one() -> bool:
        found[:] = running(made)
        return len(found) == 1

    # In an epoch's pause it is seen as paused.
    eventually(is_one, 10, "one guest, running")
    (host,) = found
    return {"lab-a": "lab-b", "lab-b": "lab-a"}[host] if other else host
