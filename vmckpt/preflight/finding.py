"""The result of a check, before anything is changed."""

from collections.abc import AsyncIterator, Iterable
from enum import StrEnum
from typing import NamedTuple, TypeAlias

from vmckpt.errors import RefusedError


class Verdict(StrEnum):
    """What a finding means for the operation."""

    OK = "ok"
    WARN = "warn"
    REFUSE = "refuse"


OK, WARN, REFUSE = Verdict


class Finding(NamedTuple):
    """The result of one check: its name, and the reason. `remedy` is empty without a problem."""

    code: str
    verdict: Verdict
    reason: str
    remedy: str = ""


# A check does its work while it is iterated over; one without I/O is a plain iterable.
Check: TypeAlias = AsyncIterator[Finding] | Iterable[Finding]


async def ask(*checks: Check) -> list[Finding]:
    """The findings of these checks, one after the other. Raises what they raise."""
    found = list[Finding]()
    for check in checks:
        if isinstance(check, AsyncIterator):
            found += [one async for one in check]
        else:
            found += check
    return found


class Examined(NamedTuple):
    """The findings about a migration, and which of its disks would be copied."""

    checks: tuple[Finding, ...]
    copied_bytes: int

    @property
    def is_possible(self) -> bool:
        """Whether no check refuses the migration."""
        return all(check.verdict != REFUSE for check in self.checks)


def require(checks: Iterable[Finding], what: str) -> None:
    """Raises RefusedError, saying that `what` cannot be done, if a check refuses."""
    found = tuple(checks)
    if any(check.verdict == REFUSE for check in found):
        raise refusal(found, what)


def refusal(checks: Iterable[Finding], what: str) -> RefusedError:
    """The error with every refusal."""
    refused = [check for check in checks if check.verdict == REFUSE]
    return RefusedError(
        what,
        why="; ".join(f"[{check.code}] {check.reason}" for check in refused),
        remedy="; ".join(dict.fromkeys(check.remedy for check in refused if check.remedy)),
    )
