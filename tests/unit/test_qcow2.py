"""Images that are written whole. Whether QEMU takes them is tests/qemu's to say."""

import errno
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.qcow2 import read_qcow2
from vmckpt.checkpoint.disks.qcow2 import write_image, write_overlay
from vmckpt.qemu.disks.qcow2 import CLUSTER_BYTES, read_clusters

COUNT = 20


def chunks(numbers: list[int]) -> tuple["np.ndarray", bytes]:
    return np.array(numbers), b"".join(bytes([n + 1]) * CLUSTER_BYTES for n in numbers)


@pytest.mark.parametrize("tail", [0, 512])
def test_both_formats_hold_the_same(tmp_path: Path, tail: int) -> None:
    size = COUNT * CLUSTER_BYTES - tail
    pieces = [chunks([7, 8, 19]), chunks([0]), chunks([3])]
    write_image(tmp_path / "a.raw", "raw", size, pieces)
    write_image(tmp_path / "a.qcow2", "qcow2", size, pieces)
    raw = (tmp_path / "a.raw").read_bytes()
    assert len(raw) == size
    assert [raw[n * CLUSTER_BYTES] for n in (0, 1, 3, 7, 8, 19)] == [1, 0, 4, 8, 9, 20]
    assert read_qcow2(tmp_path / "a.qcow2") == raw


def test_one_that_was_begun_is_filled(tmp_path: Path) -> None:
    size = COUNT * CLUSTER_BYTES - 512
    pieces = [chunks([7, 8, 19]), chunks([0]), chunks([3])]
    for kind in ("raw", "qcow2"):
        path = tmp_path / f"a.{kind}"
        write_image(path, kind, size, [chunks([0])])
        begun = path.stat()
        write_image(path, kind, size, pieces, fills=True)
        assert path.stat().st_ino == begun.st_ino
    raw = (tmp_path / "a.raw").read_bytes()
    assert len(raw) == size
    assert [raw[n * CLUSTER_BYTES] for n in (0, 1, 3, 7, 8, 19)] == [1, 0, 4, 8, 9, 20]
    assert read_qcow2(tmp_path / "a.qcow2") == raw


def test_an_image_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("mine")
    with pytest.raises(FileExistsError):
        write_image(tmp_path / "a", "raw", 0, ())
    assert (tmp_path / "a").read_text() == "mine"


def test_of_one_that_breaks_off_nothing_stays(tmp_path: Path) -> None:
    def broken() -> Iterator[tuple["np.ndarray", bytes]]:
        yield chunks([1])
        raise OSError(28, "full")

    with pytest.raises(OSError, match="full"):
        write_image(tmp_path / "a", "qcow2", COUNT * CLUSTER_BYTES, broken())
    assert not list(tmp_path.iterdir())


def test_an_overlay_names_what_is_below(tmp_path: Path) -> None:
    write_overlay(tmp_path / "over", COUNT * CLUSTER_BYTES, Path("/images/below"), "raw")
    data = (tmp_path / "over").read_bytes()
    at, length = struct.unpack_from(">QI", data, 8)
    assert data[at : at + length] == b"/images/below"
    assert data[104:112] == struct.pack(">II", 0xE2792ACA, 3)


def test_tables_that_a_disk_cannot_read_are_not_taken_for_shorter_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that meets a bad sector returns what lies before it, without an error."""
    path, count = tmp_path / "disk.qcow2", 1500
    chunks = [(np.arange(count), np.ones(count * CLUSTER_BYTES, np.uint8))]
    write_image(path, "qcow2", count * CLUSTER_BYTES, chunks)
    right = os.pread

    def pread(fd: int, length: int, at: int) -> bytes:
        if at == (count + 1) * CLUSTER_BYTES:
            return right(fd, 8192, at)
        if at == (count + 1) * CLUSTER_BYTES + 8192:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return right(fd, length, at)

    with path.open("rb") as file:
        assert read_clusters(file.fileno()).file_clusters.all()
        monkeypatch.setattr(os, "pread", pread)
        with pytest.raises(OSError, match="Input/output"):
            read_clusters(file.fileno())
