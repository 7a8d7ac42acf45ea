"""A VM's UUID: made once, carried along, never guessed."""

import asyncio
from pathlib import Path

import pytest

from vmckpt.errors import StorageError, UsageError
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes.process import ProcessId
from vmckpt.vm.identity import hand_over, identity_of, is_identity, read_identity
from vmckpt.vm.inventory import read_vm
from vmckpt.vm.paths import vm_dir
from vmckpt.vm.record import Platform, Qemu

PLATFORM = Platform("q35", "tcg", "qemu64")


@pytest.fixture
def hosts(tmp_path: Path) -> list[LocalHost]:
    return [LocalHost(name, tmp_path / name, "127.0.0.1") for name in ("a", "b")]


def test_it_is_made_once_and_goes_with_the_vm(hosts: list[LocalHost]) -> None:
    a, b = hosts
    ours, theirs = (vm_dir(host.state_dir, "web") for host in hosts)

    async def run() -> None:
        await a.make_dir(ours.path)
        await b.make_dir(theirs.path)
        assert await read_identity(a, ours) is None
        await a.write_text(ours.point, "{}")
        await hand_over(a, ours, b)  # an old VM has none before it is first needed
        made = await identity_of(a, ours)
        assert is_identity(made)
        assert made == await identity_of(a, ours) == await read_identity(b, theirs)
        assert await b.read_text(theirs.point) == "{}"

    asyncio.run(run())


def test_a_full_disk_at_home_keeps_no_vm_from_leaving(
    hosts: list[LocalHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = hosts
    ours, theirs = (vm_dir(host.state_dir, "web") for host in hosts)
    write = LocalHost.write_text

    async def full(self: LocalHost, path: Path, text: str) -> None:
        if self.name == "a":
            raise StorageError(f"cannot write {path}", why="no space", remedy="make room")
        await write(self, path, text)

    async def run() -> None:
        await b.make_dir(theirs.path)
        monkeypatch.setattr(LocalHost, "write_text", full)
        await hand_over(a, ours, b)
        assert is_identity(str(await read_identity(b, theirs)))

    asyncio.run(run())


def test_a_damaged_one_is_refused_by_name(hosts: list[LocalHost]) -> None:
    directory = vm_dir(hosts[0].state_dir, "web")

    async def run() -> None:
        await hosts[0].make_dir(directory.path)
        await hosts[0].write_text(directory.identity, "web")
        with pytest.raises(UsageError, match="identity is damaged"):
            await identity_of(hosts[0], directory)

    asyncio.run(run())


def test_a_host_that_gives_another_vm_under_a_name_is_not_believed(tmp_path: Path) -> None:
    """`vm rm db` would be done to its "web", and the names' locks be those of the wrong one."""
    host = LocalHost("a", tmp_path, "127.0.0.1")
    directory = vm_dir(tmp_path, "db")
    directory.path.mkdir(parents=True)
    directory.spec.write_text('name = "web"\nmemory = "64M"\n')
    directory.current.write_text(Qemu(directory.qemu("0"), ProcessId(0, 0), PLATFORM).to_json())
    with pytest.raises(StorageError, match="is not the spec of 'db'"):
        asyncio.run(read_vm(host, "db"))
    directory.spec.write_text('name = "db"\nmemory = "64M"\n')
    assert asyncio.run(read_vm(host, "db")) is not None
