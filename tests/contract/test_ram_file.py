"""RAM files that are not plain ones: in huge pages."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from vmckpt.hosts.processes import promises
from vmckpt.memory.ram_file import PAGE_BYTES, RamFile, open_fd

pytestmark = pytest.mark.contract
PAGES = 16


@pytest.fixture
def unwritable(tmp_path: Path) -> Iterator[int]:
    """A file that write(2) refuses as one in huge pages does: what it is given is not aligned."""
    path = tmp_path / "ram"
    path.write_bytes(b"x" * PAGES * PAGE_BYTES)
    with open_fd(os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)) as fd:
        try:
            os.pwrite(fd, odd(b"-" * 8), 0)
        except OSError as exc:
            assert exc.errno == errno.EINVAL
            yield fd
        else:
            pytest.skip("this file system takes it all the same")


def odd(data: bytes) -> memoryview:
    return memoryview(b"-" + data)[1:]


def test_a_file_that_cannot_be_written_is_filled_through_its_mapping(unwritable: int) -> None:
    """Checkpoints of VMs in huge pages could be taken, and not restored."""
    ram = RamFile(unwritable)
    pages = [bytes([number]) * PAGE_BYTES for number in (1, 2, 3)]
    ram.write([(0, PAGE_BYTES), (5 * PAGE_BYTES, 7 * PAGE_BYTES)], odd(b"".join(pages)))
    assert [ram.view[n * PAGE_BYTES] for n in (0, 4, 5, 6, 7)] == [1, ord("x"), 2, 3, ord("x")]
    ram.reserve()
    assert not any(ram.view)
    ram.close()


def test_where_huge_pages_are_mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "pages"
    (here / "below").mkdir(parents=True)
    (tmp_path / "link").symlink_to(here)
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/sda / ext4 rw 0 0\nnone {here} hugetlbfs rw,pagesize=2M 0 0\n")
    monkeypatch.setattr(promises, "_MOUNTS", mounts)
    assert promises.is_in_huge_pages(here / "below")
    assert promises.is_in_huge_pages(tmp_path / "link")
    assert not promises.is_in_huge_pages(tmp_path)


def test_huge_pages_that_are_mounted_without_a_size_are_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the role and systemd mount them: no VM was given any, "0 B are free"."""
    pool = tmp_path / "hugepages-2048kB"
    pool.mkdir()
    (pool / "free_hugepages").write_text("7\n")
    unlimited = SimpleNamespace(f_blocks=0, f_bavail=0, f_bsize=2 << 20, f_frsize=2 << 20)
    monkeypatch.setattr(promises, "_HUGE_PAGES", tmp_path)
    monkeypatch.setattr("os.statvfs", lambda _: unlimited)
    monkeypatch.setattr(promises, "is_in_huge_pages", lambda _: True)
    assert promises._room(tmp_path, 0, []).free_bytes == 14 << 20
    unlimited.f_blocks = unlimited.f_bavail = 3
    assert promises._room(tmp_path, 0, []).free_bytes == 6 << 20
