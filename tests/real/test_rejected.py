"""Hosts that do not let a migration be: it says why and what to do, loses and leaves nothing."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.nobody import as_nobody
from tests.qemu.world import image, loaded, qemu, reach
from tests.real.machines import Machines, machines
from tests.real.obstacles import HOSTS, another_key, full, known_hosts, replaced
from tests.waiting import eventually
from vmckpt.lab.guests.labguest import LabGuest

# Of the target, for all that vmckpt keeps there.
DISK_BYTES = 8 << 20
OUTCOME = "outcome.json"


def guest() -> LabGuest:
    return LabGuest("mover", 1, image())


@pytest.fixture(scope="module")
def made() -> Iterator[Machines]:
    with machines([qemu("10.0")] * 2) as one, one.small("lab-b", ".", DISK_BYTES):
        one.certify()
        one.run_guest(guest(), "lab-a")
        yield one


@pytest.fixture(autouse=True)
def stays_whole(made: Machines) -> Iterator[None]:
    """Whatever a test does, the guest runs on at lab-a, and nothing is left of the attempt."""
    yield
    shown = made.ok("vm", "show", "mover")
    assert (shown["host"], shown["state"], shown["migration_cut_off"]) == (
        "lab-a",
        "running",
        False,
    )
    assert made.pids("mover") == [shown["pid"]]
    assert made.files("lab-b") == []
    eventually(lambda: leftovers(made) == [], 20, "the target listens no more")


def leftovers(made: Machines) -> list[str]:
    """What attempts have left on the target, or are still at on any host.

    What a job told, which is kept on its source, is nothing left.
    """
    left = [path for path in made.state("lab-b").glob("jobs/*/*") if not (path / OUTCOME).exists()]
    return [str(path) for path in left] + [str(job) for job in made.jobs()]


def test_a_target_with_an_unknown_key_and_the_remedy(made: Machines) -> None:
    path, (first, second) = known_hosts(made)
    with replaced(path, f"{first}\n"):
        refused = made.vmckpt("migrate", "mover", "lab-b")
        assert refused.code == 6
        assert refused.error["what"] == "the SSH key of lab-b is not known"
        assert "SHA256:" in refused.error["why"]
        line, _, file = refused.error["remedy"].partition("echo '")[2].partition("' >> ")
        assert (line, file) == (second.strip(), str(path))
        with path.open("a") as known:
            known.write(line + "\n")
        assert made.ok("migrate", "mover", "lab-b", "--dry-run")["possible"] is True


@pytest.mark.parametrize("host", HOSTS)
def test_a_host_with_another_key_than_before(made: Machines, host: str) -> None:
    with another_key(made, host):
        refused = made.vmckpt("migrate", "mover", "lab-b")
        assert refused.code == 6
        assert f"THE SSH KEY OF {host} HAS CHANGED" in refused.stderr
        assert "ssh-keygen -R" in refused.stderr


def test_a_user_without_rights_on_the_target(made: Machines) -> None:
    entry = made.state_dir / "hosts/lab-b.json"
    wrapper = as_nobody(made.shared / "as-nobody", "vmckpt")
    other = json.loads(entry.read_text()) | {"vmckpt": wrapper}
    with replaced(entry, json.dumps(other)):
        refused = made.vmckpt("migrate", "mover", "lab-b")
        assert refused.code == 11
        assert refused.error["what"].startswith("cannot write /var/lib/vmckpt/")
        assert refused.error["what"].endswith(" on lab-b")
        assert refused.error["why"] == "Permission denied"


def test_a_target_whose_disk_is_full(made: Machines) -> None:
    with full(made.state("lab-b")):
        refused = made.vmckpt("migrate", "mover", "lab-b")
        assert refused.code == 11
        assert refused.error["what"].endswith(" on lab-b")
        assert refused.error["why"] == "No space left on device"


def test_a_target_whose_disk_fills_up_while_memory_moves(made: Machines) -> None:
    """The guest is there when it can no longer be written down: nothing is lost, and it says so."""

    async def fills() -> dict[str, Any]:
        async with loaded(made, guest()) as control:
            command = made.begin("migrate", "mover", "lab-b", "--bandwidth", "40MB")
            try:
                await reach(made, "transfer", command, "lab-a", "mover")
                await asyncio.sleep(0.5)  # the step is written down on both
                with full(made.state("lab-b")):
                    out, err = await asyncio.to_thread(command.communicate, timeout=90)
            finally:
                made.kill(command)
            await control.ping()
            assert command.returncode == 9, err
        return dict(json.loads(out)["error"])

    error = asyncio.run(fills())
    assert error["what"].startswith("'mover' is on lab-b, but its move is not finished")
    assert error["why"] == "No space left on device"
    assert error["remedy"] == "vmckpt migrate --recover mover"
    assert made.ok("migrate", "--recover", "mover")["host"] == "lab-b"
    assert made.files("lab-a") == []
    made.ok("migrate", "mover", "lab-a")
