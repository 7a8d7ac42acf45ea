"""One thing looked at before a migration, and what was found."""

from collections.abc import Iterable
from typing import NamedTuple

from vmckpt.errors import RefusedError

OK, WARN, REFUSE = "ok", "warn", "refuse"


class Check(NamedTuple):
    """`verdict` is ok, warn or refuse; `remedy` is empty when all is well."""

    code: str
    verdict: str
    reason: str
    remedy: str = ""


class Examined(NamedTuple):
    """All that is for and against a move, and what of its disks would be copied."""

    checks: tuple[Check, ...]
    copied_bytes: int

    @property
    def is_possible(self) -> bool:
        """Whether nothing refuses the move."""
        return all(check.verdict != REFUSE for check in self.checks)


def require(checks: Iterable[Check], what: str) -> None:
    """Raises RefusedError, with `what` cannot be done, when one of them refuses."""
    found = tuple(checks)
    if any(check.verdict == REFUSE for check in found):
        raise refusal(found, what)


def refusal(checks: Iterable[Check], what: str) -> RefusedError:
    """The error that names every refusal."""
    refused = [check for check in checks if check.verdict == REFUSE]
    return RefusedError(
        what,
        why="; ".join(f"[{check.code}] {check.reason}" for check in refused),
        remedy="; ".join(dict.fromkeys(check.remedy for check in refused if check.remedy)),
    )
