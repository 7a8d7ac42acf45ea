"""Local disks move with the guest that writes to them: nothing is lost, nothing is left."""

import asyncio
import hashlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.kinds import EVERY_KIND, Kind, hosts
from tests.qemu.world import World, fill, image, loaded, qemu
from tests.waiting import eventually
from vmckpt.hosts.processes import process
from vmckpt.lab.guests.labguest import LabGuest
from vmckpt.qemu import commands
from vmckpt.qemu.block import query_disk_images
from vmckpt.qemu.monitor import Monitor
from vmckpt.vm.inventory import read_vm

MIB = 1 << 20


def qemu_img(*words: str) -> None:
    subprocess.run([str(qemu("10.0").with_name("qemu-img")), *words], check=True)


def images(made: World, host: str) -> list[str]:
    directory = made.state(host) / "images"
    return sorted(path.name for path in directory.iterdir()) if directory.exists() else []


def allocated_bytes(path: Path) -> int:
    return path.stat().st_blocks * 512


async def traces(made: World, host: str, name: str) -> list[str]:
    """Jobs and nodes of copies that the QEMU on `host` still has."""
    vm = await read_vm(made.asked(host), name)
    assert vm is not None
    monitor = await Monitor.connect(await vm.host.connect(vm.qemu.files.operator), name)
    jobs = [job.id for job in await commands.query_jobs(monitor)]
    nodes = await query_disk_images(monitor)
    await monitor.close()
    return jobs + [node for node in nodes if not node.startswith(("disk", "#", "pflash"))]


def stands_whole(made: World, host: str, name: str = "mover") -> None:
    """The VM and its disk are on `host`, with no trace of any copy anywhere."""
    shown = made.ok("vm", "show", name)
    other = "lab-b" if host == "lab-a" else "lab-a"
    # A dead-man's switch that has just ended the matter, or now sees that it has ended, may hold
    # its locks.
    eventually(lambda: made.files(other) == [], 5, "unlocked")
    assert (shown["host"], shown["state"], shown["migration_cut_off"]) == (host, "running", False)
    assert len(made.qemus(name)) == 1
    assert [n for n in images(made, host) if "vmckpt" in n] == []
    assert [n for n in images(made, other) if n.startswith(name)] == []
    eventually(lambda: made.files(other) == [], 5, "unlocked")
    assert asyncio.run(traces(made, host, name)) == []


@pytest.fixture(scope="module", params=EVERY_KIND)
def made(request: pytest.FixtureRequest) -> Iterator[World]:
    with hosts(request.param, qemu("10.0"), qemu("10.0")) as one:
        one.run_guest(LabGuest("mover", 1, image(), disk="128M"), "lab-a", own_disk=True)
        yield one


METHODS = {
    "precopy": ["--method", "precopy"],
    "postcopy": ["--method", "postcopy"],
    "stop": ["--method", "stop"],
    "parallel": ["--parallel", "2"],
    "with a bandwidth": ["--bandwidth", "200MB"],
    "explicitly": ["--disks", "copy"],
}


@pytest.mark.parametrize("way", METHODS)
def test_a_local_disk_moves_there_and_back(made: World, way: str) -> None:
    async def there_and_back() -> None:
        async with loaded(made, LabGuest("mover", 1, image(), disk="128M")) as control:
            await asyncio.sleep(0.5)
            for target in ("lab-b", "lab-a"):
                await asyncio.to_thread(made.ok, "migrate", "mover", target, *METHODS[way])
                await control.ping()

    asyncio.run(there_and_back())
    stands_whole(made, "lab-a")


# A process that dies of SIGKILL when it is about to call the named function.
DIES_AT = """
import importlib, os, signal, sys
module, name = sys.argv.pop(1).split(":")
async def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)
setattr(importlib.import_module(module), name, die)
from vmckpt.cli.main import main
main()
"""
MOMENTS = {
    "nothing mirrors yet": "vmckpt.qemu.block:blockdev_mirror",
    "the copies follow": "vmckpt.qemu.commands:migrate_incoming",
    "stopped, the copies follow": "vmckpt.qemu.block:block_job_cancel",
    "stopped, the copies are whole": "vmckpt.qemu.block:nbd_server_stop",
    "stopped, the target has the disks": "vmckpt.migrate.steps.transfer:migrate_continue",
}


# On hosts over SSH it is not this machine's process that does it.
@pytest.mark.parametrize("made", [Kind.LAB], indirect=True)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_command_killed_while_it_copies(made: World, moment: str) -> None:
    async def killed() -> None:
        async with loaded(made, LabGuest("mover", 1, image(), disk="128M")) as control:
            await asyncio.to_thread(die_at, made, MOMENTS[moment])
            # Its dead-man's switch, or this next command, puts everything back.
            await asyncio.to_thread(stands_whole, made, "lab-a")
            await control.ping()

    asyncio.run(killed())


