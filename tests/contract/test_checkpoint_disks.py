"""A checkpoint's disks outside a VM: exported, served over NBD, mounted; or nothing of it."""

import asyncio
import errno
import json
import os
import re
import select
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ctypes.util import find_library
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.commands import COMMAND, vmckpt
from tests.unit.test_checkpoint_tree import facts
from vmckpt.checkpoint.catalogue.catalogue import CatalogueEntry, catalogue
from vmckpt.checkpoint.disks.export import ExportFile, export_disk, format_of
from vmckpt.checkpoint.disks.stored_disks import stored_disks
from vmckpt.checkpoint.facts import DiskFacts
from vmckpt.errors import NotFoundError, RefusedError, StorageError, UsageError
from vmckpt.hosts.inventory.inventory import all_hosts
from vmckpt.qemu.disks.qcow2 import CLUSTER_BYTES, read_clusters
from vmckpt.store.errors import DamagedError
from vmckpt.store.files.manifest import BLOCK_CHUNK_BYTES, PAGE_CHUNK_BYTES, AreaFacts, Manifest
from vmckpt.store.files.pack import PACKS
from vmckpt.store.open import create_store, open_store

# Not a whole number of clusters.
SIZE = 20 * CLUSTER_BYTES + 5120
FUSE = Path("/dev/fuse").exists() and find_library("fuse3") is not None and os.geteuid() == 0
needs_fuse = pytest.mark.skipif(not FUSE, reason="takes /dev/fuse, libfuse 3 and root")


def content() -> bytes:
    """Noise, holes, and a last cluster that is not whole."""
    rng = np.random.default_rng(7)
    data = bytearray(SIZE)
    for cluster in (0, 3, 4, 11, 20):
        start = cluster * CLUSTER_BYTES
        noise = rng.bytes(min(CLUSTER_BYTES, SIZE - start))
        data[start : start + len(noise)] = noise
    return bytes(data)


