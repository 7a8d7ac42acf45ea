"""Every step of every method x every fault: the guest is in one place, whole, or honestly lost.

A random sample runs by default, on the lab's hosts and a part of it on hosts that look like
machines; `make faults` (--long) runs all of it on both and prints the matrix with counts.
"""

import asyncio
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.kinds import EVERY_KIND, spoilable_hosts
from tests.outcomes import Outcomes
from tests.qemu.world import World, fill, image, reach, send
from vmckpt.hosts.processes.process import ProcessId
from vmckpt.lab.guests.guest import GuestControl
from vmckpt.lab.guests.labguest import LabGuest
from vmckpt.lab.network import set_link

WORDS = {
    "auto": [],  # over several channels
    "precopy": ["--method", "precopy"],
    "postcopy": ["--method", "postcopy"],
    "hybrid": ["--method", "hybrid"],
    "stop": ["--method", "stop"],
    "copy": ["--method", "precopy", "--disks", "copy"],  # a local disk moves too
    "encrypted": ["--method", "precopy", "--tls", "psk"],
}
# Hybrid comes to post-copy only when the guest dirties more than the link takes.
LOADS = {"hybrid": "rate=100M set=96M pattern=uniform content=random"}
LOAD = "rate=20M set=64M pattern=uniform content=random"
STEPS = ("prepare", "agree", "mirror", "transfer", "switchover", "drain", "verify", "handover",
         "release")  # fmt: skip
# What only some methods do.
ONLY = {
    "agree": ("encrypted",),
    "mirror": ("copy",),
    "drain": ("postcopy", "hybrid"),
    "stop": ("stop",),
    "migrate-start-postcopy": ("postcopy", "hybrid"),
    "nbd-server-start": ("copy",),
    "blockdev-mirror": ("copy",),
    "migrate-continue": ("copy",),
    "nbd-server-stop": ("copy",),
}
FAULTS = ("kill the command", "kill the source", "kill the target", "stop the target 5 s",
          "cut the link 5 s")  # fmt: skip
# Commands of the operator's monitors, by what they would stop.
SPOILT = ("query-status", "migrate-set-capabilities", "migrate-set-parameters", "migrate-incoming",
          "migrate", "query-migrate", "cont", "qom-get", "announce-self", "stop",
          "migrate-start-postcopy", "nbd-server-start", "blockdev-mirror", "migrate-continue",
          "nbd-server-stop")  # fmt: skip
FULL, EXISTS = "the target's disk is full", "the target's file exists"
DISK_BYTES = 96 << 20
# How many run every time, and of those, how many on hosts that look like machines too.
SAMPLE, SAMPLE_ON_MACHINES = 8, 2
SEED = 20261121
MATRIX = Outcomes()


@dataclass(frozen=True, slots=True)
class Case:
    method: str
    step: str
    fault: str

    def __str__(self) -> str:
        return f"{self.method}, {self.step}, {self.fault}"


@dataclass(frozen=True, slots=True)
class Start:
    """Where the guest was, and which one it was: another boot has another word."""

    home: str
    boot: str


def cases(method: str) -> Iterator[Case]:
    for step in STEPS:
        if method in ONLY.get(step, WORDS):
            yield from (Case(method, step, fault) for fault in FAULTS)
    for command in SPOILT:
        if method in ONLY.get(command, WORDS):
            yield from (Case(method, command, do) for do in ("error", "silent"))
    if method == "copy":
        yield from (Case(method, "mirror", FULL), Case(method, "begin", EXISTS))


ALL = [case for method in WORDS for case in cases(method)]


def marked() -> Iterator[Any]:
    """All cases, those outside the sample as long ones."""
    sample = random.Random(SEED).sample(ALL, SAMPLE)
    for case in ALL:
        marks = [] if case in sample else [pytest.mark.long]
        if case in sample[:SAMPLE_ON_MACHINES]:
            marks = [pytest.mark.sample]
        yield pytest.param(case, marks=marks, id=str(case))


@pytest.fixture(scope="module", params=EVERY_KIND)
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    title = f"faults on {request.param} hosts, by method"
    with spoilable_hosts(request.param, tmp_path_factory.mktemp("q")) as one, MATRIX.printed(title):
        yield one


@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", list(marked()))
def test_fault(made: World, case: Case) -> None:
    home = at_home(made, guest(case))
    asyncio.run(run_case(made, case, home))


def guest(case: Case) -> LabGuest:
    if case.method == "copy":
        return LabGuest("copier", 2, image(), disk="64M")
    return LabGuest("mover", 1, image())


