"""A device that cannot move, in a guest that does: its job goes on with its state, whatever fails.

QEMU's edu device stands in for a GPU: a job in the guest keeps its count in the device's registers
and nowhere else (images/guest/devicejob.c), and a hook there (device-hook) saves and restores it
as a vendor's tool would. The guest agent is the real one.
"""

import asyncio
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.kinds import EVERY_KIND, hosts
from tests.qemu.world import World, image, reach, send, spoilable
from vmckpt.errors import VmckptError
from vmckpt.lab.labguest import LabGuest
from vmckpt.qemu.agent import GuestAgent, GuestExit
from vmckpt.qemu.hotplug import plugged
from vmckpt.qemu.monitor import session

NAME = "worker"
DEVICE = """
[[passthrough]]
id = "edu0"
driver = "edu"
hook = "/bin/device-hook"
"""
PHASES = ("preflight", "quiesce", "lock", "checkpoint", "release", "reattach", "restore",
          "resume", "abort")  # fmt: skip
LIMITS = f"limits_s = {{ {', '.join(f'{phase} = 4' for phase in PHASES)} }}\n"
OUT = ("quiesce", "lock", "checkpoint", "release")
BACK = ("reattach", "restore", "resume")
HOOK_FAULTS = ("fail", "hang", "kill-agent")
KILL = "kill the command"
# The monitors' commands, and what each stands for.
SPOILT = {
    "device_del": "unplug refused",
    "device_add": "target device missing",
    "migrate": "migration fails",
}
MATRIX: Counter[tuple[str, str]] = Counter()


@dataclass(frozen=True, slots=True)
class Job:
    """What the job says of itself."""

    state: str
    count: int
    errors: int
    pid: int


@dataclass(frozen=True, slots=True)
class Case:
    phase: str
    fault: str

    def __str__(self) -> str:
        return f"{self.phase}, {self.fault}"


def cases() -> Iterator[Case]:
    for phase in ("preflight", *OUT, *BACK):
        yield from (Case(phase, fault) for fault in HOOK_FAULTS)
    for step in (
        *(f"hook-{phase}" for phase in OUT),
        "unplug",
        "transfer",
        "bring-back",
        "release",
    ):
        yield Case(step, KILL)
    for command in SPOILT:
        yield from (Case(command, do) for do in ("error", "silent"))
    yield Case("transfer", "kill the target")


ALL = list(cases())
# One way out that is taken back, one that fails past the unplug, one that fails past the commit.
ALWAYS = (Case("checkpoint", "fail"), Case("device_add", "error"), Case("restore", "kill-agent"))


@pytest.fixture(scope="module", params=EVERY_KIND)
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    wrapper = spoilable("10.0", tmp_path_factory.mktemp("q"))
    MATRIX.clear()
    with hosts(request.param, wrapper, wrapper) as one:
        one.run_guest(guest(), "lab-a", more=DEVICE + LIMITS)
        ready(one)
        yield one
    for (fault, outcome), count in sorted(MATRIX.items()):
        print(f"  {count:4d}  {fault}: {outcome}")


def guest() -> LabGuest:
    return LabGuest(NAME, 1, image(), memory="128M", disk=None)


def test_a_device_goes_and_comes(made: World) -> None:
    there_and_back(made, times=1)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_fifty_times(made: World) -> None:
    there_and_back(made, times=50)


def there_and_back(made: World, times: int) -> None:
    home, before = str(made.ok("vm", "show", NAME)["host"]), job(made)
    for _ in range(times):
        home = "lab-b" if home == "lab-a" else "lab-a"
        made.ok("migrate", NAME, home)
        now = well(made, before)
        assert made.ok("vm", "show", NAME)["host"] == home
        assert now.count > before.count
        before = now


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "case", [pytest.param(one, marks=[] if one in ALWAYS else pytest.mark.long) for one in ALL],
    ids=str,
)  # fmt: skip
def test_fault(made: World, case: Case) -> None:
    home, before = str(made.ok("vm", "show", NAME)["host"]), job(made)
    away = "lab-b" if home == "lab-a" else "lab-a"
    hook_fault = case.fault in HOOK_FAULTS
    if hook_fault:
        in_guest(made, "sh", "-c", f"echo {case.phase} {case.fault} > /run/device-hook.fault")
    rule = {"command": case.phase, "do": case.fault} if case.phase in SPOILT else None
    with made.spoilt(home, rule):
        ours = made.qemus(NAME)
        command = made.begin("migrate", NAME, away)
        try:
            if not hook_fault and rule is None:
                asyncio.run(reach(made, case.phase, command, home, NAME))
            if case.fault == KILL:
                made.kill(command)
            elif case.fault == "kill the target":
                send(signal.SIGKILL, [one for one in made.qemus(NAME) if one not in ours])
            out, err = command.communicate(timeout=150)
        finally:
            made.kill(command)
    assert "Traceback" not in err, err
    shown = settled(made)
    other = "lab-b" if shown["host"] == "lab-a" else "lab-a"
    assert made.files(other) == [], out + err
    assert made.pids(NAME) == [shown["pid"]]
    well(made, before)
    went = "where it was" if shown["host"] == home else "where it went"
    expect(case, command, shown["host"] == home, out + err)
    MATRIX[case.fault, f"runs on {went}, with its state"] += 1


