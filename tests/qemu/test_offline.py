"""A VM that is off moves with its disks, and is off there; killed anywhere, it is in one place."""

import asyncio
import hashlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.kinds import EVERY_KIND, hosts
from tests.qemu.world import World, image, qemu, reach, send
from vmckpt.lab.guests.labguest import LabGuest

pytestmark = pytest.mark.qemu
NAME, IMAGE = "off", "images/off.raw"
STEPS = ("prepare", "mirror", "transfer", "handover", "release")


@dataclass(frozen=True, slots=True)
class Off:
    """The hosts, and what its disk holds."""

    made: World
    digest: str

    def at_home(self) -> str:
        """Where it is, which must be one place, where it is off with its disk, and with no QEMU."""
        made, deadline = self.made, time.monotonic() + 60
        while (shown := made.vmckpt("vm", "show", NAME)).code:
            assert shown.code in (5, 9), shown.stderr
            assert time.monotonic() < deadline, shown.stderr
            time.sleep(0.1)
        assert shown.result["state"] == "stopped"
        assert made.qemus(NAME) == []
        home = str(shown.result["host"])
        away = "lab-b" if home == "lab-a" else "lab-a"
        assert hashed(made, home) == self.digest
        assert made.files(away) == []
        # Nothing of any move stays beside it, either.
        assert [one.name for one in made.state(home).glob("images/*")] == ["off.raw"]
        assert not list(made.state(away).glob("images/*"))
        assert sorted(made.files(home)) == [
            "vms/off", "vms/off/identity", "vms/off/spec.toml", "vms/off/vm.json"
        ]  # fmt: skip
        return home


def hashed(made: World, host: str) -> str:
    return hashlib.sha256((made.state(host) / IMAGE).read_bytes()).hexdigest()


@pytest.fixture(scope="module", params=EVERY_KIND)
def off(request: pytest.FixtureRequest) -> Iterator[Off]:
    with hosts(request.param, qemu("10.0"), qemu("10.0")) as made:
        guest = LabGuest(NAME, 9, image(), memory="128M", disk="16M", disk_format="raw")
        made.run_guest(guest, "lab-a", own_disk=True)
        made.ok("vm", "stop", NAME, "--force")
        # The host's own view of the file is the lab's: written to where it stands.
        (made.state("lab-a") / IMAGE).write_bytes(os.urandom(16 << 20))
        yield Off(made, hashed(made, "lab-a"))


def other(home: str) -> str:
    return "lab-b" if home == "lab-a" else "lab-a"


def test_it_goes_with_its_disk_and_starts_there(off: Off) -> None:
    home = off.at_home()
    away = other(home)
    refused = off.made.vmckpt("migrate", NAME, away)
    assert (refused.code, "--offline" in refused.error["remedy"]) == (4, True)
    looked = off.made.ok("migrate", NAME, away, "--offline", "--dry-run")
    assert (looked["possible"], off.at_home()) == (True, home)
    moved = off.made.ok("migrate", NAME, away, "--offline")
    assert (moved["method"], moved["target"], off.at_home()) == ("offline", away, away)
    off.made.ok("vm", "start", NAME)
    refused = off.made.vmckpt("migrate", NAME, home, "--offline")
    assert (refused.code, "runs" in refused.error["what"]) == (4, True)
    off.made.ok("vm", "stop", NAME, "--force")


@pytest.mark.parametrize(
    "step",
    [pytest.param(one, marks=[] if one in ("mirror", "handover") else pytest.mark.long)
     for one in STEPS],
)  # fmt: skip
def test_a_command_that_is_killed_leaves_it_in_one_place(off: Off, step: str) -> None:
    home = off.at_home()
    command = off.made.begin("migrate", NAME, other(home), "--offline")
    try:
        asyncio.run(reach(off.made, step, command, home, NAME))
    finally:
        off.made.kill(command)
    assert off.at_home() in (home, other(home))


@pytest.mark.parametrize("end", ["source", pytest.param("target", marks=pytest.mark.long)])
def test_a_qemu_that_is_killed_leaves_it_where_it_was(off: Off, end: str) -> None:
    home = off.at_home()
    command = off.made.begin("migrate", NAME, other(home), "--offline", "--bandwidth", "4MiB/s")
    try:
        asyncio.run(reach(off.made, "mirror", command, home, NAME))
        waits = {one.pid for one in off.made.qemus(NAME) if b"-incoming" in command_line(one.pid)}
        ours = end == "target"
        found = [one for one in off.made.qemus(NAME) if (one.pid in waits) is ours]
        send(signal.SIGKILL, found)
        _, err = command.communicate(timeout=120)
    finally:
        off.made.kill(command)
    assert command.returncode == 7, err
    assert off.at_home() == home


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()
