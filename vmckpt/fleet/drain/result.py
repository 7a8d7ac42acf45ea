"""The result of a drain or an undrain."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from vmckpt.errors import JobHeldError, OutcomeUnknownError, RefusedError, VmLostError
from vmckpt.fleet.drain.plan import DrainPlan, Stay


class Held(NamedTuple):
    """Why jobs with devices of a VM that has moved were not resumed, and the remedy."""

    vm: str
    why: str
    remedy: str


@dataclass(frozen=True, slots=True)
class DrainResult:
    """The result. `moved`: VMs and where they are now; `plan` is the original plan.

    `took_s`: None of a dry run.

    `closed`: the host accepts no VMs until `undrain`.
    """

    host: str
    action: str
    plan: DrainPlan
    moved: dict[str, str]
    stay: tuple[Stay, ...]
    took_s: float | None
    held: tuple[Held, ...] = ()
    closed: bool = False

    @property
    def exit_code(self) -> int:
        """0: all that runs has moved; 9 and 10 as everywhere; 4: nothing could.

        1: not all did, or a job is held. Of a dry run: what the plan comes to.
        """
        codes = {one.code for one in self.stay}
        for worst in (VmLostError.exit_code, OutcomeUnknownError.exit_code):
            if worst in codes:
                return worst
        if not codes:
            return JobHeldError.exit_code if self.held else 0
        is_dry_run = self.took_s is None
        some_move = self.plan.table.moves if is_dry_run else self.moved
        return 1 if some_move else RefusedError.exit_code

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "host": self.host,
            "action": self.action,
            "closed": self.closed,
            "moved": [{"vm": vm, "host": host} for vm, host in self.moved.items()],
            "stay": [one._asdict() for one in self.stay],
            "held": [one._asdict() for one in self.held],
            "stopped": list(self.plan.stopped),
            "took_s": None if self.took_s is None else round(self.took_s, 3),
            "plan": self.plan.to_json(),
        }
