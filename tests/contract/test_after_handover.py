"""A migration that goes wrong once its VM is at home on the target, or whose target goes silent."""

import asyncio
import socket
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.faulty_host import FaultyHost, silence
from tests.scripted_qmp import Server, answering
from vmckpt.errors import (
    HostDownError,
    OperationFailedError,
    OutcomeUnknownError,
    VmckptError,
)
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes.process import ProcessId
from vmckpt.migrate.migration import Migration
from vmckpt.migrate.shared_link import on_the_link
from vmckpt.options.migration import Method, MigrationOptions
from vmckpt.preflight.migration.checks import Preflight
from vmckpt.qemu.abilities import Agreement
from vmckpt.vm.inventory import Vm, read_vm
from vmckpt.vm.paths import new_qemu_id, vm_dir
from vmckpt.vm.record import Platform, Qemu
from vmckpt.vm.spec.spec import parse_spec

pytestmark = [pytest.mark.contract, pytest.mark.timeout(30)]
SPEC = 'name = "web"\nmemory = "32M"\n'
PLATFORM = Platform("q35", "tcg", "qemu64")
SENT = answering(
    query_status={"status": "postmigrate", "running": False},
    query_migrate={"status": "completed"},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source(LocalHost):
    """A host whose QEMU has sent all of a VM that is paused."""

    talks: list["asyncio.Task[None]"] = field(default_factory=list)

    async def connect(self, path: Path, *, of_anyone: bool = True) -> socket.socket:
        ours, theirs = socket.socketpair()
        self.talks.append(asyncio.create_task(_talk(Server(theirs))))
        return ours


async def _talk(server: Server) -> None:
    try:
        await server.greet()
        await SENT(server)
    finally:
        server.hang_up()


class Moved(Migration):
    """Its steps until the switchover have gone well; the target's QEMU has ended since."""

    async def prepare(self) -> None:
        there = self._pair.destination.files
        await self._destination_host.write_text(
            vm_dir(self._destination_host.state_dir, "web").spec, self._vm.spec.text
        )
        self._target_qemu = Qemu(there, ProcessId(0, 0), PLATFORM)

    async def agree(self) -> None:
        """Alike."""

    async def transfer(self) -> None:
        """Sent."""

    async def release(self) -> None:
        raise HostDownError("a does not answer", why="gone", remedy="-")


class Running(Source):
    """Its QEMU has not ended."""

    async def find_processes(self, argument: str, *, of_anyone: bool = False) -> list[ProcessId]:
        return [ProcessId(0, 0)]


class CutOff(Migration):
    """Its target goes silent while its QEMU is made."""

    async def prepare(self) -> None:
        raise OutcomeUnknownError("nobody knows whether b has begun", why="cut", remedy="-")


async def go_wrong(kind: type[Migration], source: Source, target: LocalHost) -> VmckptError:
    """How moving a VM so ends."""
    directory = vm_dir(source.state_dir, "web")
    vm = Vm(
        parse_spec(SPEC, "spec", source.state_dir),
        source,
        directory,
        Qemu(directory.qemu(new_qemu_id()), ProcessId(0, 0), PLATFORM),
    )
    options = MigrationOptions(method=Method.STOP, offline=True)
    checked = Preflight((), options, Agreement({}, {}, {}))
    async with on_the_link(source, target, "r1", 0, lambda *_: None) as link:
        moving = kind(
            vm,
            target,
            checked,
            run="r1",
            began_s=0.0,
            emit=lambda _: None,
            link=link,
            identities=("ida", "idb"),
        )
        with pytest.raises(VmckptError) as ended:
            await moving.run()
    return ended.value


def test_a_target_that_goes_silent_does_not_hide_why_a_migration_failed(tmp_path: Path) -> None:
    source = Running("a", tmp_path / "a", "127.0.0.1")
    target = FaultyHost("b", tmp_path / "b", "127.0.0.1", faults=silence("read_text"))

    async def main() -> None:
        error = await go_wrong(CutOff, source, target)
        assert isinstance(error, OperationFailedError)
        assert (error.what, error.why) == ("nobody knows whether b has begun", "cut")
        assert target.unused() == []
        # Undoing it asks the source for more than is answered here.
        await asyncio.gather(*source.talks, return_exceptions=True)

    asyncio.run(main())


def test_the_only_home_of_a_vm_is_never_undone(tmp_path: Path) -> None:
    source = Source("a", tmp_path / "a", "127.0.0.1")
    target = LocalHost("b", tmp_path / "b", "127.0.0.1")

    async def main() -> None:
        unknown = await go_wrong(Moved, source, target)
        assert isinstance(unknown, OutcomeUnknownError)
        assert "'web' is on b" in unknown.what
        assert "migrate --recover web" in unknown.remedy
        assert await read_vm(target, "web") is not None
        assert await read_vm(source, "web") is None
        # Who recovers it has to know what there was.
        assert await target.exists(vm_dir(target.state_dir, "web").journal)
        await asyncio.gather(*source.talks)

    asyncio.run(main())
