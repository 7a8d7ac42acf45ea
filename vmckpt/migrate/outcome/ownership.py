"""Who owns the guest? One pure decision, for failed and interrupted migrations."""

from enum import Enum
from typing import NamedTuple

from vmckpt.qemu.replies import MigrationStatus, RunState


class MigrationEnd(NamedTuple):
    """The state of one end. `run` and `migration` are None while its monitor does not answer.

    `ever_ran` is the destination's own record that its vCPUs have run (it outlives the process).
    `silent`: its host does not answer, so nothing of this is known; it counts as alive.
    """

    alive: bool
    run: RunState | None = None
    migration: MigrationStatus | None = None
    ever_ran: bool = False
    silent: bool = False

    @property
    def running(self) -> bool:
        """Whether its vCPUs are known to run."""
        return self.run is not None and self.run.running

    @property
    def in_postcopy(self) -> bool:
        """Whether its migration is known to be in post-copy."""
        return self.migration is not None and self.migration.in_postcopy


class OwnershipView(NamedTuple):
    """Both ends. `was_running`: the guest ran when the migration began.

    `stopped`: vmckpt stopped it for the migration (method `stop`). `stays`: it was decided and
    recorded, while the destination was silent, that the source continues: the destination never
    runs.
    """

    source: MigrationEnd
    destination: MigrationEnd
    was_running: bool
    stopped: bool = False
    stays: bool = False


# Only in these states is a source's "completed" about this migration: otherwise it is about the one
# that brought the guest here, or the guest was resumed since.
HANDED_OVER = frozenset({"finish-migrate", "postmigrate"})
# States of a source that is paused by the migration, or was stopped for it.
STOPPED_BY_MIGRATION = HANDED_OVER | {"paused", "prelaunch"}


# Final states of a migration in QEMU; they may be those of an earlier one.
DECIDED = frozenset({"none", "failed", "cancelled", "completed"})
# With these the destination is never run, whatever has arrived there.
GIVEN_UP = frozenset({"failed", "cancelled"})


class OwnershipMove(Enum):
    """What to do next. The last four are final."""

    WAIT = "wait: QEMU is about to settle it"
    CANCEL = "cancel the migration"
    YANK = "cut the connection between the two QEMUs"
    RECONNECT = "rejoin the two ends of a post-copy"
    RUN_DESTINATION = "run the destination"
    KILL_DESTINATION = "make sure that the destination never runs"
    RUN_SOURCE = "let the source run"
    SOURCE_OWNS = "the source has the guest"
    DESTINATION_OWNS = "the destination has the guest"
    LOST = "the guest runs nowhere and cannot go on from memory"
    UNKNOWN = "an end does not answer"


def decide(view: OwnershipView) -> OwnershipMove:
    """The next move towards the guest being on exactly one host, given both ends.

    The rule: the destination may run only when the source has said "completed" (or is in
    post-copy); the source may run again only when the destination never ran and never will: it is
    dead, or waits for a `cont` that is never sent once the source's migration is given up.
    """
    source, destination = view.source, view.destination
    if source.migration is not None and source.migration.in_postcopy:
        return _in_postcopy(view, source.migration)
    if destination.in_postcopy and (destination.running or destination.ever_ran):
        return _fetching(view)
    if destination.running:
        return OwnershipMove.DESTINATION_OWNS
    if destination.silent:
        return _beside_silence(view)
    if view.stays and destination.alive and not destination.ever_ran:
        return OwnershipMove.KILL_DESTINATION
    if not source.alive:
        return _without_source(view)
    if source.run is None or source.migration is None:
        return _silent_source(destination)
    return _with_both(view, source.run, source.migration)


def _with_both(view: OwnershipView, run: RunState, migration: MigrationStatus) -> OwnershipMove:
    if migration.status == "completed" and run.status in HANDED_OVER:
        return _completed(view)
    if migration.status in DECIDED:
        return _not_migrated(view, run)
    return OwnershipMove.WAIT if migration.status == "cancelling" else OwnershipMove.CANCEL