def die_at(made: World, function: str) -> None:
    words = ["-c", DIES_AT, function, "migrate", "mover", "lab-b", "--json"]
    done = subprocess.run([sys.executable, *words], env=made.environment, check=False, timeout=30)
    assert done.returncode == -signal.SIGKILL


def test_kill_9_in_the_middle_of_the_copy(made: World) -> None:
    async def killed() -> None:
        async with loaded(made, LabGuest("mover", 1, image(), disk="128M")) as control:
            for wait_s in (0.3, 0.6, 1.0):
                command = made.begin("migrate", "mover", "lab-b", "--bandwidth", "5MB")
                eventually(lambda: images(made, "lab-b") != [], 10, "the copy is begun")
                await asyncio.sleep(wait_s)
                made.kill(command)
                await asyncio.to_thread(stands_whole, made, "lab-a")
                await control.ping()

    asyncio.run(killed())


def test_a_target_that_dies_while_it_is_copied_to(made: World) -> None:
    (before,) = made.qemus("mover")
    command = made.begin("migrate", "mover", "lab-b", "--bandwidth", "5MB")
    eventually(lambda: len(made.qemus("mover")) == 2, 10, "the target's QEMU is there")
    time.sleep(1.0)
    (target,) = (one for one in made.qemus("mover") if one != before)
    assert process.kill(target)
    out, err = command.communicate(timeout=30)
    assert command.returncode == 7, (out, err)
    stands_whole(made, "lab-a")


def test_a_cancelled_copy_leaves_nothing(made: World) -> None:
    command = made.begin("migrate", "mover", "lab-b", "--bandwidth", "5MB")
    eventually(lambda: images(made, "lab-b") != [], 10, "the copy is begun")
    time.sleep(0.5)
    command.send_signal(signal.SIGINT)
    command.communicate(timeout=20)
    assert command.returncode == 130
    stands_whole(made, "lab-a")


def test_a_file_on_the_target_is_never_written_over(made: World) -> None:
    taken = made.state("lab-b") / "images/mover.qcow2"
    taken.parent.mkdir(exist_ok=True)
    taken.write_text("precious")
    try:
        for words in ([], ["--disks", "copy"]):
            done = made.vmckpt("migrate", "mover", "lab-b", *words)
            assert (done.code, "[disk-target]" in done.error["why"]) == (4, True)
        assert taken.read_text() == "precious"
    finally:
        taken.unlink()
    stands_whole(made, "lab-a")


def test_a_target_without_room_is_refused_and_one_that_fills_up_is_undone(made: World) -> None:
    directory = made.state("lab-b") / "images"
    directory.mkdir(exist_ok=True)

    async def fills() -> None:
        async with loaded(made, LabGuest("mover", 1, image(), disk="128M")) as control:
            await asyncio.sleep(0.5)
            with made.small("lab-b", "images", 1 * MIB):
                done = await asyncio.to_thread(made.vmckpt, "migrate", "mover", "lab-b")
                assert (done.code, "[disk-room]" in done.error["why"]) == (4, True)
            with made.small("lab-b", "images", 64 * MIB):
                command = made.begin("migrate", "mover", "lab-b", "--bandwidth", "5MB")
                await asyncio.to_thread(
                    eventually, lambda: images(made, "lab-b") != [], 20, "the copy is begun"
                )
                fill(directory / "filler")
                out, err = await asyncio.to_thread(command.communicate, timeout=60)
                assert command.returncode == 7, (out, err)
                assert "No space left" in out
                assert images(made, "lab-b") == ["filler"]
            await control.ping()

    asyncio.run(fills())
    stands_whole(made, "lab-a")


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_a_marker_shows_what_is_shared(kind: Kind) -> None:
    guest = LabGuest("sharer", 2, image(), disk="64M")
    with hosts(kind, qemu("10.0"), qemu("10.0")) as one:
        one.run_guest(guest, "lab-a")
        shared = one.shared / "sharer.qcow2"
        assert shared.exists()
        inode = shared.stat().st_ino
        checked = one.ok("migrate", "sharer", "lab-b", "--dry-run")
        reasons = {check["code"]: check["reason"] for check in checked["targets"][0]["checks"]}
        assert reasons["disks"] == "1 shared"
        one.ok("migrate", "sharer", "lab-b")
        assert shared.stat().st_ino == inode
        refused = one.vmckpt("migrate", "sharer", "lab-a", "--disks", "copy")
        assert (refused.code, "[disk-target]" in refused.error["why"]) == (4, True)
        assert [path.name for path in one.shared.iterdir() if ".vmckpt-" in path.name] == []


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_every_kind_of_image_moves_and_stays_sparse(kind: Kind) -> None:
    guest = LabGuest("kinds", 3, image(), disk="64M", disk_format="raw")
    with hosts(kind, qemu("10.0"), qemu("7.2")) as one:
        own = one.state("lab-a") / "images"
        own.mkdir()
        base = one.shared / "base.raw"
        with base.open("wb") as file:
            file.truncate(32 * MIB)
            file.seek(20 * MIB)
            file.write(b"base" * 4096)
            file.write(bytes(4 * MIB))
        qemu_img(
            "create", "-q", "-f", "qcow2", "-F", "raw", "-b", str(base), str(own / "top.qcow2")
        )
        qemu_img("convert", "-q", "-O", "qcow2", str(base), str(own / "fixed.qcow2"))
        digest = content(own / "top.qcow2")
        more = "".join(
            f'\n[[disks]]\nimage = "{name}"\n{option}'
            for name, option in (("top.qcow2", ""), ("fixed.qcow2", "read_only = true\n"))
        )
        one.run_guest(replace(guest, machine="pc-q35-7.2"), "lab-a", own_disk=True, more=more)

        async def there_and_back() -> None:
            async with loaded(one, guest) as control:
                await asyncio.sleep(0.5)
                for target in ("lab-b", "lab-a"):
                    await asyncio.to_thread(one.ok, "migrate", "kinds", target)
                    await control.ping()

        asyncio.run(there_and_back())
        stands_whole(one, "lab-a", "kinds")
        one.ok("vm", "stop", "kinds", "--force")
        assert images(one, "lab-b") == []
        for name in ("top.qcow2", "fixed.qcow2"):
            assert content(own / name) == digest, name
            assert allocated_bytes(own / name) < 2 * MIB, name
        assert allocated_bytes(own / "kinds.raw") < 48 * MIB


