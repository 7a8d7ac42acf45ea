"""Every step of every method x every fault: the guest is in one place, whole, or honestly lost.

A bounded random sample runs by default; VMCKPT_FAULTS=all (`make faults`) runs all of it and
prints the matrix with counts.
"""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.qemu.world import World, image, kill, qemu, world
from vmckpt.hosts.process import ProcessId
from vmckpt.lab.guest import GuestControl
from vmckpt.lab.labguest import LabGuest
from vmckpt.lab.network import set_link

METHODS = ("precopy", "postcopy", "stop")
STEPS = ("prepare", "agree", "transfer", "switchover", "drain", "verify", "handover", "release")
FAULTS = ("kill the command", "kill the source", "kill the target", "stop the target 5 s",
          "cut the link 5 s")  # fmt: skip
# Commands of the operator's monitors, by what they would stop.
SPOILT = ("query-status", "migrate-set-capabilities", "migrate-set-parameters", "migrate-incoming",
          "migrate", "query-migrate", "cont", "qom-get", "announce-self", "stop",
          "migrate-start-postcopy")  # fmt: skip
SAMPLE = 8
SEED = int(os.environ.get("VMCKPT_FAULT_SEED", "20261121"))
MATRIX: Counter[tuple[str, str]] = Counter()


@dataclass(frozen=True, slots=True)
class Case:
    method: str
    step: str
    fault: str

    def __str__(self) -> str:
        return f"{self.method}, {self.step}, {self.fault}"


ALL = [
    *(Case(method, step, fault) for method in METHODS for step in STEPS for fault in FAULTS),
    *(Case(m, command, do) for m in METHODS for command in SPOILT for do in ("error", "silent")),
]


def chosen() -> list[Case]:
    if os.environ.get("VMCKPT_FAULTS") == "all":
        return ALL
    return random.Random(SEED).sample(ALL, SAMPLE)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    wrapper = tmp_path_factory.mktemp("q") / "qemu-system-x86_64"
    rules = wrapper.with_name("rules.json")
    real = qemu("10.0")
    (wrapper.parent / "qemu-img").symlink_to(real.parent / "qemu-img")
    relay = Path(__file__).with_name("relay.py")
    python = sys.executable
    wrapper.write_text(
        f'#!/bin/sh\nVK_RULES={rules} VK_QEMU={real} exec {python} -I -S {relay} "$@"\n'
    )
    wrapper.chmod(0o755)
    with world(wrapper, wrapper) as one:
        yield one
    total = sum(MATRIX.values())
    print(f"\n{total} faults; outcomes by fault:")
    for (fault, outcome), count in sorted(MATRIX.items()):
        print(f"  {count:4d}  {fault}: {outcome}")


@pytest.mark.timeout(240)
@pytest.mark.parametrize("case", chosen(), ids=str)
def test_fault(made: World, case: Case) -> None:
    home = at_home(made)
    asyncio.run(run_case(made, case, home))


def at_home(made: World) -> str:
    """A running guest under load; started anew when the last case lost it."""
    listed = made.ok("vm", "list")["vms"]
    if listed and listed[0]["state"] == "running":
        return str(listed[0]["host"])
    if listed:
        made.ok("vm", "stop", "mover", "--force")
        made.ok("vm", "rm", "mover")
    made.run_guest(guest(), "lab-a")
    return "lab-a"


def guest() -> LabGuest:
    return LabGuest("mover", 1, image())


async def run_case(made: World, case: Case, home: str) -> None:
    control = await guest().control(made.lab)
    await control.load_memory("rate=20M set=64M pattern=uniform content=random")
    await control.load_disk("rate=2M size=32M")
    boot = (await control.stat()).boot
    away = "lab-b" if home == "lab-a" else "lab-a"
    before = made.qemus("mover")
    rules = made.lab.host(home).qemu.with_name("rules.json")
    if case.fault in ("error", "silent"):
        rules.write_text(json.dumps({"command": case.step, "do": case.fault}))
    words = ["--method", case.method, "--bandwidth", "80MB"]
    command = made.begin("migrate", "mover", away, *words)
    try:
        if case.fault not in ("error", "silent"):
            await reach(made, case.step, command, home)
            await inject(made, case.fault, command, before)
        out, err = await asyncio.to_thread(command.communicate, timeout=150)
    finally:
        kill(command)
        rules.unlink(missing_ok=True)
    assert "Traceback" not in err, err
    await judge(made, case, control, boot, out + err)


async def reach(made: World, step: str, command: "subprocess.Popen[str]", home: str) -> None:
    """Return when the migration has begun `step`, at some moment of it; or has ended."""
    journal = made.lab.host(home).state_dir / "vms/mover/migration.json"
    while command.poll() is None and f'"step": "{step}"' not in read(journal):  # noqa: ASYNC110
        await asyncio.sleep(0.0005)
    if step == "transfer":
        await asyncio.sleep(random.uniform(0.0, 1.5))


async def inject(
    made: World, fault: str, command: "subprocess.Popen[str]", before: list[ProcessId]
) -> None:
    targets = [one for one in made.qemus("mover") if one not in before]
    match fault:
        case "kill the command":
            command.send_signal(signal.SIGKILL)
        case "kill the source":
            for one in before:
                os.kill(one.pid, signal.SIGKILL)
        case "kill the target":
            for one in targets:
                os.kill(one.pid, signal.SIGKILL)
        case "stop the target 5 s":
            for one in targets:
                os.kill(one.pid, signal.SIGSTOP)
            await asyncio.sleep(5)
            for one in targets:
                os.kill(one.pid, signal.SIGCONT)
        case "cut the link 5 s":
            await set_link(made.lab, "lab-b", up=False)
            await asyncio.sleep(5)
            await set_link(made.lab, "lab-b", up=True)


async def judge(made: World, case: Case, control: GuestControl, boot: str, said: str) -> None:
    deadline = time.monotonic() + 60
    while (shown := await asyncio.to_thread(made.vmckpt, "vm", "show", "mover")).code:
        # 10: the guest is lost, and the next look finds it stopped.
        assert shown.code in (5, 9, 10), shown.stderr
        assert time.monotonic() < deadline, shown.stderr
        await asyncio.sleep(0.5)
    state, host = shown.result["state"], shown.result["host"]
    other = "lab-b" if host == "lab-a" else "lab-a"
    assert made.files(other) == []
    running = [one.pid for one in made.qemus("mover")]
    if state == "stopped":
        killed = case.fault in ("kill the source", "kill the target")
        assert killed, f"lost without a killed QEMU: {said}"
        assert running == []
        MATRIX[case.fault, "honestly lost"] += 1
        await control.close()
        return
    assert state == "running"
    assert running == [shown.result["pid"]]
    assert (await control.stat()).boot == boot
    memory, disk = await control.verify_memory(), await control.verify_disk()
    assert memory.sound, memory
    assert disk.sound, disk
    MATRIX[case.fault, f"runs on {host}, whole"] += 1
    await control.close()


def read(path: Path) -> str:
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""