def disks(size_bytes: int = SIZE) -> tuple[DiskFacts, ...]:
    return (
        DiskFacts("/iso", "raw", 4096, read_only=True, area=None),
        DiskFacts("/images/web.qcow2", "qcow2", size_bytes, read_only=False, area="disk-0"),
    )


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory whose store has the checkpoint `one`."""
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path))
    make(tmp_path, replace(facts("one"), disks=disks()).to_json())
    return tmp_path


def make(state: Path, said: dict[str, object]) -> None:
    location = str(state / "checkpoints")
    store = open_store(location) if (state / "checkpoints").exists() else create_store(location)
    with store, store.begin("web") as new:
        padded = content().ljust(21 * CLUSTER_BYTES, b"\0")
        area = new.area("disk-0", size_bytes=len(padded), chunk_bytes=BLOCK_CHUNK_BYTES)
        area.put(np.arange(21), padded)
        new.area("ram", size_bytes=64 << 20, chunk_bytes=PAGE_CHUNK_BYTES)
        new.commit(said)


def one() -> CatalogueEntry:
    return asyncio.run(catalogue(all_hosts(), None)).find("one")


def leftovers(state: Path) -> list[str]:
    return [path.name for path in state.iterdir() if "part-" in path.name]


def raw(path: Path) -> bytes:
    """What a qcow2 image says that its disk holds."""
    with path.open("rb") as file:
        found = read_clusters(file.fileno())
        data = bytearray(found.size_bytes)
        for number, at in enumerate(found.file_clusters.tolist()):
            if at:
                file.seek(at * CLUSTER_BYTES)
                start = number * CLUSTER_BYTES
                whole = file.read(CLUSTER_BYTES)
                data[start : start + CLUSTER_BYTES] = whole[: found.size_bytes - start]
    return bytes(data)


@pytest.mark.parametrize("name", ["out.raw", "out.qcow2"])
def test_an_exported_disk_is_the_disk_and_sparse(state: Path, name: str) -> None:
    target, image = state / name, ExportFile(state / name, format_of(state / name, None))
    heard: list[tuple[int, int]] = []
    done = asyncio.run(export_disk(one(), "disk-0", image, lambda *now: heard.append(now)))
    assert done.written_bytes == 5 * CLUSTER_BYTES
    assert (heard[0], heard[-1]) == ((0, done.written_bytes), (done.written_bytes,) * 2)
    assert (target.read_bytes() if name == "out.raw" else raw(target)) == content()
    assert target.stat().st_blocks * 512 < 10 * CLUSTER_BYTES
    assert target.stat().st_mode & 0o777 == 0o600
    assert leftovers(state) == []
    with pytest.raises(RefusedError, match="exists"):
        asyncio.run(export_disk(one(), "disk-0", image, lambda *_: None))


def test_an_export_as_it_is_typed(state: Path) -> None:
    # By the path of its image, too; progress is on stderr.
    words = ("checkpoint", "export-disk", "one", "/images/web.qcow2", str(state / "x.raw"))
    done = vmckpt(state, *words)
    assert (done.returncode, "100 %" in done.stderr) == (0, True)
    assert json.loads(vmckpt(state, *words, "--json").stdout)["error"]["exit_code"] == 4


def test_what_cannot_be_exported_is_said(state: Path) -> None:
    def export(disk: str, path: Path) -> None:
        asyncio.run(export_disk(one(), disk, ExportFile(path, "raw"), lambda *_: None))

    with pytest.raises(NotFoundError) as none:
        export("disk-7", state / "x.raw")
    assert "disk-0 (/images/web.qcow2)" in none.value.why
    with pytest.raises(StorageError):
        export("disk-0", state / "none" / "x.raw")
    (state / "link.raw").symlink_to(state / "elsewhere")
    with pytest.raises(RefusedError):
        export("disk-0", state / "link.raw")
    assert not (state / "elsewhere").exists()
    with pytest.raises(UsageError):
        format_of(Path("x.vmdk"), None)
    with pytest.raises(UsageError):
        format_of(Path("x.raw"), "vmdk")
    assert (format_of(Path("x.img"), None), format_of(Path("x"), "qcow2")) == ("raw", "qcow2")


def test_damage_leaves_no_file(state: Path) -> None:
    (pack,) = (state / "checkpoints" / PACKS).glob("[0-9a-f]*")
    data = bytearray(pack.read_bytes())
    data[200] ^= 1
    pack.write_bytes(data)
    with pytest.raises(DamagedError):
        asyncio.run(
            export_disk(one(), "disk-0", ExportFile(state / "x.raw", "raw"), lambda *_: None)
        )
    assert not (state / "x.raw").exists()
    assert leftovers(state) == []


def test_a_cancelled_export_leaves_no_file(state: Path) -> None:
    async def cancelled() -> None:
        begun, loop = asyncio.Event(), asyncio.get_running_loop()

        def moved(done: int, total: int) -> None:
            loop.call_soon_threadsafe(begun.set)
            if done == 0:
                # The thread goes on when the loop has cancelled the export.
                asyncio.run_coroutine_threadsafe(asyncio.sleep(0.2), loop).result()

        work = asyncio.ensure_future(
            export_disk(one_, "disk-0", ExportFile(state / "x.raw", "raw"), moved)
        )
        await begun.wait()
        assert len(leftovers(state)) == 1  # under another name
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    one_ = one()
    asyncio.run(cancelled())
    assert not (state / "x.raw").exists()
    assert leftovers(state) == []


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_disk_is_exported_to_a_file_system_without_hard_links(
    state: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def link(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", link)
    (folder := state / "usb").mkdir()
    image = ExportFile(folder / "web.raw", "raw")
    asyncio.run(export_disk(one(), "disk-0", image, lambda *_: None))
    assert [path.name for path in folder.iterdir()] == ["web.raw"]
    assert image.path.read_bytes() == content()


def test_a_file_that_came_meanwhile_is_not_overwritten(state: Path) -> None:
    target = state / "x.raw"

    def moved(done: int, total: int) -> None:
        target.write_text("another's")

    with pytest.raises(RefusedError, match="exists"):
        asyncio.run(export_disk(one(), "disk-0", ExportFile(target, "raw"), moved))
    assert target.read_text() == "another's"
    assert leftovers(state) == []


@pytest.mark.parametrize("size_bytes", [0, -1, 1 << 60, SIZE + CLUSTER_BYTES, CLUSTER_BYTES])
def test_facts_that_do_not_fit_what_is_stored_are_damage(state: Path, size_bytes: int) -> None:
    make(state, replace(facts("forged"), disks=disks(size_bytes)).to_json())
    with (
        open_store(str(state / "checkpoints")) as store,
        pytest.raises((DamagedError, RefusedError)),
    ):
        stored_disks(store.find("forged"))


@contextmanager
def running(state: Path, *words: str) -> Iterator["tuple[subprocess.Popen[str], str]"]:
    """A command that runs until it is ended, and its first line."""
    with subprocess.Popen(
        [*COMMAND, *words, "--json"],
        env=os.environ | {"VMCKPT_STATE_DIR": str(state)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as command:
        assert command.stdout is not None
        try:
            assert select.select([command.stdout], [], [], 30)[0], "it says nothing"
            yield command, command.stdout.readline()
        finally:
            command.kill()


def ended(command: "subprocess.Popen[str]") -> str:
    """What it said on stderr when it was asked to end."""
    command.send_signal(signal.SIGINT)
    _, said = command.communicate(timeout=30)
    assert (command.returncode, "Traceback" in said) == (0, False), said
    return said


@pytest.mark.parametrize("name", ["../disk-0", "a/b", "..", "ram", "disk-0\n", "disk-", "x" * 200])
def test_no_disk_has_a_name_that_is_none(name: str) -> None:
    """It becomes the name of a file in a mount, and of an export."""
    area = AreaFacts(name, BLOCK_CHUNK_BYTES, BLOCK_CHUNK_BYTES, 0, 0, 0)
    disk = DiskFacts("/x", "raw", BLOCK_CHUNK_BYTES, read_only=False, area=name)
    words = replace(facts("one"), disks=(disk,)).to_json()
    manifest = Manifest("0" * 32, "web", None, 0, 0, (area,), (), (), words)
    with pytest.raises(DamagedError):
        stored_disks(manifest)


def test_disks_are_served_over_nbd_read_only(state: Path) -> None:
    path = state / "nbd"
    words = ("checkpoint", "serve-disk", "one", str(path))
    with running(state, *words) as (command, said):
        assert json.loads(said)["exports"] == ["disk-0"]
        assert path.stat().st_mode & 0o077 == 0
        with socket.socket(socket.AF_UNIX) as raw_:
            raw_.connect(str(path))
            export = Reading(raw_)
            assert export.size == SIZE
            for start, length in ((0, SIZE), (5, 70_000), (SIZE - 3, 3), (CLUSTER_BYTES, 512)):
                assert export.read(start, length) == (0, content()[start : start + length])
            assert export.read(SIZE - 1, 2)[0] == EINVAL
            assert export.write(0, b"x" * 512) == EPERM
            assert export.read(0, 512) == (0, content()[:512])  # the stream goes on
        # Meanwhile the checkpoint is not removed.
        assert vmckpt(state, "checkpoint", "rm", "one").returncode == 5
        assert vmckpt(state, *words).returncode == 4
        ended(command)
    assert not path.exists()


EPERM, EINVAL = 1, 22


class Reading:
    """A client of its own: `NbdExport` asks for what this server does not offer."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        assert self._take(18).startswith(b"NBDMAGICIHAVEOPT")
        sock.sendall((3).to_bytes(4))
        assert self._option(3, b"")[0] == (2, b"\0\0\0\6disk-0")
        for option in (6, 7):
            answers = self._option(option, b"\0\0\0\6disk-0\0\0")
            self.size = int.from_bytes(answers[0][1][2:10])
            assert answers[0][1][10:] == (1 | 2 | 256).to_bytes(2)

    def read(self, start: int, length: int) -> tuple[int, bytes]:
        error = self._request(0, start, length, b"")
        return error, b"" if error else self._take(length)

    def write(self, start: int, data: bytes) -> int:
        return self._request(1, start, len(data), data)

    def _request(self, kind: int, start: int, length: int, data: bytes) -> int:
        words = (0x25609513, 4), (0, 2), (kind, 2), (9, 8), (start, 8), (length, 4)
        self._sock.sendall(b"".join(word.to_bytes(size) for word, size in words) + data)
        reply = self._take(16)
        assert (reply[:4], reply[8:]) == (b"\x67\x44\x66\x98", (9).to_bytes(8))
        return int.from_bytes(reply[4:8])

    def _option(self, option: int, data: bytes) -> list[tuple[int, bytes]]:
        head = b"IHAVEOPT" + option.to_bytes(4) + len(data).to_bytes(4)
        self._sock.sendall(head + data)
        found = []
        while True:
            answer = self._take(20)
            kind, length = int.from_bytes(answer[12:16]), int.from_bytes(answer[16:])
            found.append((kind, self._take(length)))
            if kind == 1 or kind >> 31:
                return found

    def _take(self, length: int) -> bytes:
        data = b""
        while len(data) < length:
            more = self._sock.recv(length - len(data))
            assert more, "the server has ended"
            data += more
        return data


