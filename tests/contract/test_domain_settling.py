"""Libvirt's answers in the middle of a migration: what counts as an answer, and for how long."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from vmckpt.errors import HostDownError, VmckptError
from vmckpt.hosts.local import LocalHost
from vmckpt.migrate.domains.request import Request
from vmckpt.migrate.domains.settle import look_at
from vmckpt.migrate.domains.transfer import DomainTransfer
from vmckpt.migrate.domains.whereabouts import Place
from vmckpt.migrate.options import Options
from vmckpt.vm.domains.faults import LibvirtRefusedError
from vmckpt.vm.domains.flags import MigrateFlag, State
from vmckpt.vm.domains.job import Job
from vmckpt.vm.domains.libvirtd import Event, Libvirtd, Seen

pytestmark = pytest.mark.contract
UUID = "00000000-0000-0000-0000-000000000001"
LOCKED = LibvirtRefusedError("no", why="cannot acquire state change lock", remedy="wait", code=68)
TIMED_OUT = HostDownError("no answer", why="within 10 s", remedy="look")
IDLE = Job(active=False)


class Answers(Libvirtd):
    """A libvirtd that has the domain in `states`, one question after the other."""

    def __init__(self, *states: State, job: Job | VmckptError) -> None:
        super().__init__("test:///default", LocalHost("a", Path("/"), "::1"))
        self._states, self._job = list(states), job

    async def find(self, uuid: str) -> Seen | None:
        return Seen(uuid, "web", self._states.pop(0), 1, persistent=True, xml="")

    async def job(self, uuid: str) -> Job:
        if isinstance(self._job, VmckptError):
            raise self._job
        return self._job


def _look(session: Libvirtd, *, is_source: bool = True) -> tuple[Place, bool]:
    return asyncio.run(look_at(session, UUID, is_source=is_source))


def test_a_source_that_will_not_tell_of_its_job_is_silent() -> None:
    assert _look(Answers(State.RUNNING, job=LOCKED)) == (Place.SILENT, False)
    with pytest.raises(HostDownError):
        _look(Answers(State.RUNNING, job=TIMED_OUT))


def test_a_target_may_refuse_to_tell_of_its_job() -> None:
    two = (State.RUNNING, State.RUNNING)
    assert _look(Answers(*two, job=LOCKED), is_source=False) == (Place.RUNNING, False)
    with pytest.raises(HostDownError):
        _look(Answers(*two, job=TIMED_OUT), is_source=False)


def test_a_job_that_ends_between_the_questions_moves_the_domain() -> None:
    assert _look(Answers(State.RUNNING, State.SHUTOFF, job=IDLE)) == (Place.OFF, False)
    assert _look(Answers(State.RUNNING, job=Job(active=True))) == (Place.RUNNING, True)


class Stuck(Libvirtd):
    """A libvirtd whose migration neither ends nor can be given up."""

    def __init__(self) -> None:
        super().__init__("test:///default", LocalHost("a", Path("/"), "::1"))
        self.asked_to_abort = 0
        self.began = asyncio.Event()

    @asynccontextmanager
    async def events(self, uuid: str) -> AsyncIterator[asyncio.Queue[Event]]:
        yield asyncio.Queue()

    async def migrate(
        self, uuid: str, to_libvirtd: str, parameters: Mapping[str, Any], flags: int
    ) -> None:
        self.began.set()
        await asyncio.Event().wait()

    async def job(self, uuid: str) -> Job:
        return Job(active=True, transferred_bytes=1)

    async def abort(self, uuid: str) -> None:
        self.asked_to_abort += 1
        raise LOCKED


@pytest.mark.timeout(10)
@pytest.mark.parametrize("postcopy", [False, True])
def test_a_migration_that_cannot_be_given_up_is_left_alone_in_the_end(*, postcopy: bool) -> None:
    async def main() -> Stuck:
        session = Stuck()
        transfer = DomainTransfer(
            session, UUID, Options(), clock=lambda: 0.0, emit=lambda _: None, patience_s=0.1
        )
        transfer.postcopy = postcopy
        call = asyncio.ensure_future(transfer.run(Request("", {}, MigrateFlag.LIVE)))
        await session.began.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        return session

    assert (asyncio.run(main()).asked_to_abort > 0) is not postcopy
