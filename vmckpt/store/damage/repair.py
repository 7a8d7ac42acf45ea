"""repair: restore a damaged store as far as possible.

New checkpoints do not reuse damaged chunks once the check has found them. Chunks whose content is
found elsewhere are healed, as by gc. What remains are checkpoints that cannot be restored; they are
removed on request.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from vmckpt.errors import BusyError, NotFoundError, RefusedError
from vmckpt.store.backends.backend import MissingError
from vmckpt.store.backends.cached import uncached
from vmckpt.store.check import CheckReport, check
from vmckpt.store.collect import Collected, GcPlan, collect, plan_gc
from vmckpt.store.damage.subset import EVERYTHING, Subset
from vmckpt.store.errors import DamagedError, UnreadableError
from vmckpt.store.store import Store

_UNREAD = (
    "some of the store cannot be read or seen now, perhaps just what this lacks: see `store check`"
)


@dataclass(frozen=True, slots=True)
class RepairPlan:
    """What the check found, and what gc would do; `refused`: why gc could do nothing yet."""

    report: CheckReport
    gc: GcPlan | None
    refused: RefusedError | None

    @property
    def lost(self) -> Mapping[str, list[str]]:
        """Checkpoints that cannot be restored, and why."""
        return self.report.lost

    @property
    def heals(self) -> list[str]:
        """The ids of packs that would be healed."""
        return [one.pack_id.hex() for one in self.gc.rewrites if one.heals] if self.gc else []


@dataclass(slots=True)
class Repaired:
    """What was done. `kept`: checkpoints that could not be removed, and why; see
    `RepairPlan.refused`.

    `restorable` ones can be restored after all: they were healed since the check, or it was wrong.
    """

    removed: list[str] = field(default_factory=list)
    restorable: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    collected: Collected | None = None
    refused: RefusedError | None = None


def plan_repair(
    store: Store,
    progress: Callable[[int, int], None] = lambda done, total: None,
    subset: Subset = EVERYTHING,
) -> RepairPlan:
    """Plan a repair. Removes nothing, and changes no checkpoint.

    Records the damage that it finds, as `check` does. Raises StorageError, BusyError.
    """
    report = check(store, progress, subset)
    plan, refused = _plan(store)
    return RepairPlan(report, plan, refused)


def repair(store: Store, plan: RepairPlan, *, remove_lost: bool) -> Repaired:
    """Execute the plan. Raises BusyError (another gc), StorageError.

    Lost checkpoints are read once more before they are removed: during the check, which may take
    hours, their content may have been stored again.
    """
    done = Repaired()
    for checkpoint_id in plan.lost if remove_lost else ():
        try:
            if _can_be_restored(store, checkpoint_id):
                done.restorable.append(checkpoint_id)
                continue
            if plan.report.unread:
                done.kept[checkpoint_id] = _UNREAD
                continue
            store.remove([checkpoint_id])
            done.removed.append(checkpoint_id)
        except NotFoundError:
            continue
        except (BusyError, RefusedError, UnreadableError) as exc:
            done.kept[checkpoint_id] = exc.why
    gc, done.refused = _plan(store)
    if gc is not None:
        done.collected = collect(store, gc)
    return done


def _can_be_restored(store: Store, checkpoint_id: str) -> bool:
    """Whether all of it can be read; stops at the first loss.

    Raises BusyError, NotFoundError, StorageError; UnreadableError: not now, perhaps later.
    """
    store.opened.packs.list_again()
    with uncached(store.opened.backend):
        try:
            store.opened.files.read_all(checkpoint_id)
            with store.read(checkpoint_id) as point:
                for area in point.manifest.areas:
                    for _ in point.area(area.name).stream():
                        pass
        except UnreadableError:
            raise
        except (MissingError, DamagedError):
            return False
    return True


def _plan(store: Store) -> tuple[GcPlan | None, RefusedError | None]:
    try:
        return plan_gc(store), None
    except RefusedError as exc:
        return None, exc
