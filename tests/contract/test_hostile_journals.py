"""A host that was broken into tells of migrations that never were: other hosts lose nothing."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.faulty_host import Fault, FaultyHost, down
from tests.silent_ends import make_home, marked_as
from vmckpt.errors import HostDownError, StorageError
from vmckpt.hosts.local import LocalHost
from vmckpt.migrate.outcome.journal import MigrationJournal, find_journal
from vmckpt.migrate.outcome.recover import recover
from vmckpt.migrate.steps.disk_files import MovedDisk
from vmckpt.vm.inventory import read_vm
from vmckpt.vm.paths import vm_dir

pytestmark = pytest.mark.contract
# "It came to me, and its source is to be cleared."
CLAIM = MigrationJournal("r1", "web", "good", "evil", "qa", "qb", "/nowhere", True, "handover")


class Site:
    """A host of good standing, and another."""

    def __init__(self, path: Path) -> None:
        self.good, self.evil = (LocalHost(n, path / n, "127.0.0.1") for n in ("good", "evil"))
        self.notes: list[str] = []

    async def told(self, journal: MigrationJournal) -> None:
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
        await site.told(replace(CLAIM, disks=(MovedDisk(str(image), "/x"),)))
        with marked_as(vm_dir(site.good.state_dir, "web").qemu("qa")) as process:
            await site.recover()
            assert process.poll() is None
        assert await read_vm(site.good, "web") is not None

    asyncio.run(play())
    assert image.read_bytes() == b"guest"
    assert not vm_dir(site.evil.state_dir, "web").journal.exists()


def test_files_of_another_host_are_no_disks_to_be_removed(site: Site) -> None:
    """Nor its images that no VM uses: `vm rm` keeps those for their owner."""
    images = site.good.state_dir / "images"
    precious, kept = images.parent / "precious", images / "kept.raw"

    async def play() -> None:
        images.mkdir(parents=True)
        for file in (precious, kept):
            file.write_bytes(b"x")
        disks = tuple(MovedDisk(str(file), "/x") for file in (precious, kept))
        await site.told(replace(CLAIM, disks=disks))
        await site.recover()

    asyncio.run(play())
    assert precious.exists()
    assert kept.exists()


def test_a_run_between_two_hosts_is_not_a_third_ones(site: Site, tmp_path: Path) -> None:
    """Which knows its name, and says that the guest has come to it."""
    other = LocalHost("other", tmp_path / "other", "127.0.0.1")
    genuine = replace(CLAIM, target="other", step="prepare")

    async def play() -> None:
        await make_home(site.good, "qa")
        await genuine.write((site.good, other))
        await site.told(CLAIM)
        hosts = (site.good, site.evil, other)
        assert await find_journal("web", hosts) == genuine
        await genuine.remove((other,))  # of one end alone it is weighed with the other's
        with marked_as(vm_dir(site.good.state_dir, "web").qemu("qa")) as process:
            await recover("web", site.notes.append, hosts)
            assert process.poll() is None
        assert await read_vm(site.good, "web") is not None

    asyncio.run(play())


def test_a_journal_of_others_hides_no_migration(site: Site, tmp_path: Path) -> None:
    """It stayed cut off, and its VM with it, whatever was told of a later one."""
    other = LocalHost("other", tmp_path / "other", "127.0.0.1")
    genuine = replace(CLAIM, target="other", step="prepare")

    async def play() -> None:
        await genuine.write((site.good,))
        await replace(CLAIM, run="r2", target="other").write((site.evil,))
        assert await find_journal("web", (site.good, site.evil, other)) == genuine

    asyncio.run(play())


def test_the_sources_own_list_of_disks_outlasts_them(site: Site) -> None:
    """It is what removes them later: after its QEMU and directory had gone they stayed."""
    image = site.good.state_dir / "images/web.raw"

    async def play() -> None:
        await site.good.make_dir(image.parent)
        image.write_bytes(b"x")
        await make_home(site.good, "qa")
        journal = replace(CLAIM, disks=(MovedDisk(str(image), "/x"),), step="release")
        await journal.write((site.good,))
        await site.told(journal)
        as_it_goes = Fault("remove", raises=down, of=lambda path: path == image)
        good = site.good
        dies = FaultyHost(good.name, good.state_dir, "127.0.0.1", faults=(as_it_goes,))
        with pytest.raises(HostDownError):
            await recover("web", site.notes.append, (dies, site.evil))
        assert image.exists()
        await site.recover()

    asyncio.run(play())
    assert not image.exists()


def test_of_a_migration_that_was_cut_off_only_its_own_disks_are_removed(site: Site) -> None:
    """The target adds files to the list."""
    images = site.good.state_dir / "images"
    precious, moved = images.parent / "precious", images / "web.raw"
    disk = MovedDisk(str(moved), "/x")

    async def play() -> None:
        images.mkdir(parents=True)
        for file in (precious, moved):
            file.write_bytes(b"x")
        await make_home(site.good, "qa")
        await replace(CLAIM, disks=(disk,)).write((site.good,))
        added = (disk, MovedDisk(str(precious), "/x"))
        await site.told(replace(CLAIM, disks=added, step="release"))
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
            await MigrationJournal.read(site.evil, "web")

    asyncio.run(play())