def content(path: Path) -> str:
    """A digest of what a guest reads."""
    raw = path.with_suffix(".check")
    qemu_img("convert", "-q", "-O", "raw", str(path), str(raw))
    digest = hashlib.sha256(raw.read_bytes()).hexdigest()
    raw.unlink()
    return digest


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("step", "bandwidth"),
    [("mirror", "2MB"), pytest.param("transfer", "30MB", marks=pytest.mark.long)],
)
def test_a_target_that_falls_silent_is_given_up(made: World, step: str, bandwidth: str) -> None:
    journal = made.state("lab-a") / "vms/mover/migration.json"

    async def silenced() -> None:
        async with loaded(made, LabGuest("mover", 1, image(), disk="128M")) as control:
            (before,) = made.qemus("mover")
            command = made.begin("migrate", "mover", "lab-b", "--bandwidth", bandwidth)
            await asyncio.to_thread(eventually, lambda: step_of(journal) == step, 30, step)
            await asyncio.sleep(0.5)
            (target,) = (one for one in made.qemus("mover") if one != before)
            process.kill(target, signal.SIGSTOP, wait_s=0)
            out, err = await asyncio.to_thread(command.communicate, timeout=80)
            assert command.returncode == 7, (out, err)
            assert "no progress" in out
            await asyncio.to_thread(stands_whole, made, "lab-a")
            await control.ping()

    asyncio.run(silenced())


def step_of(journal: Path) -> str | None:
    try:
        return str(json.loads(journal.read_text())["step"])
    except FileNotFoundError:
        return None


@pytest.mark.timeout(240)
@pytest.mark.long
@pytest.mark.parametrize("kind", EVERY_KIND)
def test_a_guest_that_writes_faster_than_its_disk_is_copied(kind: Kind) -> None:
    guest = LabGuest("writer", 4, image(), memory="96M", disk="128M", machine="pc-q35-7.2")
    # On a busy machine the guest may write no more than 5 MB/s.
    words = ("--bandwidth", "3MB", "--method", "stop")
    with hosts(kind, qemu("10.0"), qemu("7.2")) as one:
        one.run_guest(guest, "lab-a", own_disk=True)

        async def writes() -> None:
            control = await guest.control(one.lab)
            await control.load_disk("rate=24M size=16M")
            moved = await asyncio.to_thread(one.ok, "migrate", "writer", "lab-b", *words)
            record = json.loads(Path(moved["run_record"]).read_text())
            assert "disk-write-through" in [event.get("code") for event in record["events"]]
            # QEMU 7.2 cannot make a mirror write through: the copy is given up.
            back = await asyncio.to_thread(one.vmckpt, "migrate", "writer", "lab-a", *words)
            assert (back.code, "catch up" in back.error["what"]) == (7, True)
            disk = await control.verify_disk()
            assert disk.sound, disk
            await control.close()

        asyncio.run(writes())
        stands_whole(one, "lab-b", "writer")


def test_a_source_that_dies_while_it_is_copied_keeps_its_disk(made: World) -> None:
    (source,) = made.qemus("mover")
    command = made.begin("migrate", "mover", "lab-b", "--bandwidth", "2MB")
    eventually(lambda: images(made, "lab-b") != [], 10, "the copy is begun")
    time.sleep(1.0)
    assert process.kill(source)
    out, err = command.communicate(timeout=40)
    assert command.returncode in (7, 10), (out, err)
    shown = made.ok("vm", "show", "mover")
    assert (shown["host"], shown["state"]) == ("lab-a", "stopped")
    assert (made.qemus("mover"), images(made, "lab-b")) == ([], [])
    made.ok("vm", "start", "mover")
    stands_whole(made, "lab-a")
