"""Every fault in every phase of a domain's migration: it is whole in one place, or honestly lost.

The moments are libvirt's own: what the source's libvirtd logs of its QEMU.
"""

import asyncio
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.outcomes import Outcomes
from tests.qemu.world import qemu, send
from tests.real.domains import (
    GUEST,
    HOSTS,
    OWN_DISK,
    libvirtds,
    log,
    qemus,
    remove_domain,
    row,
    run_domain,
    secure,
    start_libvirtd,
    states,
    stop_libvirtd,
)
from tests.real.machines import Machines, machines
from vmckpt.lab.network import set_link, shape_link
from vmckpt.lab.real.management import set_operator_link

WORDS = {
    "precopy": ["--method", "precopy", "--bandwidth", "40MiB/s"],
    "postcopy": ["--method", "postcopy"],
    "copy": ["--method", "precopy", "--bandwidth", "30MiB/s"],  # its disk moves too
}
PHASES = {
    "precopy": ("prepare", "transfer", "switchover", "release"),
    "postcopy": ("drain",),
    "copy": ("prepare", "mirror", "switchover"),
}
# By what the source's libvirtd logs; `prepare` begins with vmckpt's own journal.
MARKS = {
    "mirror": b'"execute":"blockdev-mirror"',
    "transfer": b'"event": "MIGRATION", "data": {"status": "active"}',
    "switchover": b'"event": "STOP"',
    "drain": b'"event": "MIGRATION", "data": {"status": "postcopy-active"}',
    "release": b'"event": "MIGRATION", "data": {"status": "completed"}',
}
LASTING = {"prepare": 1.0, "mirror": 0.5, "transfer": 1.5, "drain": 0.5}  # seconds
KILLED = ("kill the source", "kill the target")
# Index of the end whose libvirtd dies, and is started again as a supervisor does.
RESTARTED = {"restart the source's libvirtd": 0, "restart the target's libvirtd": 1}
CUT_S = {"cut the link 5 s": 5.0, "silence the link 40 s": 40.0}
AWAY, AWAY_S = "cut the operator off 20 s", 20.0
FAULTS = ("kill the command", *KILLED, *RESTARTED, *CUT_S, AWAY)
RESTART_S = 1.0
# So that fetching the rest takes seconds: libvirt's limit does not hold in post-copy.
NARROW_BYTES_PER_S = 20_000_000
SETTLED_S = 120.0
LOCKED = "cannot acquire state change lock"
MATRIX = Outcomes()


@dataclass(frozen=True, slots=True)
class Case:
    method: str
    phase: str
    fault: str

    def __str__(self) -> str:
        return f"{self.method}, {self.phase}, {self.fault}"


CASES = [
    Case(method, phase, fault)
    for method, phases in PHASES.items()
    for phase in phases
    for fault in FAULTS
]


@pytest.fixture(scope="module")
def made() -> Iterator[Machines]:
    title = "faults of domains, by method"
    with machines([qemu("10.0")] * 2) as one, MATRIX.printed(title):
        secure(one)
        yield one


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fault(made: Machines, case: Case) -> None:
    disk = OWN_DISK if case.method == "copy" else made.shared / "dom.qcow2"
    if "running" not in states(made).values() or row(made)["disks"] != [str(disk)]:
        remove_domain(made)
        run_domain(made, "lab-a", disk=disk)
    try:
        asyncio.run(run_case(made, case))
    except BaseException:
        remove_domain(made)  # what is left of it is not the next case's
        raise


async def run_case(made: Machines, case: Case) -> None:
    control = await GUEST.control(made.lab)
    try:
        await control.load_memory("rate=10M set=48M pattern=uniform content=random")
        await control.load_disk("rate=2M size=32M")
        home = str((await asyncio.to_thread(row, made))["host"])
        away = next(host for host in HOSTS if host != home)
        boot = (await control.stat()).boot
        went = await struck(made, case, (home, away))
        if went is not None:
            assert (await control.stat()).boot == boot  # the same guest, not one that booted again
            memory, disk = await control.verify_memory(), await control.verify_disk()
            assert memory.sound, memory
            assert disk.sound, disk
    finally:
        await control.close()
    what = "honestly lost" if went is None else f"runs at the {went}, whole"
    MATRIX.add(case.method, case.fault, what)


