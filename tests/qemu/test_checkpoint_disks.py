"""The disks of a real guest's checkpoint: exported, mounted, and restored without its machine."""

import asyncio
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.contract.test_checkpoint_disks import ended, needs_fuse, running
from tests.qemu.world import World, image, qemu, world
from tests.waiting import eventually
from vmckpt.lab.guests.labguest import LabGuest
from vmckpt.store.open import open_store
from vmckpt.store.transaction import Origin

SECRET = "what the file says\n"


def guest() -> LabGuest:
    return LabGuest("guest", 1, image(), memory="192M", disk="32M")


@pytest.fixture(scope="module")
def made() -> Iterator[World]:
    """A guest with a qcow2 disk and a raw one with ext4; its checkpoint `before`."""
    with world(qemu("10.0")) as one:
        tree = one.shared / "tree"
        tree.mkdir()
        (tree / "file").write_text(SECRET)
        files = one.shared / "files.raw"
        with files.open("wb") as file:
            file.truncate(16 << 20)
        subprocess.run(["mke2fs", "-q", "-t", "ext4", "-d", tree, files], check=True)
        more = '\n[[disks]]\npath = "files.raw"\nformat = "raw"\n'
        one.run_guest(guest(), "lab-a", more=more)
        asyncio.run(write_disk(one))
        one.ok("checkpoint", "create", "guest", "--name", "before")
        yield one


async def write_disk(made: World) -> None:
    control = await guest().control(made.lab)
    await control.load_disk("rate=2M size=16M")
    await asyncio.sleep(3)
    await control.close()


def records(made: World) -> Any:
    async def read() -> Any:
        control = await guest().control(made.lab)
        try:
            return await control.verify_disk()
        finally:
            await control.close()

    return asyncio.run(read())