@needs_fuse
def test_disks_are_mounted_as_raw_images_until_it_is_ended(state: Path) -> None:
    folder = state / "mount"
    folder.mkdir()
    words = ("checkpoint", "mount", "one", str(folder))
    with running(state, *words) as (command, said):
        file = folder / "disk-0.raw"
        assert json.loads(said)["files"] == [str(file)]
        assert (os.listdir(folder), file.read_bytes()) == (["disk-0.raw"], content())
        with file.open("rb") as reading:
            reading.seek(CLUSTER_BYTES * 3 + 100)
            assert reading.read(1000) == content()[CLUSTER_BYTES * 3 + 100 :][:1000]
        with pytest.raises(OSError, match="Read-only"):
            file.open("r+b")
        assert vmckpt(state, "checkpoint", "rm", "one").returncode == 5
        assert vmckpt(state, *words).returncode == 4  # not empty
        ended(command)
    assert (os.path.ismount(folder), os.listdir(folder)) == (False, [])
    # By umount, too; and with a file open it ends all the same.
    with running(state, *words) as (command, _):
        subprocess.run(["umount", str(folder)], check=True)
        command.communicate(timeout=30)
        assert command.returncode == 0
    with running(state, *words) as (command, _):
        fd = os.open(folder / "disk-0.raw", os.O_RDONLY)
        ended(command)
    with suppress(OSError):  # what it was of is not connected any longer
        os.close(fd)
    assert not os.path.ismount(folder)


@needs_fuse
def test_damage_is_an_input_output_error_and_is_told(state: Path) -> None:
    (pack,) = (state / "checkpoints" / PACKS).glob("[0-9a-f]*")
    data = bytearray(pack.read_bytes())
    data[200] ^= 1
    pack.write_bytes(data)
    folder = state / "mount"
    folder.mkdir()
    with running(state, "checkpoint", "mount", "one", str(folder)) as (command, _):
        with pytest.raises(OSError, match="Input/output"):
            (folder / "disk-0.raw").read_bytes()
        assert re.search(r"cannot be read: .*pack", ended(command))


@needs_fuse
def test_a_mount_whose_process_was_killed_is_named(state: Path) -> None:
    folder = state / "mount"
    folder.mkdir()
    words = ("checkpoint", "mount", "one", str(folder))
    with running(state, *words) as (command, _):
        command.kill()
        command.wait()
    done = vmckpt(state, *words)
    assert (done.returncode, f"umount {folder}" in done.stderr) == (4, True)
    subprocess.run(["umount", str(folder)], check=True)
