"""Libvirt's answers in the middle of a migration: what counts as an answer, and for how long."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.fake_libvirtd import FakeLibvirtd, in_turn
from vmckpt.errors import (
    HostDownError,
    NotFoundError,
    OperationFailedError,
    OutcomeUnknownError,
    VmckptError,
)
from vmckpt.events.types import Event as Event_
from vmckpt.events.types import Note
from vmckpt.hosts.local import LocalHost
from vmckpt.migrate.domains.hold import PARAMETER
from vmckpt.migrate.domains.journal import DomainJournal
from vmckpt.migrate.domains.request import MigrateCall
from vmckpt.migrate.domains.settle import inspect_end, unknown
from vmckpt.migrate.domains.settle_lost import settle_lost
from vmckpt.migrate.domains.tidy import forget, give_back, leave_on_destination, leave_on_source
from vmckpt.migrate.domains.transfer import DomainTransfer
from vmckpt.migrate.domains.whereabouts import DomainMove, DomainView, EndState
from vmckpt.migrate.steps.disk_files import MovedDisk
from vmckpt.options.migration import Method, MigrationOptions
from vmckpt.options.policy import Act, Policy, PolicyRule
from vmckpt.units import MIB
from vmckpt.vm.domains.faults import LibvirtRefusedError
from vmckpt.vm.domains.flags import DomainState, MigrateFlag, PausedReason
from vmckpt.vm.domains.job import DomainJob
from vmckpt.vm.domains.libvirtd import Libvirtd
from vmckpt.vm.domains.replies import Condition

pytestmark = pytest.mark.contract
UUID = "00000000-0000-0000-0000-000000000001"
LOCKED = LibvirtRefusedError("no", why="cannot acquire state change lock", remedy="wait", code=68)
REFUSED = LibvirtRefusedError("no", why="domain is not running", remedy="look", code=55)
TIMED_OUT = HostDownError("no answer", why="within 10 s", remedy="look")
IDLE = DomainJob(active=False)


def answers(*states: DomainState | Condition | None, job: DomainJob | VmckptError) -> FakeLibvirtd:
    """It has the domain in `states`, one question after the other; then it is silent.

    A state of None: it has none.
    """
    found = [Condition(one, 1) if isinstance(one, DomainState) else one for one in states]
    return FakeLibvirtd(condition=in_turn(*found, TIMED_OUT), job=job, undefine=None, destroy=None)


def _look(session: Libvirtd, *, is_source: bool = True) -> tuple[EndState, bool]:
    return asyncio.run(inspect_end(session, UUID, is_source=is_source))


def test_a_source_that_will_not_tell_of_its_job_is_locked_or_silent() -> None:
    assert _look(answers(DomainState.RUNNING, job=LOCKED)) == (EndState.LOCKED, False)
    assert _look(answers(DomainState.RUNNING, job=REFUSED)) == (EndState.SILENT, False)
    assert _look(answers(DomainState.RUNNING, job=TIMED_OUT)) == (EndState.LOCKED, False)
    with pytest.raises(HostDownError):
        _look(answers(job=IDLE))


@pytest.mark.parametrize(
    ("source", "says"),
    [(EndState.LOCKED, "restart libvirtd on a"), (EndState.SILENT, "start libvirtd on a")],
)
def test_a_libvirtd_that_holds_the_domains_lock_is_not_to_be_started(
    source: EndState, says: str
) -> None:
    ends = LocalHost("a", Path("/"), "::1"), LocalHost("b", Path("/"), "::2")
    journal = DomainJournal("r", "web", UUID, "a", "b", persistent=True)
    error = asyncio.run(
        unknown(journal, DomainMove.UNKNOWN, DomainView(source, EndState.ABSENT), ends)
    )
    assert says in error.remedy
    assert source.value.partition(",")[0] in error.why


@pytest.mark.parametrize("may_postcopy", [False, True])
def test_copies_stay_of_a_domain_that_may_have_run_last_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, may_postcopy: bool
) -> None:
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path))
    ends = LocalHost("a", tmp_path, "::1"), LocalHost("b", tmp_path, "::2")
    copy, proof = tmp_path / "web.qcow2", tmp_path / "web.qcow2.vmckpt-r"
    proof.write_text("records")
    copy.hardlink_to(proof)
    disks = (MovedDisk("/elsewhere/web.qcow2", str(copy)),)
    journal = DomainJournal("r", "web", UUID, "a", "b", True, disks, may_postcopy, True)

    async def main() -> list[str]:
        told: list[str] = []
        await journal.write()
        await settle_lost(journal, DomainView(EndState.OFF, EndState.ABSENT), ends, told.append)
        assert await DomainJournal.read("web") is None
        return told

    assert bool(asyncio.run(main())) is may_postcopy
    assert (copy.exists(), proof.exists()) == (may_postcopy, False)


@pytest.mark.parametrize(
    ("source", "known", "stays"),
    [(EndState.OFF, False, "new"), (EndState.OFF, True, "both"), (EndState.ABSENT, True, "new")],
    ids=("defined by the migration", "defined there before", "defined there alone"),
)
def test_a_domain_that_ended_on_both_is_where_libvirt_defined_it_last(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    source: EndState,
    *,
    known: bool,
    stays: str,
) -> None:
    """Of one that was defined there before nothing tells whether it ran there."""
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path))
    ends = LocalHost("a", tmp_path, "::1"), LocalHost("b", tmp_path, "::2")
    (old := tmp_path / "old.qcow2").write_text("older")
    copy, proof = tmp_path / "web.qcow2", tmp_path / "web.qcow2.vmckpt-r"
    proof.write_text("newer")
    copy.hardlink_to(proof)
    disks = (MovedDisk(str(old), str(copy)),)
    journal = replace(MOVED, disks=disks, known_to_target=known)
    asyncio.run(settle_lost(journal, DomainView(source, EndState.OFF), ends, lambda _: None))
    assert (copy.exists(), old.exists(), proof.exists()) == (True, stays == "both", False)


SENT = Condition(DomainState.PAUSED, PausedReason.MIGRATION)
MOVED = DomainJournal("r", "web", UUID, "a", "b", persistent=True)


@pytest.mark.parametrize(
    ("states", "job", "told"),
    [
        ((None,), IDLE, []),
        ((DomainState.RUNNING, DomainState.RUNNING, DomainState.SHUTOFF), IDLE, ["undefine"]),
        ((SENT, DomainState.SHUTOFF), DomainJob(active=True), ["undefine"]),
        ((SENT, SENT, DomainState.SHUTOFF), IDLE, ["destroy", "undefine"]),
        ((SENT, SENT, None), IDLE, ["destroy"]),
    ],
    ids=("gone", "seen late", "libvirt is at it", "kept by one that was restarted", "transient"),
)
def test_a_source_keeps_nothing_of_a_domain_that_has_moved(
    states: tuple[DomainState | Condition | None, ...], job: DomainJob, told: list[str]
) -> None:
    session = answers(*states, job=job)
    asyncio.run(forget(session, MOVED))
    assert session.orders == told


def test_what_a_silent_source_keeps_is_left_to_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path))
    ends = LocalHost("a", tmp_path, "::1", libvirt=tmp_path / "none"), LocalHost("b", tmp_path, "")
    (image := tmp_path / "web.qcow2").write_text("records")
    journal = replace(MOVED, disks=(MovedDisk(str(image), "/elsewhere/web.qcow2"),))

    async def main() -> tuple[list[str], list[DomainJournal]]:
        told: list[str] = []
        silent = answers(job=IDLE)
        await leave_on_destination(journal, ends, told.append, session=silent, patience_s=0.0)
        return told, await DomainJournal.all_left("web")

    told, kept = asyncio.run(main())
    assert not image.exists()
    # The next command ends what is left on the source; what is called so by then is no old image.
    assert kept == [replace(MOVED, moved=True)]
    assert "migrate --recover web" in told[0]


def test_what_a_source_keeps_locked_is_left_to_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A libvirtd whose QEMU died as it gave up a post-copy, which lets go when started again."""
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path))
    ends = LocalHost("a", tmp_path, "::1"), LocalHost("b", tmp_path, "::2")

    async def main() -> tuple[list[str], list[DomainJournal]]:
        told: list[str] = []
        off = Condition(DomainState.SHUTOFF, 1)
        locked = FakeLibvirtd(condition=in_turn(off, TIMED_OUT), job=IDLE, undefine=LOCKED)
        await leave_on_destination(MOVED, ends, told.append, session=locked, patience_s=0.0)
        return told, await DomainJournal.all_left("web")

    told, kept = asyncio.run(main())
    assert kept == [replace(MOVED, moved=True)]
    assert "migrate --recover web" in told[0]
    assert LOCKED.why in told[0]