def qemu_img(*words: str | Path) -> str:
    program = qemu("10.0").parent / "qemu-img"
    done = subprocess.run([program, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout, done.stderr)
    return done.stdout


def test_a_name_that_is_taken(made: World) -> None:
    taken = made.vmckpt("checkpoint", "create", "guest", "--name", "before")
    assert taken.error["exit_code"] == 4
    first = made.ok("checkpoint", "create", "guest", "--name", "again")
    second = made.ok("checkpoint", "create", "guest", "--name", "again", "--replace")
    assert second["replaced"] == [first["id"]]
    made.ok("checkpoint", "rm", "again")


def test_exported_images_are_the_disks(made: World, tmp_path: Path) -> None:
    for name in ("out.qcow2", "out.raw"):
        told = made.ok("checkpoint", "export-disk", "before", "disk-0", str(tmp_path / name))
        assert told["size_bytes"] == 32 << 20
    qemu_img("check", tmp_path / "out.qcow2")
    qemu_img("compare", tmp_path / "out.qcow2", tmp_path / "out.raw")
    files = tmp_path / "files.raw"
    made.ok("checkpoint", "export-disk", "before", "disk-1", str(files))
    qemu_img("compare", "-f", "raw", "-F", "raw", files, made.shared / "files.raw")
    path = tmp_path / "nbd"
    words = ("checkpoint", "serve-disk", "before", str(path))
    with running(made.state_dir, *words) as (command, said):
        assert json.loads(said)["exports"] == ["disk-0", "disk-1"]
        for number, exported in enumerate(("out.raw", "files.raw")):
            url = f"nbd+unix:///disk-{number}?socket={path}"
            qemu_img("compare", "-f", "raw", "-F", "raw", url, tmp_path / exported)
        ended(command)


def test_a_checkpoint_in_the_place_of_the_last_one_is_no_start_for_the_next(
    made: World, tmp_path: Path
) -> None:
    """A client that may only add puts it there once the owner has removed the right one: the next
    checkpoint had its blocks wherever the guest had written nothing since.
    """
    last = made.ok("checkpoint", "create", "guest", "--name", "last")["id"]
    with open_store(str(made.state("lab-a") / "checkpoints")) as store:
        right = store.manifest(last)
        store.remove([last])
        origin = Origin(last, right.vm, right.parent, right.created_unix_s, right.vm_id)
        with store.begin(right.vm, origin=origin._replace(sequence=right.sequence)) as new:
            for one in right.areas:
                sizes = {"size_bytes": one.size_bytes, "chunk_bytes": one.chunk_bytes}
                number = np.arange(-(-one.size_bytes // one.chunk_bytes))
                new.area(one.name, **sizes).put(number, b"\xee" * one.chunk_bytes * len(number))
            for blob in right.blobs:
                new.blob(blob.name, b"")
            new.commit(right.facts)
    made.ok("checkpoint", "create", "guest", "--name", "next")
    files = tmp_path / "files.raw"
    made.ok("checkpoint", "export-disk", "next", "disk-1", str(files))
    qemu_img("compare", "-f", "raw", "-F", "raw", files, made.shared / "files.raw")
    for name in ("next", "last"):
        made.ok("checkpoint", "rm", name)


def test_only_what_was_written_since_the_last_checkpoint_is_read(made: World) -> None:
    made.ok("checkpoint", "create", "guest", "--name", "one")
    again = made.ok("checkpoint", "create", "guest", "--name", "two")
    with open_store(str(made.state("lab-a") / "checkpoints")) as store:
        (raw,) = (one for one in store.manifest(again["id"]).areas if one.name == "disk-1")
    assert raw.given_chunks == 0  # the guest does not use it
    for name in ("one", "two"):
        made.ok("checkpoint", "rm", name)


@needs_fuse
def test_a_file_system_in_a_mounted_checkpoint(made: World, tmp_path: Path) -> None:
    folder, files = tmp_path / "images", tmp_path / "files"
    folder.mkdir()
    files.mkdir()
    with running(made.state_dir, "checkpoint", "mount", "before", str(folder)) as (command, _):
        options = ["-o", "loop,ro,noload"]
        subprocess.run(["mount", *options, folder / "disk-1.raw", files], check=True)
        try:
            assert (files / "file").read_text() == SECRET
        finally:
            subprocess.run(["umount", files], check=True)
        ended(command)


def test_a_fork_has_the_content_of_a_raw_disk(made: World) -> None:
    (told,) = made.ok("fork", "before", "--count", "1", "--name", "f")["forks"]
    assert told["error"] == ""
    image = Path(made.ok("vm", "show", "f-1")["disks"][1])
    assert image.suffix == ".qcow2"  # as QEMU opens it
    words = ("compare", "--force-share", "-f", "qcow2", "-F", "raw")
    qemu_img(*words, image, made.shared / "files.raw")
    made.ok("vm", "stop", "f-1", "--force")
    made.ok("vm", "rm", "f-1", "--disks")


def test_its_disks_alone_for_a_copy_that_boots(made: World) -> None:
    told = made.ok("checkpoint", "restore", "before", "--disks-only", "--as", "copy")
    assert made.ok("vm", "show", "copy")["state"] == "stopped"
    first, second = map(Path, told["disks"])
    qemu_img("check", first)
    assert second.read_bytes() == (made.shared / "files.raw").read_bytes()
    started = made.vmckpt("vm", "start", "copy")
    assert started.code == 0, started
    logs = made.state("lab-a") / "vms" / "copy"

    def is_up() -> bool:
        return any(
            "VK-READY" in log.read_text("utf-8", "replace") for log in logs.glob("*/console.log")
        )

    eventually(is_up, 60, "the copy is up")
    made.ok("vm", "stop", "copy", "--force")
    made.ok("vm", "rm", "copy")
    again = made.vmckpt("checkpoint", "restore", "before", "--disks-only", "--as", "copy")
    assert again.error["exit_code"] == 4  # its images are still there
    whole = made.vmckpt("checkpoint", "restore", "before", "--as", "copy")
    assert (whole.error["exit_code"], first.exists(), second.exists()) == (4, True, True)
    for path in (first, second):
        path.unlink()


def test_its_disks_alone_in_place_of_a_vm_that_is_off(made: World) -> None:
    words = ("checkpoint", "restore", "before", "--disks-only", "--in-place")
    refused = made.vmckpt(*words)
    assert (refused.error["exit_code"], "vm stop" in refused.error["remedy"]) == (4, True)
    made.ok("vm", "stop", "guest", "--force")
    (made.shared / "files.raw").write_bytes(bytes(16 << 20))
    spec = made.state("lab-a") / "vms" / "guest" / "spec.toml"
    spec.write_text(spec.read_text().replace('"192M"', '"224M"'))  # another machine
    told = made.ok(*words)
    assert made.ok("vm", "show", "guest")["state"] == "stopped"
    assert sorted(map(Path, told["disks"])) == [
        made.shared / "files.raw",
        made.shared / "guest.qcow2",
    ]
    assert '"224M"' in spec.read_text()
    assert not list(made.shared.glob("*.vmckpt-*"))
    assert not list(spec.parent.glob("restore.json"))
    listing = subprocess.run(
        ["debugfs", "-R", "cat file", made.shared / "files.raw"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert listing.stdout == SECRET
    made.ok("vm", "start", "guest")
    found = records(made)
    assert found.sound, found
    made.ok("checkpoint", "create", "guest", "--name", "later")


@pytest.mark.parametrize("words", [("--eager",), ("--kind", "internal", "--vm", "guest")])
def test_what_makes_no_sense_of_disks_alone(made: World, words: tuple[str, ...]) -> None:
    done = made.vmckpt("checkpoint", "restore", "before", "--disks-only", *words)
    assert done.error["exit_code"] == 2


@pytest.mark.timeout(300)
def test_internal_snapshots_are_not_lost_without_a_word() -> None:
    with world(qemu("10.0")) as made:
        made.run_guest(guest(), "lab-a")
        made.ok("checkpoint", "create", "guest", "--kind", "internal", "--name", "golden")
        made.ok("checkpoint", "create", "guest", "--name", "before")
        made.ok("checkpoint", "create", "guest", "--kind", "internal", "--name", "later")
        refused = made.vmckpt("checkpoint", "restore", "before", "--in-place")
        assert (refused.code, "[disk-snapshots]" in refused.error["why"]) == (4, True)
        assert "lost: golden" in refused.error["why"]
        assert "later" not in refused.error["why"]
        made.ok("checkpoint", "rm", "golden", "--kind", "internal", "--vm", "guest")
        made.ok("checkpoint", "restore", "before", "--in-place")
