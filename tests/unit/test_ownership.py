"""Who owns the guest: over every pair of ends, and played against QEMUs that behave."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vmckpt.migrate.outcome.ownership import (
    GIVEN_UP,
    HANDED_OVER,
    MigrationEnd,
    OwnershipMove,
    OwnershipView,
    decide,
)
from vmckpt.migrate.outcome.settle import ENDINGS
from vmckpt.qemu.replies import POSTCOPY_STATES, MigrationStatus, RunState

STATUSES = (
    "none",
    "setup",
    "active",
    "device",
    "cancelling",
    "cancelled",
    "failed",
    "completed",
    *sorted(POSTCOPY_STATES),
)
SOURCE_RUNS = ("running", "paused", "finish-migrate", "postmigrate", "io-error")
TARGET_RUNS = ("running", "paused", "inmigrate", "internal-error")
DEAD, SILENT = MigrationEnd(alive=False), MigrationEnd(alive=True)
# Its host gives no answer.
GONE = MigrationEnd(alive=True, silent=True)


def side(run: str, status: str, *, ever_ran: bool = False) -> MigrationEnd:
    ran = ever_ran or run == "running"
    return MigrationEnd(True, RunState(run, run == "running"), MigrationStatus(status), ran)


def every_source() -> Iterator[MigrationEnd]:
    yield DEAD
    yield SILENT
    yield GONE
    for run, status in itertools.product(SOURCE_RUNS, STATUSES):
        yield side(run, status, ever_ran=True)


def every_target() -> Iterator[MigrationEnd]:
    yield GONE
    for ever_ran in (False, True):
        yield DEAD._replace(ever_ran=ever_ran)
        yield SILENT._replace(ever_ran=ever_ran)
        for run, status in itertools.product(TARGET_RUNS, STATUSES):
            yield side(run, status, ever_ran=ever_ran)


EVERY_VIEW = [
    OwnershipView(source, destination, was_running, stopped, stays)
    for source in every_source()
    for destination in every_target()
    for was_running in (True, False)
    for stopped in (True, False)
    for stays in (True, False)
]
MOVES = [(view, decide(view)) for view in EVERY_VIEW]


def views_with(move: OwnershipMove) -> list[OwnershipView]:
    found = [view for view, decided in MOVES if decided is move]
    # A law about moves that never come would hold of anything.
    assert found
    return found


def test_every_move_has_its_view() -> None:
    assert {move for _, move in MOVES} == set(OwnershipMove)


def test_the_source_runs_again_only_when_the_target_never_ran_and_never_will() -> None:
    for view in views_with(OwnershipMove.RUN_SOURCE):
        assert not view.destination.ever_ran
        assert not view.destination.alive or view.destination.silent


def test_beside_a_silent_target_the_source_runs_again_only_if_it_was_stopped_and_given_up() -> None:
    beside = [view for view in views_with(OwnershipMove.RUN_SOURCE) if view.destination.silent]
    assert beside
    for view in beside:
        assert view.was_running
        assert view.stopped
        assert view.source.run is not None
        assert view.source.run.status == "paused"
        assert view.source.migration is not None
        assert view.source.migration.status in GIVEN_UP


def test_a_target_whose_source_was_kept_never_runs() -> None:
    for view, move in MOVES:
        if view.stays and not (view.source.in_postcopy or view.destination.in_postcopy):
            assert move is not OwnershipMove.RUN_DESTINATION
    whole = side("paused", "completed")
    assert decide(OwnershipView(DEAD, whole, was_running=True)) is OwnershipMove.RUN_DESTINATION
    assert (
        decide(OwnershipView(DEAD, whole, was_running=True, stays=True))
        is OwnershipMove.KILL_DESTINATION
    )


def test_the_target_runs_only_when_the_source_cannot_go_on() -> None:
    for view in views_with(OwnershipMove.RUN_DESTINATION):
        source, destination = view.source.migration, view.destination.migration
        handed_over = view.source.run is not None and view.source.run.status in HANDED_OVER
        let_go = source is not None and (
            (source.status == "completed" and handed_over) or source.in_postcopy
        )
        loaded = destination is not None and destination.status == "completed"
        assert let_go or (not view.source.alive and loaded)
        assert view.was_running
        assert view.destination.run is not None
        assert view.destination.run.status != "inmigrate"


def test_the_source_owns_nothing_while_the_target_runs_or_ran() -> None:
    for view in views_with(OwnershipMove.SOURCE_OWNS):
        assert not view.destination.running
        assert not view.destination.ever_ran
        own_reason = view.source.run is not None and view.source.run.status == "io-error"
        assert view.source.running or not view.was_running or own_reason
        assert not own_reason or not view.destination.alive or not view.was_running


def test_the_target_owns_nothing_while_pages_are_still_to_come() -> None:
    for view in views_with(OwnershipMove.DESTINATION_OWNS):
        assert view.destination.alive
        assert not view.destination.in_postcopy or not view.destination.ever_ran
        assert not view.source.in_postcopy


def test_a_target_that_ran_is_never_killed() -> None:
    for view in views_with(OwnershipMove.KILL_DESTINATION):
        assert not view.destination.ever_ran
        assert not view.source.in_postcopy


def test_beside_a_silent_host_only_the_source_is_acted_on() -> None:
    beside = [(view, move) for view, move in MOVES if view.destination.silent]
    assert {move for _, move in beside} == {
        OwnershipMove.CANCEL, OwnershipMove.WAIT, OwnershipMove.RECONNECT,
        OwnershipMove.RUN_SOURCE, OwnershipMove.SOURCE_OWNS, OwnershipMove.UNKNOWN,
    }  # fmt: skip
    for view, move in beside:
        if move is OwnershipMove.SOURCE_OWNS:
            assert view.source.running or not view.was_running
            assert view.source.run is not None
            assert view.source.run.status not in HANDED_OVER


def test_a_silent_source_is_never_replaced() -> None:
    for view, move in MOVES:
        if view.source.silent and not view.destination.running:
            assert move not in (
                OwnershipMove.RUN_DESTINATION,
                OwnershipMove.DESTINATION_OWNS,
                OwnershipMove.LOST,
                OwnershipMove.SOURCE_OWNS,
            )


def test_the_connection_is_cut_only_to_free_a_stuck_source() -> None:
    for view in views_with(OwnershipMove.YANK):
        assert view.source.alive
        assert view.source.run is None
        assert not view.destination.in_postcopy
        assert not view.destination.ever_ran


def test_a_migration_is_cancelled_only_before_it_is_decided() -> None:
    for view in views_with(OwnershipMove.CANCEL):
        assert view.source.migration is not None
        assert view.source.migration.status in {"setup", "active", "device"}
        assert not view.destination.running


def test_the_guest_is_given_up_only_when_an_end_is_dead() -> None:
    for view in views_with(OwnershipMove.LOST):
        assert not (view.source.alive and view.destination.alive)
        if view.source.alive:
            # It has let go: the target ran, or held the only whole state.
            assert view.destination.ever_ran or view.source.in_postcopy


def test_a_guest_that_was_held_still_is_never_run() -> None:
    runs = {move for view, move in MOVES if not view.was_running}
    assert not runs & {OwnershipMove.RUN_DESTINATION, OwnershipMove.RUN_SOURCE}


@dataclass
class Qemu:
    """One QEMU of the simulated pair."""

    run: str
    status: str
    alive: bool = True
    silent: bool = False
    ever_ran: bool = False
    # Its host gives no answer.
    gone: bool = False

    @property
    def running(self) -> bool:
        return self.alive and self.run == "running"

    def inspect(self) -> MigrationEnd:
        if self.gone:
            return GONE
        if not self.alive or self.silent:
            return MigrationEnd(self.alive, ever_ran=self.ever_ran)
        return MigrationEnd(
            True, RunState(self.run, self.running), MigrationStatus(self.status), self.ever_ran
        )

    def set_running(self) -> None:
        self.run, self.ever_ran = "running", True


class Pair:
    """Two QEMUs that behave as QEMU does, and whoever plays fate.

    `sent`: the source has sent all of the guest. It is whole on the target, or on its way there.
    `stopped`: it was stopped for the way. `stays`: see `OwnershipView`.
    """

    def __init__(self, phase: str, *, was_running: bool, stopped: bool = False) -> None:
        self.was_running, self.stopped, self.stays = was_running, stopped, False
        held = "running" if was_running and not stopped else "paused"
        self._held = held
        self.source = Qemu(held, phase, ever_ran=True)
        self.destination = Qemu("inmigrate", "active")
        self.sent = phase == "completed"
        match phase:
            case "none" | "setup":
                self.destination.status = "setup"
            case "arrived":
                # The status is that of the migration which brought the guest to the source.
                self.source.status, self.destination.status = "completed", "setup"
            case "device":
                self.source.run = "finish-migrate"
            case "completed":
                self.source.run = "postmigrate"
            case "postcopy-active":
                self.source.run = "finish-migrate"
                self.destination = Qemu("paused", "postcopy-active")

    @property
    def whole(self) -> bool:
        """Whether a QEMU that lives has, or is about to have, all of the guest: the truth."""
        kept = not self.destination.ever_ran and self.source.status not in POSTCOPY_STATES
        return (self.source.alive and kept) or (self.destination.alive and self.sent)

    def check(self) -> None:
        assert not (self.source.running and self.destination.running), "the guest runs twice"
        went_back = self.source.running or self.stays
        assert not (went_back and self.destination.ever_ran), "the guest went back in time"
        if not self.was_running:
            assert not (self.source.running or self.destination.running), "a held guest runs"

    def tick(self, fate: str) -> None:
        """QEMU notices what was, then `fate` strikes."""
        self._get_on()
        source, destination = self.source, self.destination
        match fate:
            case "source dies":
                source.alive = False
            case "target dies":
                destination.alive = False
            case "source silent" | "target silent":
                (source if fate.startswith("source") else destination).silent = True
            case "the target's host is silent":
                destination.gone = True
            case "both answer":
                source.silent = destination.silent = destination.gone = False
            case "all is sent":
                self._send_all()
            case "all is sent, then the source dies":
                self._send_all()
                source.alive = False
        self.check()

    def _send_all(self) -> None:
        source = self.source
        free = source.alive and self.destination.alive and not source.silent
        if free and source.status in {"active", "device", "postcopy-active"}:
            source.status, source.run, self.sent = "completed", "postmigrate", True

    def _get_on(self) -> None:
        """What QEMU does by itself with what has reached it."""
        source, destination = self.source, self.destination
        if source.status == "cancelling":
            self._give_up("cancelled")
        if self.sent and destination.alive:
            destination.status = "completed"
            destination.run = "paused" if destination.run == "inmigrate" else destination.run
        elif not source.alive and destination.status == "active":
            destination.alive = False
        elif not source.alive and destination.status == "postcopy-active":
            destination.status = "postcopy-paused"
        if not destination.alive and source.status in {"active", "device", "setup"}:
            self._give_up("failed")
        elif not destination.alive and source.status == "postcopy-active":
            source.status = "postcopy-paused"

    def _give_up(self, status: str) -> None:
        self.source.status = status
        self.source.run = self._held
        self.destination.alive = self.destination.alive and self.destination.status != "active"

    def act(self, move: OwnershipMove) -> None:
        source, destination = self.source, self.destination
        stoppable = source.alive and source.status in {"setup", "active", "device"}
        match move:
            case OwnershipMove.CANCEL if stoppable and not source.silent:
                source.status = "cancelling"
            case OwnershipMove.YANK if stoppable:
                self._give_up("failed")
                source.silent = False
            case OwnershipMove.RUN_DESTINATION if (
                destination.alive and not destination.silent and not destination.gone
            ):
                destination.set_running()
            case OwnershipMove.RUN_SOURCE if source.alive and not source.silent:
                self.stays = self.stays or destination.gone
                source.set_running()
            case OwnershipMove.KILL_DESTINATION if not destination.gone:
                destination.alive = False
            case OwnershipMove.RECONNECT if destination.alive and not (
                source.silent or destination.silent or destination.gone
            ):
                source.status = destination.status = "postcopy-active"
        self.check()


FATES = (
    "nothing",
    "all is sent",
    "all is sent, then the source dies",
    "source dies",
    "target dies",
    "source silent",
    "target silent",
    "the target's host is silent",
    "both answer",
)
PHASES = ("none", "arrived", "setup", "active", "device", "completed", "postcopy-active")
LIMIT = 30


def settle(pair: Pair, fates: list[str], *, torn: bool) -> OwnershipMove:
    """As migrate.settle.settle does; after the last fate both answer and QEMU gets on."""
    for fate in [*fates, "both answer", *["all is sent"] * LIMIT]:
        source = pair.source.inspect()
        if torn:
            # Both ends are never looked at in the same instant.
            pair.tick(fate)
        view = OwnershipView(
            source, pair.destination.inspect(), pair.was_running, pair.stopped, pair.stays
        )
        move = decide(view)
        if move in ENDINGS - {OwnershipMove.UNKNOWN}:
            return move
        pair.act(move)
        if not torn:
            pair.tick(fate)
    return OwnershipMove.UNKNOWN


@settings(max_examples=1000)
@given(
    st.sampled_from(PHASES),
    st.lists(st.sampled_from(FATES), max_size=8),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_every_migration_ends_with_the_guest_in_one_place_or_honestly_lost(
    phase: str, fates: list[str], was_running: bool, stopped: bool, torn: bool
) -> None:
    # One that is stopped for the way never comes to post-copy.
    pair = Pair(phase, was_running=was_running, stopped=stopped and not phase.startswith("post"))
    ending = settle(pair, fates, torn=torn)
    match ending:
        case OwnershipMove.SOURCE_OWNS:
            assert not pair.destination.running
            assert pair.source.running or not was_running or not pair.source.alive
        case OwnershipMove.DESTINATION_OWNS:
            assert not pair.source.running
            assert pair.destination.running or not was_running or not pair.destination.alive
        case OwnershipMove.LOST:
            assert not pair.whole
            assert not pair.source.running
        case _:
            raise AssertionError(ending)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("was_running", [True, False])
def test_without_faults_no_guest_is_lost(phase: str, was_running: bool) -> None:
    pair = Pair(phase, was_running=was_running)
    ending = settle(pair, [], torn=False)
    expected = (
        {OwnershipMove.DESTINATION_OWNS}
        if phase in {"completed", "postcopy-active"}
        else {
            OwnershipMove.SOURCE_OWNS,
            OwnershipMove.DESTINATION_OWNS,
        }
    )
    assert ending in expected
    assert (pair.source.running or pair.destination.running) is was_running


def test_a_target_that_dies_before_it_ran_gives_the_guest_back() -> None:
    pair = Pair("completed", was_running=True)
    assert settle(pair, ["target dies"], torn=True) is OwnershipMove.SOURCE_OWNS
    assert pair.source.running


def test_a_source_that_was_stopped_for_the_way_runs_again_beside_a_silent_target() -> None:
    pair = Pair("active", was_running=True, stopped=True)
    assert settle(pair, ["the target's host is silent"], torn=False) is OwnershipMove.SOURCE_OWNS
    assert pair.source.running
    assert pair.stays


def test_a_stalled_source_is_freed() -> None:
    pair = Pair("device", was_running=True)
    assert settle(pair, ["source silent"], torn=True) is OwnershipMove.SOURCE_OWNS
    assert pair.source.running


def test_a_source_that_dies_after_all_was_sent_loses_nothing() -> None:
    pair = Pair("completed", was_running=True)
    assert settle(pair, ["all is sent", "source dies"], torn=True) is OwnershipMove.DESTINATION_OWNS
    assert pair.destination.running


def test_a_source_that_dies_in_postcopy_loses_the_guest_and_says_so() -> None:
    pair = Pair("postcopy-active", was_running=True)
    assert settle(pair, ["nothing", "source dies"], torn=False) is OwnershipMove.LOST


@pytest.mark.parametrize("status", ["io-error", "internal-error", "guest-panicked", "shutdown"])
def test_a_source_that_stopped_for_a_reason_of_its_own_is_not_continued(status: str) -> None:
    stopped = side(status, "cancelled", ever_ran=True)
    assert decide(OwnershipView(stopped, DEAD, was_running=True)) is OwnershipMove.SOURCE_OWNS
    waiting = side("paused", "none")
    assert (
        decide(OwnershipView(stopped, waiting, was_running=True)) is OwnershipMove.KILL_DESTINATION
    )