def _beside_silence(view: OwnershipView) -> OwnershipMove:
    # It is unknown whether the destination has run, or runs: act only on the source.
    source = view.source
    if source.run is None or source.migration is None:
        return OwnershipMove.UNKNOWN
    if source.migration.status not in DECIDED:
        return (
            OwnershipMove.WAIT if source.migration.status == "cancelling" else OwnershipMove.CANCEL
        )
    if source.run.running:
        return OwnershipMove.SOURCE_OWNS
    if view.was_running:
        # Only vmckpt resumes what vmckpt paused for the migration.
        held = view.stopped and source.run.status == "paused"
        return (
            OwnershipMove.RUN_SOURCE
            if held and source.migration.status in GIVEN_UP
            else OwnershipMove.UNKNOWN
        )
    return OwnershipMove.UNKNOWN if source.run.status in HANDED_OVER else OwnershipMove.SOURCE_OWNS


def _fetching(view: OwnershipView) -> OwnershipMove:
    # The destination waits for pages that only the source has. If the source dies, the destination
    # continues if it has the last page, otherwise it pauses its migration.
    migration = view.destination.migration
    if migration is not None and migration.status == "postcopy-active":
        return OwnershipMove.WAIT
    return OwnershipMove.UNKNOWN if view.source.alive else OwnershipMove.LOST


def _silent_source(destination: MigrationEnd) -> OwnershipMove:
    # A stall in the device phase blocks the source's main loop, and only cutting the connection
    # frees it; but in post-copy the guest depends on that connection.
    return (
        OwnershipMove.UNKNOWN
        if destination.ever_ran or destination.in_postcopy
        else OwnershipMove.YANK
    )


def _completed(view: OwnershipView) -> OwnershipMove:
    destination = view.destination
    if not destination.alive:
        if destination.ever_ran:
            return OwnershipMove.LOST
        return OwnershipMove.RUN_SOURCE if view.was_running else OwnershipMove.SOURCE_OWNS
    if destination.run is None:
        return OwnershipMove.UNKNOWN if destination.ever_ran else OwnershipMove.KILL_DESTINATION
    if destination.run.status == "inmigrate" or destination.in_postcopy:
        return OwnershipMove.WAIT
    if destination.ever_ran or not view.was_running:
        return OwnershipMove.DESTINATION_OWNS
    return OwnershipMove.RUN_DESTINATION


def _in_postcopy(view: OwnershipView, migration: MigrationStatus) -> OwnershipMove:
    if not view.destination.alive:
        return OwnershipMove.LOST
    if migration.status == "postcopy-paused":
        return OwnershipMove.RECONNECT
    if view.destination.run is None:
        return OwnershipMove.WAIT
    waits = (
        view.destination.running
        or view.destination.run.status == "inmigrate"
        or not view.was_running
    )
    return OwnershipMove.WAIT if waits else OwnershipMove.RUN_DESTINATION


def _not_migrated(view: OwnershipView, run: RunState) -> OwnershipMove:
    if view.destination.ever_ran:
        return OwnershipMove.DESTINATION_OWNS if view.destination.alive else OwnershipMove.LOST
    if run.running or not view.was_running:
        return OwnershipMove.SOURCE_OWNS
    # A stopped source may run again only if the destination is certainly dead.
    if view.destination.alive:
        return OwnershipMove.KILL_DESTINATION
    # A guest that stopped for another reason (an I/O error, a panic) must not be resumed by `cont`.
    return (
        OwnershipMove.RUN_SOURCE
        if run.status in STOPPED_BY_MIGRATION
        else OwnershipMove.SOURCE_OWNS
    )


def _without_source(view: OwnershipView) -> OwnershipMove:
    destination = view.destination
    if not destination.alive:
        return OwnershipMove.LOST
    if destination.run is None:
        return OwnershipMove.UNKNOWN
    status = destination.migration.status if destination.migration is not None else "none"
    if status == "completed" and destination.run.status != "inmigrate":
        return (
            OwnershipMove.RUN_DESTINATION
            if view.was_running and not destination.ever_ran
            else OwnershipMove.DESTINATION_OWNS
        )
    # Data that the source sent last may still be in flight: QEMU completes, pauses or ends the
    # migration.
    arriving = status in ("active", "postcopy-active", "completed")
    return OwnershipMove.WAIT if arriving else OwnershipMove.LOST
