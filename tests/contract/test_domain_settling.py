"""Libvirt's answers in the middle of a migration: what counts as an answer, and for how long."""

import asyncio
from pathlib import Path

import pytest

from vmckpt.errors import HostDownError, VmckptError
from vmckpt.hosts.local import LocalHost
from vmckpt.migrate.domains.settle import look_at
from vmckpt.migrate.domains.whereabouts import Place
from vmckpt.vm.domains.faults import LibvirtRefusedError
from vmckpt.vm.domains.flags import State
from vmckpt.vm.domains.job import Job
from vmckpt.vm.domains.libvirtd import Libvirtd, Seen

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
