"""The commands of vmckpt-drain.service and vmckpt-undrain.service, on a host with a guest."""

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.qemu.test_drain import guests, homes
from tests.qemu.world import COMMAND, COMMAND_TIMEOUT_S, World, image, qemu, world
from tests.waiting import eventually
from vmckpt.lab.guests.labguest import LabGuest

UNITS = Path(__file__).parents[2] / "units"


@pytest.fixture(scope="module")
def made() -> Iterator[World]:
    with world(qemu("10.0"), qemu("10.0")) as one:
        for guest in guests(2):
            one.run_guest(guest, "lab-a")
        yield one


def runs(made: World, unit: str, line: str, **settings: str) -> "subprocess.CompletedProcess[str]":
    """Run the line `line` of a unit as systemd would, with lab-a for the host itself."""
    text = (UNITS / unit).read_text()
    environment = dict(word.split("=", 1) for word in found("Environment", text).split()) | settings
    words = list[str]()
    for word in shlex.split(found(line, text)):
        if word == "vmckpt":
            words += COMMAND
        elif word.startswith("$"):
            words += environment[word[1:]].split()
        else:
            words.append("lab-a" if word == "local" else word)
    return subprocess.run(
        words, env=made.environment, capture_output=True, text=True, check=False,
        timeout=COMMAND_TIMEOUT_S,
    )  # fmt: skip


def found(key: str, text: str) -> str:
    match = re.search(rf"^{key}=(.*)$", text, re.MULTILINE)
    assert match
    return match[1]


def stopped(made: World, **settings: str) -> "subprocess.CompletedProcess[str]":
    return runs(made, "vmckpt-drain.service", "ExecStop", **settings)


def started(made: World) -> "subprocess.CompletedProcess[str]":
    return runs(made, "vmckpt-undrain.service", "ExecStart", UNDRAIN_OPTIONS="--for 500ms")


@pytest.mark.timeout(300)
def test_a_shutdown_moves_all_off_and_the_next_boot_brings_them_back(made: World) -> None:
    done = started(made)
    assert (done.returncode, done.stdout) == (
        0,
        "lab-a was not drained for shutdown: nothing to undo\n",
    )
    done = stopped(made, OPTIONS="--for 500ms")
    assert done.returncode == 0, done.stderr
    assert set(homes(made).values()) == {"lab-b"}
    done = started(made)
    assert done.returncode == 0, done.stderr
    assert set(homes(made).values()) == {"lab-a"}
    assert not (made.state_dir / "drains/lab-a.json").exists()
    # What an operator drained stays so.
    made.ok("drain", "lab-a", "--for", "500ms")
    assert stopped(made, OPTIONS="--for 500ms").returncode == 0
    assert started(made).returncode == 0
    assert set(homes(made).values()) == {"lab-b"}
    made.ok("undrain", "lab-a", "--for", "500ms")


@pytest.mark.timeout(300)
def test_what_takes_too_long_is_cancelled_and_stays(made: World) -> None:
    guest = LabGuest("g1", 1, image(), memory="128M", disk=None)
    assert guest.name in homes(made)
    done = stopped(made, LIMIT="6s", OPTIONS="--for 500ms --bandwidth 1MB --one-way")
    assert done.returncode == 124, done.stderr  # as timeout(1) says it
    eventually(lambda: set(homes(made).values()) == {"lab-a"}, 30, "all are where they were")
    assert started(made).returncode == 0
    made.ok("drain", "lab-a", "--for", "500ms", "--dry-run")
    assert set(homes(made).values()) == {"lab-a"}