@pytest.mark.parametrize(
    ("state", "told"),
    [
        (None, []),
        (DomainState.SHUTOFF, ["undefine"]),
        (DomainState.RUNNING, []),
    ],
    ids=("nothing", "a definition", "somebody's"),
)
def test_a_target_keeps_no_definition_of_a_domain_that_stayed(
    state: DomainState | None, told: list[str]
) -> None:
    session = answers(state, job=IDLE)
    asyncio.run(give_back(session, MOVED))
    assert session.orders == told


@pytest.mark.parametrize("tidy", [forget, give_back])
@pytest.mark.parametrize("has_tpm", [True, False])
def test_what_a_tpm_holds_stays_where_the_other_end_may_share_it(
    tidy: Callable[[Libvirtd, DomainJournal], Coroutine[Any, Any, None]], *, has_tpm: bool
) -> None:
    """Libvirt removes it with the definition; an older one has no flag for that."""
    session = answers(DomainState.SHUTOFF, job=IDLE)
    asyncio.run(tidy(session, replace(MOVED, has_tpm=has_tpm)))
    assert session.told == [("undefine", True if has_tpm else None)]


def test_a_target_that_still_waits_for_what_will_not_come_is_asked_again() -> None:
    session = answers(SENT, DomainState.SHUTOFF, job=IDLE)
    with pytest.raises(OutcomeUnknownError, match="will not come"):
        asyncio.run(give_back(session, MOVED))
    asyncio.run(give_back(session, MOVED))
    assert session.orders == ["undefine"]


