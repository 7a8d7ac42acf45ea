"""Guards of real guests: kept, put back, left open; never on with the work without a way back."""

import asyncio
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.qemu.test_checkpoint import all_there, load, sound
from tests.qemu.world import COMMAND, Done, World, image, qemu, send, world
from tests.waiting import eventually
from vmckpt.hosts.processes.process import find_by_argument, identify
from vmckpt.lab.guests.labguest import LabGuest
from vmckpt.store.files.config import CONFIG

KEPT, REFUSED, ROLLED_BACK, OPEN = 0, 4, 7, 9


def guest() -> LabGuest:
    return LabGuest("guest", 1, image(), memory="192M", disk="64M")


@pytest.fixture(scope="module", params=["10.0"])
def made(request: pytest.FixtureRequest) -> Iterator[World]:
    with world(qemu(request.param)) as one:
        one.run_guest(guest(), "lab-a")
        asyncio.run(_loaded(one))
        yield one


async def _loaded(made: World) -> None:
    control = await guest().control(made.lab)
    await load(control)
    await control.close()


def begin(made: World, *words: str) -> "subprocess.Popen[str]":
    """A guard in a process; what `World.begin` adds would be the guarded command's."""
    return subprocess.Popen(
        [*COMMAND, "guard", "guest", "--json", *words],
        env=made.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def guard(made: World, *words: str) -> Done:
    command = begin(made, "--every", "1s", *words)
    out, err = command.communicate(timeout=120)
    assert "Traceback" not in err, err
    return Done(command.returncode, json.loads(out), err)


def written(made: World) -> int:
    """The number of the last record on the guest's disk; the guest is whole."""

    async def read() -> int:
        await sound(made)
        control = await guest().control(made.lab)
        try:
            return (await control.verify_disk()).seq
        finally:
            await control.close()

    return asyncio.run(read())


def nothing_else(made: World) -> None:
    """Of a guard stays what it wrote down, and the checkpoint: no copy, no process."""
    asyncio.run(all_there(made, "guest"))
    assert [vm["name"] for vm in made.ok("vm", "list")["vms"]] == ["guest"]
    assert not list((made.state("lab-a") / "images").glob("proof-*"))
    assert not list((made.state("lab-a") / "guarded").glob("*"))
    assert not list((made.state_dir / "guarded").glob("*"))
    guards = made.state_dir / "guards"
    eventually(lambda: not list(guards.glob("*.lock")), 60, "nobody is at work")
    records = {path.stem for path in guards.glob("*.json")}
    # What a switch did stays for as long as its guard.
    logs = {path.name.removesuffix(".recovery.log") for path in guards.glob("*.log")}
    assert logs <= records
    assert {path.stem for path in guards.glob("*.pin")} <= records
    assert {path.suffix for path in guards.iterdir()} <= {".json", ".log", ".pin"}


def points(made: World) -> int:
    return len(made.ok("checkpoint", "list", "guest")["checkpoints"])


def test_what_goes_well_is_kept(made: World, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    done = guard(made, "--check", "agent", "--for", "2s", "--", "touch", str(mark))
    assert done.code == KEPT, done
    assert mark.exists()
    assert "a copy of it runs" in done.stderr
    (listed,) = made.ok("guard", "list")["guards"]
    assert (listed["phase"], listed["vm"]) == ("kept", "guest")
    nothing_else(made)
    # Until it expires there is a way back.
    assert points(made) == 1
    assert made.vmckpt("guard", "rollback", "guest").code == 0
    nothing_else(made)


@pytest.mark.parametrize("where", ["here", "host", "guest"])
def test_a_command_that_fails_is_undone(made: World, tmp_path: Path, where: str) -> None:
    hook = tmp_path / "hook"
    hook.write_text(f"#!/bin/sh\necho $VMCKPT_VM: $VMCKPT_WHY >{tmp_path}/told\n")
    hook.chmod(0o755)
    # The guest has no shell but busybox's.
    words = ["/bin/busybox", "false"] if where == "guest" else ["sh", "-c", "echo oops; exit 3"]
    done = guard(made, "--in", where, "--after-rollback", str(hook), "--", *words)
    assert done.code == ROLLED_BACK, done
    assert "exit status" in (tmp_path / "told").read_text()
    assert "oops" in done.stderr or where == "guest"
    written(made)
    nothing_else(made)


def test_a_command_that_removes_checkpoints_leaves_the_rollback_checkpoint(made: World) -> None:
    vmckpt = " ".join(COMMAND)
    words = [
        f"{vmckpt} checkpoint create guest --name newer",
        f"{vmckpt} checkpoint prune guest --keep-last 1 --apply",
        "exit 3",
    ]
    done = guard(made, "--", "sh", "-xec", "; ".join(words))
    assert (done.code, "pinned: rollback" in done.stderr) == (ROLLED_BACK, True), done
    written(made)
    made.ok("checkpoint", "rm", "newer")
    nothing_else(made)


def test_health_that_fails_late_is_undone(made: World, tmp_path: Path) -> None:
    before = written(made)
    well = tmp_path / "well"
    well.touch()
    words = ["--check", f"test -e {well}", "--for", "60s", "--failures", "2"]
    late = ["sh", "-c", f"(sleep 3; rm {well}) & exit 0"]
    done = guard(made, *words, "--", *late)
    assert done.code == ROLLED_BACK, done
    assert before <= written(made)
    nothing_else(made)


def test_a_command_that_hangs_is_ended_and_undone(made: World, tmp_path: Path) -> None:
    words = ["sh", "-c", f"echo $$ >{tmp_path}/pid; sleep 3600"]
    for where in ("here", "host"):
        done = guard(made, "--in", where, "--timeout", "2s", "--", *words)
        assert done.code == ROLLED_BACK, done
        assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()
    nothing_else(made)


@contextmanager
def small_store(made: World) -> Iterator[None]:
    """For the block the host's store, the same one, is on a file system of 1 MiB."""
    store, kept = made.state("lab-a") / "checkpoints", made.state_dir / "kept"
    shutil.copytree(store / "config", kept / "config")
    shutil.copy(store / CONFIG, kept)
    try:
        with made.small("lab-a", "checkpoints", 1 << 20):
            copied = made.inside("lab-a", "cp", "-rT", str(kept), str(store))
            assert copied.code == 0, copied.stderr
            yield
    finally:
        shutil.rmtree(kept)


def test_without_a_way_back_nothing_is_begun(made: World, tmp_path: Path) -> None:
    mark, before = tmp_path / "ran", points(made)
    store = made.state("lab-a") / "checkpoints"
    with small_store(made):
        done = guard(made, "--", "touch", str(mark))
    assert done.code == 11, done
    assert store.exists()
    sick = guard(made, "--check", "false", "--", "touch", str(mark))
    assert sick.code == REFUSED, sick
    assert not mark.exists()
    assert points(made) == before
    nothing_else(made)


def begun(made: World, mark: Path, *words: str) -> "subprocess.Popen[str]":
    """A guard whose command waits, from when it does."""
    command = begin(made, *words, "--", "sh", "-c", f"touch {mark}; sleep 3600")
    eventually(lambda: mark.exists() or command.poll() is not None, 90, "the command is run")
    assert command.poll() is None, command.communicate()
    return command


def newest(made: World) -> dict[str, Any]:
    found: dict[str, Any] = made.ok("guard", "list")["guards"][-1]
    return found


def comes_to(made: World, *phases: str, within_s: float = 60.0) -> None:
    """Wait until the newest guard is in one of these phases; if it never is, it is shown."""
    given_up_s = time.monotonic() + within_s
    while (last := newest(made))["phase"] not in phases:
        if time.monotonic() > given_up_s:
            logs = (made.state_dir / "guards").glob("*.recovery.log")
            pytest.fail(f"{last} after {within_s:g} s; {[log.read_text() for log in logs]}")
        time.sleep(0.1)


def test_whoever_is_killed_a_guard_does_not_fail_open(made: World, tmp_path: Path) -> None:
    command = begun(made, tmp_path / "one")
    made.kill(command)
    comes_to(made, "rolled_back")
    written(made)
    nothing_else(made)


@pytest.mark.parametrize("guard_too", [False, True])
def test_a_killed_worker_leaves_nothing_beside_the_rollback(
    made: World, tmp_path: Path, guard_too: bool
) -> None:
    """All that saw to the command's end is killed; of the command, a daemon runs."""
    daemon = f"(setsid sh -c 'echo $$ >{tmp_path}/pid; exec sleep 3600' &)"
    mark = tmp_path / "begun"
    started = f"until test -s {tmp_path}/pid; do sleep 0.02; done"
    command = begin(made, "--", "sh", "-c", f"{daemon}; {started}; touch {mark}; sleep 3600")
    eventually(lambda: mark.exists() or command.poll() is not None, 90, "the command is run")
    workers = set(find_by_argument(f"touch {mark}")) & set(find_by_argument("guard.worker"))
    send(signal.SIGKILL, workers)
    if guard_too:
        made.kill(command)
    else:
        command.communicate(timeout=90)
    comes_to(made, "rolled_back", "open")  # without control groups its end is not certain
    assert identify(int((tmp_path / "pid").read_text())) is None
    if newest(made)["phase"] == "open":
        assert made.vmckpt("guard", "rollback", "guest").code == 0
    written(made)
    nothing_else(made)


def test_a_ctrl_c_is_undone(made: World, tmp_path: Path) -> None:
    command = begun(made, tmp_path / "one")
    command.send_signal(signal.SIGINT)
    command.communicate(timeout=90)
    assert command.returncode == 130
    assert newest(made)["phase"] == "rolled_back"
    nothing_else(made)


def test_one_that_is_open_is_decided_by_whoever_comes(made: World, tmp_path: Path) -> None:
    asked = ["--on-failure", "ask", "--proof", "read"]
    done = guard(made, *asked, "--", "false")
    assert done.code == OPEN, done
    assert guard(made, "--", "true").code == REFUSED
    assert made.vmckpt("guard", "commit", "guest").code == 0
    command = begun(made, tmp_path / "one", *asked)
    made.kill(command)
    comes_to(made, "open")
    assert made.vmckpt("guard", "rollback", "guest").code == 0
    written(made)
    nothing_else(made)


def test_a_checkpoint_goes_when_its_time_has_come(made: World) -> None:
    # Long enough to be listed once on a busy machine: each list first lets go of what is over.
    assert guard(made, "--proof", "read", "--keep", "5s", "--", "true").code == KEPT
    run = newest(made)["run"]

    def listed() -> list[dict[str, Any]]:
        guards: list[dict[str, Any]] = made.ok("guard", "list")["guards"]
        return guards

    # One whose store is in use just then goes the next time.
    eventually(lambda: run not in [one["run"] for one in listed()], 30, "it has gone")
    left = listed()
    ids = [one["id"] for one in made.ok("checkpoint", "list", "guest")["checkpoints"]]
    assert sorted(one["checkpoint"] for one in left) == sorted(ids)


FAULTS = 50
NO_ROOM = "no room for the checkpoint"


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_random_faults(made: World, tmp_path: Path) -> None:
    """Whatever fails whenever: the guest is where it was promised to be, and whole."""
    rng = random.Random(FAULTS)
    outcomes: dict[str, int] = {}
    for number in range(int(os.environ.get("VMCKPT_GUARD_FAULTS", FAULTS))):
        directory = tmp_path / str(number)
        directory.mkdir()
        outcome = _one_fault(made, rng, directory)
        print(number, outcome)
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
        written(made)
        nothing_else(made)
    print("outcomes:", outcomes)


def _one_fault(made: World, rng: random.Random, directory: Path) -> str:
    began, ill = directory / "began", directory / "ill"
    touch = f"touch {began}; "
    then, codes = {
        "none": ("true", {KEPT}),
        "command": ("exit 1", {ROLLED_BACK}),
        "late": (f"(sleep {rng.uniform(0, 3):.1f}; touch {ill}) &", {ROLLED_BACK}),
        "hang": ("sleep 3600", {ROLLED_BACK}),
        "kill": ("sleep 2", {-signal.SIGKILL, KEPT}),
        "stop": ("sleep 2", {130, KEPT}),
        NO_ROOM: ("true", {11}),
    }[fault := rng.choice(["none", "command", "late", "hang", "kill", "stop", NO_ROOM])]
    options = ["--check", f"test ! -e {ill}", "--for", "5s", "--failures", "2", "--timeout", "4s"]
    words = ["--every", "500ms", *options, "--", "sh", "-c", touch + then]
    room = small_store(made) if fault == NO_ROOM else nullcontext()
    with room:
        command = begin(made, *words)
        if fault in ("kill", "stop"):
            if fault == "stop":
                eventually(lambda: _listens(command), 60, "it listens for signals")
            time.sleep(rng.uniform(0.2, 12))
            command.send_signal(signal.SIGKILL if fault == "kill" else signal.SIGTERM)
        said = command.communicate(timeout=120)
    assert command.returncode in codes, (fault, command.returncode, said)
    eventually(lambda: _all_over(made), 120, "no guard is left open")
    if fault == NO_ROOM:
        assert not began.exists()
    return f"{fault}: {newest(made)['phase'] if began.exists() else 'not begun'}"


def _listens(command: "subprocess.Popen[str]") -> bool:
    """Its Python has started: before that a signal ends any process."""
    status = dict(
        line.split(":\t", 1)
        for line in Path(f"/proc/{command.pid}/status").read_text().splitlines()
    )
    return bool(int(status["SigCgt"], 16) >> (signal.SIGTERM - 1) & 1)


def _all_over(made: World) -> bool:
    phases = {one["phase"] for one in made.ok("guard", "list")["guards"]}
    return phases <= {"kept", "rolled_back"}
