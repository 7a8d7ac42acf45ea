"""What stands on both hosts while a VM moves between them."""

import asyncio
from pathlib import Path

import pytest

from tests.silent_ends import make_home
from vmckpt.hosts.local import LocalHost
from vmckpt.migrate.outcome.journal import MigrationJournal
from vmckpt.migrate.outcome.recover import UNDONE, recover
from vmckpt.state.durable import part_of
from vmckpt.vm.paths import vm_dir

pytestmark = pytest.mark.contract


def test_a_command_killed_as_it_wrote_the_targets_journal_leaves_nothing_there(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It left a directory with half a journal, for good."""
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(short_path / "operator"))
    hosts = [LocalHost(name, short_path / name, "127.0.0.1") for name in ("a", "b")]
    journal = MigrationJournal(
        "r", "web", "a", "b", "1", "2", "/dev/shm", was_running=True, step="prepare"
    )
    there = vm_dir(hosts[1].state_dir, "web")

    async def play(*others: Path) -> None:
        await make_home(hosts[0], "1")
        await journal.write(hosts[:1])
        await hosts[1].make_dir(there.path)
        for path in (part_of(there.journal), *others):
            path.touch()
        ended = await recover("web", lambda _: None, hosts)
        assert ended is not None
        assert (ended.host, ended.outcome) == ("a", UNDONE)
        assert not vm_dir(hosts[0].state_dir, "web").journal.exists()

    asyncio.run(play())
    assert not there.path.exists()
    asyncio.run(play(there.spec))
    assert list(there.path.iterdir()) == [there.spec]


def test_a_journal_goes_with_what_a_killed_command_was_writing_of_it(tmp_path: Path) -> None:
    hosts = [LocalHost(name, tmp_path / name, "127.0.0.1") for name in ("a", "b")]
    journal = MigrationJournal(
        "r", "web", "a", "b", "1", "2", "/dev/shm", was_running=True, step="begin"
    )
    paths = [vm_dir(host.state_dir, "web").journal for host in hosts]

    async def forget() -> None:
        for host, path in zip(hosts, paths, strict=True):
            await host.make_dir(path.parent)
        await journal.write(hosts)
        assert await MigrationJournal.read(hosts[0], "web") == journal
        for path in paths:
            part_of(path).touch()
        await journal.remove(hosts)

    asyncio.run(forget())
    assert [list(path.parent.iterdir()) for path in paths] == [[], []]