def test_what_a_silent_target_keeps_is_left_to_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path))
    silent = LocalHost("b", tmp_path, "::2", libvirt=tmp_path / "none")
    copy, proof = tmp_path / "web.qcow2", tmp_path / "web.qcow2.vmckpt-r"
    proof.write_text("half of it")
    copy.hardlink_to(proof)
    journal = replace(MOVED, disks=(MovedDisk("/elsewhere/web.qcow2", str(copy)),))

    async def main() -> tuple[list[str], list[DomainJournal]]:
        told: list[str] = []
        await leave_on_source(journal, silent, told.append, patience_s=0.0)
        return told, await DomainJournal.all_left("web")

    told, kept = asyncio.run(main())
    assert (copy.exists(), proof.exists()) == (True, True)  # its QEMU may still write there
    assert kept == [replace(journal, stayed=True)]
    assert "migrate --recover web" in told[0]


def test_a_targets_state_is_enough() -> None:
    """In a broken post-copy its libvirtd never tells of its job."""
    assert _look(answers(DomainState.RUNNING, job=TIMED_OUT), is_source=False) == (
        EndState.RUNNING,
        False,
    )


def test_a_job_that_ends_between_the_questions_moves_the_domain() -> None:
    assert _look(answers(DomainState.RUNNING, DomainState.SHUTOFF, job=IDLE)) == (
        EndState.OFF,
        False,
    )
    assert _look(answers(DomainState.RUNNING, job=DomainJob(active=True))) == (
        EndState.RUNNING,
        True,
    )


@pytest.mark.timeout(10)
@pytest.mark.parametrize("postcopy", [False, True])
def test_a_migration_that_cannot_be_given_up_is_left_alone_in_the_end(*, postcopy: bool) -> None:
    async def main() -> FakeLibvirtd:
        began = asyncio.Event()

        async def migrates(*_: object) -> None:
            began.set()
            await asyncio.Event().wait()

        at_work = DomainJob(active=True, transferred_bytes=1)
        session = FakeLibvirtd(migrate=migrates, job=at_work, abort=LOCKED)
        transfer = DomainTransfer(
            session,
            UUID,
            MigrationOptions(),
            clock=lambda: 0.0,
            emit=lambda _: None,
            patience_s=0.1,
        )
        transfer.postcopy = postcopy
        call = asyncio.ensure_future(transfer.run(MigrateCall("", {}, MigrateFlag.LIVE), session))
        await began.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        return session

    assert ("abort" in asyncio.run(main()).orders) is not postcopy


GONE = NotFoundError("a has no such domain", why="it is gone", remedy="look elsewhere")


def until(ended: asyncio.Event) -> Callable[..., Coroutine[Any, Any, None]]:
    """A call of `migrate` that returns a moment after `ended`."""

    async def migrates(*_: object) -> None:
        await ended.wait()
        await asyncio.sleep(0.01)

    return migrates


@pytest.mark.timeout(10)
def test_a_domain_that_is_gone_before_the_call_has_ended_has_moved() -> None:
    """Its libvirtd has forgotten it a moment before it says that it has moved."""

    async def main() -> FakeLibvirtd:
        looked_for = asyncio.Event()

        def job() -> NotFoundError:
            looked_for.set()
            return GONE

        session = FakeLibvirtd(migrate=until(looked_for), job=job)
        transfer = DomainTransfer(
            session,
            UUID,
            MigrationOptions(),
            clock=lambda: 0.0,
            emit=lambda _: None,
            patience_s=0.1,
        )
        await transfer.run(MigrateCall("", {}, MigrateFlag.LIVE), session)
        return session

    assert asyncio.run(main()).orders == ["migrate"]


STEERING = ("set_max_downtime", "start_postcopy", "set_max_speed", "abort")


