"""A VM is defined, edited and exported while it is off."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.qemu.world import World, image, qemu, world
from vmckpt.lab.guests.labguest import LabGuest

pytestmark = [pytest.mark.qemu, pytest.mark.timeout(180)]


@pytest.fixture
def made() -> Iterator[World]:
    with world(qemu("10.0")) as one:
        yield one


@pytest.fixture
def spec(made: World, tmp_path: Path) -> Path:
    path = tmp_path / "one.toml"
    path.write_text(LabGuest("one", 1, image()).spec())
    return path


def answers(made: World) -> None:
    async def wait() -> None:
        control = await LabGuest("one", 1, image()).control(made.lab)
        await control.close()

    asyncio.run(wait())


def test_a_vm_is_defined_edited_and_started(made: World, spec: Path, tmp_path: Path) -> None:
    defined = made.ok("vm", "define", str(spec), "--host", "lab-a")
    assert (defined["host"], defined["state"]) == ("lab-a", "stopped")
    assert made.ok("vm", "show", "one")["state"] == "stopped"
    assert made.pids("one") == []
    assert (tmp_path / "one.qcow2").exists()
    assert made.vmckpt("vm", "define", str(spec), "--host", "lab-a").code == 4

    spec.write_text(spec.read_text().replace("vcpus = 1", "vcpus = 2", 1))
    made.ok("vm", "edit", "one", "--spec", str(spec))
    assert made.ok("vm", "show", "one")["vcpus"] == 2
    assert "vcpus = 2" in made.ok("vm", "export", "one")["text"]
    made.ok("vm", "start", "one")
    answers(made)
    running = made.vmckpt("vm", "edit", "one", "--spec", str(spec))
    assert running.code == 4, running
    assert "'one' runs" in running.error["what"]


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('name = "one"', 'name = "two"', "cannot become 'two'"),
        ('machine = "q35"', 'machine = "pc-q35-1.0"', "no machine type"),
        ('name = "one"', 'name = "one"\ncpu = "no-such-cpu"', "no-such-cpu"),
        ('path = "one.qcow2"', 'path = "/nowhere/one.qcow2"', "/nowhere/one.qcow2"),
    ],
)
def test_a_spec_that_does_not_start_changes_nothing(
    made: World, spec: Path, old: str, new: str, why: str
) -> None:
    made.ok("vm", "define", str(spec), "--host", "lab-a")
    before = made.ok("vm", "export", "one")["text"]
    files = made.files("lab-a")
    spec.write_text(spec.read_text().replace(old, new, 1))
    refused = made.vmckpt("vm", "edit", "one", "--spec", str(spec))
    assert refused.code not in (0, 1), refused
    assert why in str(refused.error)
    assert made.ok("vm", "export", "one")["text"] == before
    assert made.files("lab-a") == files
    made.ok("vm", "start", "one")
    answers(made)
