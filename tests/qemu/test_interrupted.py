"""Whatever ends the command, the guest runs in exactly one place and nothing is left elsewhere."""

import asyncio
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kinds import EVERY_KIND, hosts
from tests.qemu.world import World, image, loaded, qemu, read
from tests.waiting import eventually
from vmckpt.hosts.processes import process
from vmckpt.lab.guests.labguest import LabGuest
from vmckpt.qemu.abilities import SENDING_SPEED, USUAL_SPEED

KILLS = 10
SEED = 20261121


@pytest.fixture(scope="module", params=EVERY_KIND)
def made(request: pytest.FixtureRequest) -> Iterator[World]:
    with hosts(request.param, qemu("10.0"), qemu("10.0")) as one:
        one.run_guest(LabGuest("mover", 1, image()), "lab-a")
        yield one


def other(host: str) -> str:
    return "lab-b" if host == "lab-a" else "lab-a"


def is_in_one_place(made: World) -> str:
    """The host the VM runs on, after the next command has ended what was cut off."""
    eventually(lambda: not made.jobs(), 60, "hosts that work by themselves have done so")
    shown = made.ok("vm", "show", "mover")
    assert shown["state"] == "running"
    assert not shown["migration_cut_off"]
    assert made.pids("mover") == [shown["pid"]]
    # A dead-man's switch removes its lock's file after the next command has answered.
    elsewhere = other(shown["host"])
    eventually(lambda: made.files(elsewhere) == [], 30, lambda: f"left: {made.files(elsewhere)}")
    return str(shown["host"])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", ["precopy", "postcopy", "stop"])
def test_kill_9_at_random_moments(made: World, method: str) -> None:
    moments = random.Random(f"{SEED} {method}")

    async def kill_again_and_again() -> None:
        async with loaded(made, LabGuest("mover", 1, image())) as control:
            for _ in range(KILLS):
                host = is_in_one_place(made)
                command = made.begin("migrate", "mover", other(host), "--method", method)
                await asyncio.sleep(moments.uniform(0.1, 1.2))
                made.kill(command)
                host = await asyncio.to_thread(is_in_one_place, made)
                await control.ping()
                # Whoever finished or undid it left nothing set for the next one.
                capabilities, parameters = await made.migration_settings(host, "mover")
                assert not any(capabilities.values())
                assert parameters[SENDING_SPEED] == USUAL_SPEED

    asyncio.run(kill_again_and_again())


def test_a_dead_command_is_recovered_without_another(made: World) -> None:
    host = is_in_one_place(made)
    words = ("migrate", "mover", other(host), "--method", "stop", "--bandwidth", "20MB")
    command = made.begin(*words)
    journal = begun(made, host)
    ends = (made.state(one) / "host-id" for one in (host, other(host)))
    assert all(f'_id": "{end.read_text().strip()}"' in read(journal) for end in ends)
    time.sleep(0.3)
    made.kill(command)
    # The guest is stopped at this moment; its dead-man's switch lets it run again.
    eventually(lambda: not journal.exists(), 20, "the dead-man's switch acts")
    assert is_in_one_place(made) == host


def begun(made: World, host: str) -> Path:
    """The journal of a migration from `host` that has begun to send memory."""
    journal = made.state(host) / "vms/mover/migration.json"
    eventually(lambda: '"transfer"' in read(journal), 30, "the transfer begins")
    return journal


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_cancels(made: World, number: signal.Signals) -> None:
    host = is_in_one_place(made)
    command = made.begin("migrate", "mover", other(host), "--bandwidth", "10MB")
    begun(made, host)
    command.send_signal(number)
    command.send_signal(number)  # an impatient second time changes nothing
    out, err = command.communicate(timeout=20)
    assert command.returncode == 130, err
    assert '"cancelled"' in out
    assert "Traceback" not in err
    assert is_in_one_place(made) == host


def test_a_killed_target_leaves_the_source_running(made: World) -> None:
    host = is_in_one_place(made)
    before = made.qemus("mover")
    command = made.begin("migrate", "mover", other(host), "--bandwidth", "20MB")
    begun(made, host)  # one that is killed before its monitor has answered is started once more
    (target,) = (one for one in made.qemus("mover") if one not in before)
    assert process.kill(target)
    out, err = command.communicate(timeout=30)
    assert command.returncode == 7, (out, err)
    assert is_in_one_place(made) == host


def test_a_busy_vm_names_who_holds_it(made: World) -> None:
    host = is_in_one_place(made)
    command = made.begin("migrate", "mover", other(host), "--bandwidth", "20MB")
    begun(made, host)
    refused = made.vmckpt("migrate", "mover", other(host))
    assert refused.code == 5
    assert f"migrate to {other(host)}" in refused.error["why"]
    listed = made.ok("vm", "list")["vms"]
    assert listed[0]["operation"] == f"migrate to {other(host)}"
    command.send_signal(signal.SIGINT)
    command.communicate(timeout=20)
    assert is_in_one_place(made) == host