def expect(case: Case, command: "subprocess.Popen[str]", at_home: bool, said: str) -> None:
    """What the command has to say of it, where that is known beforehand."""
    code = command.returncode
    if case.phase == "preflight" and case.fault != "kill-agent":
        assert (code, at_home) == (4, True), said
    elif case.phase in OUT and case.fault in ("fail", "hang"):
        assert (code, at_home) == (7, True), said
        assert f"in phase {case.phase}" in said
    elif case.phase in SPOILT and case.fault == "error":
        assert (code, at_home) == (7, True), said
    elif case.phase in BACK or case.fault == "kill-agent":
        assert (code, at_home) == (0, False), said


def settled(made: World) -> dict[str, object]:
    """The VM as it is shown once nothing of it is cut off any more."""
    deadline = time.monotonic() + 90
    while (shown := made.vmckpt("vm", "show", NAME)).code:
        assert shown.code in (5, 9), shown.stderr
        assert time.monotonic() < deadline, shown.stderr
        time.sleep(0.5)
    assert shown.result["state"] == "running"
    return shown.result


def well(made: World, before: Job) -> Job:
    """The job goes on: the same one, in the device, none of its counts lost; as it is now."""
    assert asyncio.run(devices(made)) == {"edu0"}
    deadline = time.monotonic() + 60
    first = job(made)
    while (now := job(made)).count == first.count:
        assert time.monotonic() < deadline, now
        time.sleep(0.1)
    assert (now.state, now.errors, now.pid) == ("running", 0, before.pid)
    assert now.count >= before.count
    return now


def ready(made: World) -> None:
    """Return when the guest's job runs."""
    deadline = time.monotonic() + 120
    while True:
        try:
            job(made)
            return
        except (VmckptError, AssertionError):
            assert time.monotonic() < deadline
            time.sleep(0.2)


def job(made: World) -> Job:
    done = in_guest(made, "guestload", "device-job", "ask", "stat")
    assert done.returncode == 0, done
    words = dict(word.split("=") for word in done.out.decode().split()[1:])
    return Job(words["state"], int(words["count"]), int(words["errors"]), int(words["pid"]))


def in_guest(made: World, *argv: str) -> GuestExit:
    """Run a command in the guest, by its agent, which may be about to come back."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return asyncio.run(_in_guest(made, argv))
        except VmckptError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


async def _in_guest(made: World, argv: tuple[str, ...]) -> GuestExit:
    host, path = place(made)
    agent = await GuestAgent.connect(await made.asked(host).connect(path / "agent.sock"))
    try:
        pid = await agent.start(argv)
        while (done := await agent.ended(pid)) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        return done
    finally:
        await agent.close()


async def devices(made: World) -> set[str]:
    """What is plugged into the guest's one QEMU, by the ids of passthrough devices."""
    host, path = place(made)
    sock = await made.asked(host).connect(path / "watch.sock")
    async with session(sock, NAME) as monitor:
        return {name for name in await plugged(monitor) if name.startswith("edu")} - {"edu0-port"}


def place(made: World) -> tuple[str, Path]:
    """The host that the guest is at home on, and its QEMU's directory there, seen from here."""
    found = [
        (name, path)
        for name in ("lab-a", "lab-b")
        for path in made.state(name).glob(f"vms/{NAME}/qemu-*")
    ]
    ((host, path),) = found
    return host, path
