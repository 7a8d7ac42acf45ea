"""What stands on both hosts while a VM moves between them."""

import asyncio
from pathlib import Path

import pytest

from vmckpt.hosts.local import LocalHost
from vmckpt.migrate.outcome.journal import MigrationJournal
from vmckpt.state.durable import part_of
from vmckpt.vm.paths import vm_dir

pytestmark = pytest.mark.contract


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
