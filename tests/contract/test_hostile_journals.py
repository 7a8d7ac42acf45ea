"""A host that was broken into tells of migrations that never were: other hosts lose nothing."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.silent_ends import SPEC, make_home, marked_as
from vmckpt.errors import StorageError
from vmckpt.hosts.local import LocalHost
from vmckpt.migrate.disk_files import CopiedDisk
from vmckpt.migrate.journal import Journal
from vmckpt.migrate.recover import recover
from vmckpt.vm.inventory import read_vm
from vmckpt.vm.paths import vm_dir

pytestmark = pytest.mark.contract
# "It came to me, and its source is to be cleared."
CLAIM = Journal("r1", "web", "good", "evil", "qa", "qb", "/nowhere", True, "handover")


class Site:
    """A host of good standing, and another."""

    def __init__(self, path: Path) -> None:
        self.good, self.evil = (LocalHost(n, path / n, "127.0.0.1") for n in ("good", "evil"))
        self.notes: list[str] = []

    async def told(self, journal: Journal) -> None:
        """`evil` has the journal, and says that the VM is at home there."""
        await make_home(self.evil, journal.target_qemu)
        await journal.write((self.evil,))

    async def recover(self) -> object:
        return await recover("web", self.notes.append, (self.good, self.evil))


@pytest.fixture
def site(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(short_path / "operator"))
    return Site(short_path)


def test_a_vm_at_home_elsewhere_is_not_ended_nor_its_disks_removed(site: Site) -> None:
    image = site.good.state_dir / "images/web.raw"

    async def play() -> None:
        await make_home(site.good, "qa")
        image.parent.mkdir()
        image.write_bytes(b"guest")
        await site.told(CLAIM._replace(disks=(CopiedDisk(str(image), "/x"),)))
        with marked_as(vm_dir(site.good.state_dir, "web").qemu("qa")) as process:
            await site.recover()
            assert process.poll() is None
        assert await read_vm(site.good, "web") is not None

    asyncio.run(play())
    assert image.read_bytes() == b"guest"
    assert not vm_dir(site.evil.state_dir, "web").journal.exists()


def test_files_of_another_host_are_no_disks_to_be_removed(site: Site) -> None:
    """Of a VM that the other host has nothing of: only its own images that nothing uses go."""
    images = site.good.state_dir / "images"
    precious, used, free = images.parent / "precious", images / "db.raw", images / "left.raw"

    async def play() -> None:
        images.mkdir(parents=True)
        for file in (precious, used, free):
            file.write_bytes(b"x")
        directory = vm_dir(site.good.state_dir, "db")
        directory.path.mkdir(parents=True)
        directory.spec.write_text(
            SPEC.replace("web", "db") + '[[disks]]\nimage = "db.raw"\nformat = "raw"\n'
        )
        disks = tuple(CopiedDisk(str(file), "/x") for file in (precious, used, free))
        await site.told(CLAIM._replace(disks=disks))
        await site.recover()

    asyncio.run(play())
    assert precious.exists()
    assert used.exists()
    assert not free.exists(), "what a migration that was cut off left is removed"


def test_of_a_migration_that_was_cut_off_only_its_own_disks_are_removed(site: Site) -> None:
    """The target adds files to the list."""
    images = site.good.state_dir / "images"
    precious, moved = images.parent / "precious", images / "web.raw"
    disk = CopiedDisk(str(moved), "/x")

    async def play() -> None:
        images.mkdir(parents=True)
        for file in (precious, moved):
            file.write_bytes(b"x")
        await make_home(site.good, "qa")
        await CLAIM._replace(disks=(disk,)).write((site.good,))
        added = (disk, CopiedDisk(str(precious), "/x"))
        await site.told(CLAIM._replace(disks=added, step="release"))
        await site.recover()

    asyncio.run(play())
    assert precious.exists()
    assert not moved.exists()


HOSTILE: dict[str, dict[str, Any]] = {
    "another VM's": {"vm": "db"},
    "path as run": {"run": "../../x"},
    "path as QEMU": {"source_qemu": "x/../../db/qemu-1"},
    "no text": {"target_qemu": 7},
    "no disks": {"disks": [{"source": 1, "target": []}]},
    "no flag": {"was_running": "yes"},
    "no platform": {"platform": ["q35"]},
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_journal_that_is_none_is_damaged(site: Site, what: str) -> None:
    async def play() -> None:
        await site.told(CLAIM)
        path = vm_dir(site.evil.state_dir, "web").journal
        path.write_text(json.dumps(json.loads(path.read_text()) | HOSTILE[what]))
        with pytest.raises(StorageError, match="is damaged"):
            await Journal.read(site.evil, "web")

    asyncio.run(play())