def at_home(made: World, wanted: LabGuest) -> str:
    """Only the wanted guest runs; started again when the last case lost it. Where it is."""
    for vm in made.ok("vm", "list")["vms"]:
        if (vm["name"], vm["state"]) == (wanted.name, "running"):
            return str(vm["host"])
        made.vmckpt("vm", "stop", vm["name"], "--force")
        for disk in made.ok("vm", "rm", vm["name"])["disks"]:
            made.here(vm["host"], Path(disk)).unlink()
    made.run_guest(wanted, "lab-a", own_disk=wanted.name == "copier")
    return "lab-a"


async def run_case(made: World, case: Case, home: str) -> None:
    control = await guest(case).control(made.lab)
    try:
        await control.load_memory(LOADS.get(case.method, LOAD))
        await control.load_disk("rate=2M size=32M")
        start = Start(home, (await control.stat()).boot)
        said = await struck(made, case, home)
        await judge(made, case, control, start, said)
    finally:
        await control.close()


async def struck(made: World, case: Case, home: str) -> str:
    """Migrate, with the fault in its step; what the command said."""
    one = guest(case)
    away = "lab-b" if home == "lab-a" else "lab-a"
    spoils = case.fault in ("error", "silent")
    rule = {"command": case.step, "do": case.fault} if spoils else None
    with made.spoilt(home, rule), made_unfit(made, away, case.fault):
        before = made.qemus(one.name)
        command = made.begin("migrate", one.name, away, *WORDS[case.method], "--bandwidth", "80MB")
        try:
            if case.fault in (*FAULTS, FULL):
                await reach(made, case.step, command, home, one.name)
                if case.step in ("transfer", "mirror") and case.fault != FULL:
                    await asyncio.sleep(random.uniform(0.0, 1.5))
                await inject(made, case, command, before, images(made, away))
            out, err = await asyncio.to_thread(command.communicate, timeout=200)
        finally:
            made.kill(command)
    assert "Traceback" not in err, err
    # A migration that is refused reaches no step.
    assert not (command.returncode == 4 and case.fault in FAULTS), out + err
    if case.fault in (FULL, EXISTS):
        assert command.returncode == (7 if case.fault == FULL else 4), out + err
    return out + err


def images(made: World, host: str) -> Path:
    """Where a host has the disks of its own."""
    return made.state(host) / "images"


@contextmanager
def made_unfit(made: World, host: str, fault: str) -> Iterator[None]:
    """A host's directory for copied disks with a file in the way, or on a small file system."""
    directory = images(made, host)
    directory.mkdir(mode=0o700, exist_ok=True)
    if fault == EXISTS:
        theirs = directory / "copier.qcow2"
        theirs.write_text("somebody's")
        yield
        assert theirs.read_text() == "somebody's"
        theirs.unlink()
    elif fault == FULL:
        with made.small(host, "images", DISK_BYTES):
            yield
            assert [path.name for path in directory.iterdir()] == ["filler"]
    else:
        yield


async def inject(
    made: World,
    case: Case,
    command: "subprocess.Popen[str]",
    before: list[ProcessId],
    images: Path,
) -> None:
    targets = [one for one in made.qemus(guest(case).name) if one not in before]
    match case.fault:
        case "kill the command":
            made.kill(command)
        case "kill the source":
            send(signal.SIGKILL, before)
        case "kill the target":
            send(signal.SIGKILL, targets)
        case "stop the target 5 s":
            send(signal.SIGSTOP, targets)
            await asyncio.sleep(5)
            send(signal.SIGCONT, targets)
        case "cut the link 5 s":
            await set_link(made.lab, "lab-b", up=False)
            await asyncio.sleep(5)
            await set_link(made.lab, "lab-b", up=True)
        case _:
            fill(images / "filler")


async def judge(made: World, case: Case, control: GuestControl, start: Start, said: str) -> None:
    name, deadline = guest(case).name, time.monotonic() + 60
    while (shown := await asyncio.to_thread(made.vmckpt, "vm", "show", name)).code:
        # 10: the guest is lost, and the next look finds it stopped.
        assert shown.code in (5, 9, 10), shown.stderr
        assert time.monotonic() < deadline, shown.stderr
        await asyncio.sleep(0.5)
    state, host = shown.result["state"], shown.result["host"]
    other = "lab-b" if host == "lab-a" else "lab-a"
    assert made.files(other) == []
    disks = [path.name for path in images(made, other).iterdir()] if name == "copier" else []
    assert disks == [], f"left on {other}"
    running = made.pids(name)
    if state == "stopped":
        killed = case.fault in ("kill the source", "kill the target")
        assert killed, f"lost without a killed QEMU: {said}"
        assert running == []
        MATRIX.add(case.method, case.fault, "honestly lost")
        return
    assert state == "running"
    assert running == [shown.result["pid"]]
    assert (await control.stat()).boot == start.boot
    memory, disk = await control.verify_memory(), await control.verify_disk()
    assert memory.sound, memory
    assert disk.sound, disk
    went = "at the source" if host == start.home else "at the target"
    MATRIX.add(case.method, case.fault, f"runs {went}, whole")