def stalling(*, ends_at: str, speed: float = 0.0) -> FakeLibvirtd:
    """Its migration gains nothing in any round, until the order `ends_at`."""
    ended, rounds = asyncio.Event(), count(1)

    def job() -> DomainJob:
        number = next(rounds)
        return DomainJob(True, number, 200, 100, number, speed)

    def order(name: str) -> Callable[..., None]:
        return lambda *_: ended.set() if name == ends_at else None

    orders = {name: order(name) for name in STEERING}
    return FakeLibvirtd(migrate=until(ended), job=job, **orders)


def steered_by(session: FakeLibvirtd) -> list[tuple[object, ...]]:
    """The orders after `migrate`."""
    return [one for one in session.told if one[0] != "migrate"]


def steered(session: FakeLibvirtd, options: MigrationOptions, held_mib_per_s: int = 0) -> list[str]:
    """What is said of a domain's migration until the libvirtd ends it."""
    said: list[str] = []

    def hear(event: Event_) -> None:
        if isinstance(event, Note):
            said.append(event.text)

    async def main() -> None:
        transfer = DomainTransfer(
            session,
            UUID,
            options,
            clock=lambda: 0.0,
            emit=hear,
            held_mib_per_s=held_mib_per_s,
            patience_s=0.1,
        )
        await transfer.run(MigrateCall("", {}, MigrateFlag.LIVE), session)

    asyncio.run(main())
    return said


POLICY = Policy(
    (PolicyRule(2, Act.RAISE_DOWNTIME, 100, 500), PolicyRule(4, Act.POSTCOPY)),
)


@pytest.mark.timeout(20)
def test_a_held_domain_is_let_go_when_all_has_gone_once_and_steered_in_the_same_terms() -> None:
    session = stalling(ends_at="start_postcopy", speed=100.0 * MIB)
    steered(session, MigrationOptions(Method.PRECOPY, policy=POLICY), held_mib_per_s=1)
    assert steered_by(session) == [
        ("set_max_downtime", 30_000),
        ("set_max_downtime", 50_000),
        ("start_postcopy",),
    ]


@pytest.mark.timeout(10)
def test_a_qemu_that_cannot_be_held_back_moves_all_the_same_and_it_is_said() -> None:
    """Its QEMU has never heard of a speed at the switchover."""
    why = "Parameter 'avail-switchover-bandwidth' is unexpected"
    unknown_ = LibvirtRefusedError("no", why=why, remedy="update it", code=1)
    session = FakeLibvirtd(
        migrate=lambda _, parameters, __: unknown_ if PARAMETER in parameters else None, job=GONE
    )
    heard = list[Event_]()

    async def main() -> None:
        transfer = DomainTransfer(
            session,
            UUID,
            MigrationOptions(),
            lambda: 0.0,
            heard.append,
            held_mib_per_s=1,
            patience_s=0.1,
        )
        await transfer.run(
            MigrateCall("", {PARAMETER: 1, "bandwidth": 9}, MigrateFlag.LIVE), session
        )

    asyncio.run(main())
    asked = [parameters for _, _, parameters, _ in session.told]
    assert asked == [{PARAMETER: 1, "bandwidth": 9}, {"bandwidth": 9}]
    assert [event.code for event in heard if isinstance(event, Note)] == ["switchover"]


@pytest.mark.timeout(20)
def test_a_policy_steers_a_domain_through_libvirt() -> None:
    session = stalling(ends_at="start_postcopy")
    said = steered(session, MigrationOptions(Method.PRECOPY, policy=POLICY))
    assert steered_by(session) == [("set_max_downtime", 500), ("start_postcopy",)]
    assert [words.partition(":")[0] for words in said] == [
        "allowing a downtime of 500 ms",
        "switching to post-copy",
    ]
    given_up = stalling(ends_at="abort")
    with pytest.raises(OperationFailedError, match="aborted the migration"):
        steered(
            given_up, MigrationOptions(Method.PRECOPY, policy=Policy((PolicyRule(2, Act.ABORT),)))
        )
    assert ("abort",) in given_up.told


def test_a_domain_is_held_to_another_share_of_the_link_once_its_memory_moves() -> None:
    async def main() -> list[tuple[object, ...]]:
        session = stalling(ends_at="nothing")
        transfer = DomainTransfer(
            session,
            UUID,
            MigrationOptions(),
            clock=lambda: 0.0,
            emit=lambda _: None,
            patience_s=0.1,
        )
        with pytest.raises(OperationFailedError):  # it is tried again
            await transfer.hold_to(20 * MIB)
        transfer.last = DomainJob(active=True, round=1)
        await transfer.hold_to(20 * MIB + 5)
        await transfer.hold_to(5)
        return session.told

    assert asyncio.run(main()) == [("set_max_speed", 20), ("set_max_speed", 1)]
