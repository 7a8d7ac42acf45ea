"""Retention: which checkpoints a rule keeps. Pure: facts in, verdicts out.

The order of checkpoints is the order in which they were taken (`store/files/order.py`). Hosts'
clocks, which may be wrong, only date them. Where clocks contradict that order, the largest set of
checkpoints whose clocks agree with it is believed (`dates`).
"""

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import astuple, dataclass
from datetime import UTC, datetime
from typing import NamedTuple

from vmckpt.errors import UsageError


class Candidate(NamedTuple):
    """A checkpoint as the rule sees it. `taken_unix_s` is by its host's clock."""

    id: str
    taken_unix_s: float
    added_bytes: int


@dataclass(frozen=True, slots=True)
class RetentionRule:
    """What to keep: the union of the first four, then limited by age and size, oldest first.

    Hours, days and weeks are in UTC; the newest checkpoint of each is kept.
    """

    keep_last: int = 0
    hourly: int = 0
    daily: int = 0
    weekly: int = 0
    max_age_s: float | None = None
    max_bytes: int | None = None

    @property
    def is_empty(self) -> bool:
        """Whether the rule is empty."""
        return not any(astuple(self))


class RetentionVerdict(NamedTuple):
    """Whether a checkpoint is kept, and for which reason."""

    keep: bool
    why: str


_PERIODS: tuple[tuple[str, Callable[[datetime], str]], ...] = (
    ("hourly", lambda when: f"{when:%Y-%m-%d %H}"),
    ("daily", lambda when: f"{when:%Y-%m-%d}"),
    ("weekly", lambda when: f"{when:%G-%V}"),
)


def plan(
    candidates: Sequence[Candidate],
    rule: RetentionRule,
    *,
    now_unix_s: float,
    just_taken: Collection[str] = (),
) -> Mapping[str, RetentionVerdict]:
    """A verdict for each checkpoint, by id. `candidates`: one VM's, in the order they were taken.

    The newest and those `just_taken` are always kept. Raises UsageError for an empty rule.
    """
    if rule.is_empty:
        raise UsageError(
            "no rule says which checkpoints to keep",
            why="without a rule all would be removed",
            remedy="give at least one of --keep-last, --keep-hourly, --keep-daily, --keep-weekly, "
            "--max-age, --max-size",
        )
    dated = dates([one.taken_unix_s for one in candidates], now_unix_s=now_unix_s)
    newest_first = list(reversed(candidates))
    when_s = {one.id: unix_s for one, unix_s in zip(candidates, dated, strict=True)}
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
            when = period(datetime.fromtimestamp(when_s[one.id], UTC))
            if when not in seen and len(seen) < getattr(rule, name):
                seen.add(when)
                why[one.id].append(f"{name} {when}")
    verdicts = {
        key: RetentionVerdict(bool(words), ", ".join(words) or "no rule keeps it")
        for key, words in why.items()
    }
    # If the host that has just taken one has a slower clock than ours, one of them is wrong.
    new_s = [one.taken_unix_s for one in candidates if one.id in just_taken]
    verdicts |= _too_old(newest_first, when_s, verdicts, rule, min([now_unix_s, *new_s]))
    verdicts |= _too_much(newest_first, verdicts, rule)
    for number, one in enumerate(newest_first):
        if not verdicts[one.id].keep and (number == 0 or one.id in just_taken):
            verdicts[one.id] = RetentionVerdict(True, "just taken" if number else "the newest")
    return verdicts


def dates(taken_unix_s: Sequence[float], *, now_unix_s: float) -> list[float]:
    """Best estimates of when each was taken, ascending in the order of taking.

    A longest non-decreasing subsequence of the times is believed. Each other time is replaced by
    the next believed one, or by `now_unix_s` at the end.
    """
    believed = _rising(taken_unix_s)
    found = list(taken_unix_s)
    later = max([now_unix_s, *(found[at] for at in believed)])
    for at in range(len(found) - 1, -1, -1):
        if at in believed:
            later = found[at]
        found[at] = later
    return found


def contradictions(candidates: Sequence[Candidate], *, now_unix_s: float) -> list[Candidate]:
    """Checkpoints whose hosts' clocks contradict the order in which they were taken."""
    dated = dates([one.taken_unix_s for one in candidates], now_unix_s=now_unix_s)
    return [
        one for one, unix_s in zip(candidates, dated, strict=True) if one.taken_unix_s != unix_s
    ]


def _rising(values: Sequence[float]) -> set[int]:
    """The indices of a longest non-decreasing subsequence, by patience sorting; O(n log n)."""
    tops: list[float] = []
    ends: list[int] = []
    before: list[int] = []
    for at, value in enumerate(values):
        pile = bisect_right(tops, value)
        before.append(ends[pile - 1] if pile else -1)
        if pile == len(tops):
            tops.append(value)
            ends.append(at)
        else:
            tops[pile], ends[pile] = value, at
    found, at = set[int](), ends[-1] if ends else -1
    while at >= 0:
        found.add(at)
        at = before[at]
    return found


def _too_old(
    newest_first: Sequence[Candidate],
    when_s: Mapping[str, float],
    so_far: Mapping[str, RetentionVerdict],
    rule: RetentionRule,
    now_unix_s: float,
) -> dict[str, RetentionVerdict]:
    """Those too old by the estimate and by their own host's clock, unless that clock is ahead of
    ours.
    """
    if rule.max_age_s is None:
        return {}
    gone = dict[str, RetentionVerdict]()
    for one in newest_first:
        said_s = one.taken_unix_s if one.taken_unix_s <= now_unix_s else when_s[one.id]
        age_s = now_unix_s - max(when_s[one.id], said_s)
        if so_far[one.id].keep and age_s > rule.max_age_s:
            gone[one.id] = RetentionVerdict(False, "older than --max-age")
    return gone


def _too_much(
    newest_first: Sequence[Candidate], so_far: Mapping[str, RetentionVerdict], rule: RetentionRule
) -> dict[str, RetentionVerdict]:
    """Those beyond the size limit. An estimate: chunks that others need stay."""
    if rule.max_bytes is None:
        return {}
    gone, total = dict[str, RetentionVerdict](), 0
    for one in newest_first:
        if not so_far[one.id].keep:
            continue
        total += one.added_bytes
        if total > rule.max_bytes:
            gone[one.id] = RetentionVerdict(False, "beyond --max-size")
    return gone
