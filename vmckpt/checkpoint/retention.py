"""Which checkpoints a rule keeps. Pure: facts in, verdicts out."""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from vmckpt.errors import UsageError


class Candidate(NamedTuple):
    """A checkpoint as the rule sees it."""

    id: str
    taken_unix_s: float
    added_bytes: int


class Rule(NamedTuple):
    """What is kept: the union of the first four; then age and size take away, the newest last.

    Hours, days and weeks are UTC's; of each that has any the newest one is kept.
    """

    keep_last: int = 0
    hourly: int = 0
    daily: int = 0
    weekly: int = 0
    max_age_s: float | None = None
    max_bytes: int | None = None


class Verdict(NamedTuple):
    """Whether it is kept, and by what."""

    keep: bool
    why: str


_PERIODS: tuple[tuple[str, Callable[[datetime], str]], ...] = (
    ("hourly", lambda when: f"{when:%Y-%m-%d %H}"),
    ("daily", lambda when: f"{when:%Y-%m-%d}"),
    ("weekly", lambda when: f"{when:%G-%V}"),
)


def plan(
    candidates: Sequence[Candidate], rule: Rule, *, now_unix_s: float
) -> Mapping[str, Verdict]:
    """A verdict for each, by id. The newest is always kept. Raises UsageError for an empty rule."""
    if not any(rule):
        raise UsageError(
            "nothing says which checkpoints to keep",
            why="a rule that keeps none would remove all",
            remedy="say at least one of --keep-last, --hourly, --daily, --weekly, --max-age, "
            "--max-size",
        )
    newest_first = sorted(candidates, key=lambda one: (one.taken_unix_s, one.id), reverse=True)
    why: dict[str, list[str]] = {one.id: [] for one in newest_first}
    counts = rule.keep_last or rule.hourly or rule.daily or rule.weekly
    for number, one in enumerate(newest_first):
        if number < rule.keep_last:
            why[one.id].append("last")
        elif not counts:
            why[one.id].append("no rule against it")
    for name, period in _PERIODS:
        seen: set[str] = set()
        for one in newest_first:
            when = period(datetime.fromtimestamp(one.taken_unix_s, UTC))
            if when not in seen and len(seen) < getattr(rule, name):
                seen.add(when)
                why[one.id].append(f"{name} {when}")
    verdicts = {
        key: Verdict(bool(words), ", ".join(words) or "no rule keeps it")
        for key, words in why.items()
    }
    verdicts |= _too_old(newest_first, verdicts, rule, now_unix_s)
    verdicts |= _too_much(newest_first, verdicts, rule)
    if newest_first and not verdicts[newest_first[0].id].keep:
        verdicts[newest_first[0].id] = Verdict(True, "the newest")
    return verdicts


def _too_old(
    newest_first: Sequence[Candidate], so_far: Mapping[str, Verdict], rule: Rule, now_unix_s: float
) -> dict[str, Verdict]:
    if rule.max_age_s is None:
        return {}
    return {
        one.id: Verdict(False, "older than --max-age")
        for one in newest_first
        if so_far[one.id].keep and now_unix_s - one.taken_unix_s > rule.max_age_s
    }


def _too_much(
    newest_first: Sequence[Candidate], so_far: Mapping[str, Verdict], rule: Rule
) -> dict[str, Verdict]:
    """By what each added: chunks that others need too stay all the same, so it is an estimate."""
    if rule.max_bytes is None:
        return {}
    gone, total = dict[str, Verdict](), 0
    for one in newest_first:
        if not so_far[one.id].keep:
            continue
        total += one.added_bytes
        if total > rule.max_bytes:
            gone[one.id] = Verdict(False, "beyond --max-size")
    return gone