async def struck(made: Machines, case: Case, ends: tuple[str, str]) -> str | None:
    """Migrate, with the fault in its phase; see `settled`."""
    home, away = ends
    await shape_link(made.lab, "lab-b", NARROW_BYTES_PER_S if case.phase == "drain" else None)
    logged = log(made, home).stat().st_size
    command = made.begin("migrate", GUEST.name, away, *WORDS[case.method])
    try:
        await reach(made, case.phase, home, logged, command)
        await asyncio.sleep(random.uniform(0.0, LASTING.get(case.phase, 0.0)))
        await inject(made, case.fault, command, ends)
        out, err = await asyncio.to_thread(command.communicate, timeout=200)
    finally:
        made.kill(command)
        await shape_link(made.lab, "lab-b", None)
    assert "Traceback" not in err, err
    # A migration that is refused reaches no phase.
    assert command.returncode != 4, out + err
    said = out + err
    return await asyncio.to_thread(settled, made, case, ends, command.returncode, said)


async def reach(
    made: Machines, phase: str, home: str, logged: int, command: "subprocess.Popen[str]"
) -> None:
    """Return when the migration has come to a phase."""
    journal = made.state_dir / "domains" / f"{GUEST.name}.json"

    def reached() -> bool:
        if phase == "prepare":
            return journal.exists()
        with log(made, home).open("rb") as file:
            file.seek(logged)
            return MARKS[phase] in file.read()

    while not reached():
        assert command.poll() is None, f"it ended before it came to {phase}"
        await asyncio.sleep(0.002)


async def inject(
    made: Machines, fault: str, command: "subprocess.Popen[str]", ends: tuple[str, str]
) -> None:
    if fault == "kill the command":
        made.kill(command)
    elif fault in KILLED:
        send(signal.SIGKILL, qemus(made, ends[KILLED.index(fault)]))
    elif fault in RESTARTED:
        host = ends[RESTARTED[fault]]
        send(signal.SIGKILL, libvirtds(made, host))
        await asyncio.sleep(RESTART_S)
        await asyncio.to_thread(start_libvirtd, made, host)
    elif fault == AWAY:
        await set_operator_link(made.lab, up=False)
        await asyncio.sleep(AWAY_S)
        await set_operator_link(made.lab, up=True)
    else:
        await set_link(made.lab, "lab-b", up=False)
        await asyncio.sleep(CUT_S[fault])
        await set_link(made.lab, "lab-b", up=True)


def settled(made: Machines, case: Case, ends: tuple[str, str], code: int, said: str) -> str | None:
    """The end at which the domain runs, by vmckpt's word, libvirt's and the processes'.

    None when it is honestly lost. Nothing else is left.
    """
    deadline = time.monotonic() + SETTLED_S
    while (shown := made.vmckpt("vm", "show", GUEST.name)).code:
        # 10: the guest is lost, and the next look finds it stopped.
        assert shown.code in (5, 9, 10), shown.stderr
        assert time.monotonic() < deadline, shown.stderr
        time.sleep(0.5)
    home, away = ends
    if LOCKED in said and journals(made):
        # libvirtd 11.3 keeps a domain locked whose QEMU died while it gave the post-copy up.
        assert (case.phase, case.fault, shown.result["host"]) == ("drain", "kill the source", away)
        stop_libvirtd(made, home, "KILL")
        start_libvirtd(made, home)
        shown = made.vmckpt("vm", "show", GUEST.name)
    state, host = shown.result["state"], shown.result["host"]
    other = away if host == home else home
    assert states(made) == {host: "running" if state == "running" else "shut off"}, said
    assert [len(qemus(made, each)) for each in (host, other)] == [state == "running", 0]
    assert journals(made) == []
    assert made.files(home) == made.files(away) == []
    for each in (host, other):
        there = made.here(each, OWN_DISK)
        assert there.exists() is (case.method == "copy" and each == host), each
    if state == "stopped":
        assert may_lose(case), f"lost without a killed QEMU: {said}"
        return None
    assert state == "running", shown.result
    assert code in ((0, 9, -signal.SIGKILL) if host == away else (6, 7, 9, -signal.SIGKILL)), said
    if case.fault == AWAY and case.phase != "prepare":
        assert (code, host) == (0, away), said  # the hosts do not wait for whoever watches
        assert made.ok("runs", "list")["runs"][-1]["outcome"] == "completed"
    return "target" if host == away else "source"


def journals(made: Machines) -> list[Path]:
    """Of migrations that are not tidied up after."""
    return list((made.state_dir / "domains").rglob("*.json"))


def may_lose(case: Case) -> bool:
    """Whether nothing but the fault is to blame for a guest that is gone.

    A target's libvirtd that dies in post-copy before it was told to let the guest run ends its QEMU
    when it is started again, by itself: it takes the migration for one that had not begun.
    """
    in_postcopy = case.phase == "drain" and RESTARTED.get(case.fault) == 1
    return case.fault in KILLED or in_postcopy
