"""A device that cannot move, in a guest that does: its job goes on, with its state, in any case."""

import asyncio
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.kinds import EVERY_KIND, spoilable_hosts
from tests.outcomes import Outcomes
from tests.qemu.device_guest import NAME, in_guest, job, run_worker, settled, well
from tests.qemu.world import World, reach, send

OUT = ("quiesce", "lock", "checkpoint", "release")
BACK = ("reattach", "restore", "resume")
HOOK_FAULTS = ("fail", "hang", "kill-agent")
KILL, INTERRUPT = "kill the command", "interrupt the command"
# Commands of the operator's monitors: unplug refused, target device missing, migration fails.
SPOILT = ("device_del", "device_add", "migrate")
MATRIX = Outcomes()


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
    for step in ("hook-checkpoint", "unplug", "transfer"):
        yield Case(step, INTERRUPT)
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
    title = f"faults of devices on {request.param} hosts"
    with spoilable_hosts(request.param, tmp_path_factory.mktemp("q")) as one, MATRIX.printed(title):
        run_worker(one, "lab-a")
        yield one


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


@pytest.mark.long
@pytest.mark.timeout(280)
def test_a_job_that_cannot_be_brought_back_waits_until_it_can(made: World) -> None:
    home, before = str(made.ok("vm", "show", NAME)["host"]), job(made)
    away = "lab-b" if home == "lab-a" else "lab-a"
    lines = "".join(f"{phase} fail\\n" for phase in ["restore"] * 3 + ["abort"] * 3)
    in_guest(made, "sh", "-c", f"printf '{lines}' > /run/device-hook.fault")
    held = made.vmckpt("migrate", NAME, away)
    assert (held.error["kind"], held.error["exit_code"]) == ("job-held", 1)
    assert f"vmckpt device recover {NAME}" in held.error["remedy"]
    assert made.ok("vm", "show", NAME)["host"] == away
    assert made.files(home) == []
    assert job(made).state == "checkpointed"
    made.ok("device", "recover", NAME)
    well(made, before)
    (device,) = made.ok("device", "list", NAME)["devices"]
    assert (device["id"], device["state"]) == ("edu0", "plugged")


@pytest.mark.timeout(280)
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
            elif case.fault == INTERRUPT:
                command.send_signal(signal.SIGINT)
            elif case.fault == "kill the target":
                send(signal.SIGKILL, [one for one in made.qemus(NAME) if one not in ours])
            out, err = command.communicate(timeout=200)
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
    MATRIX.add(case.fault, f"runs on {went}, with its state")


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
