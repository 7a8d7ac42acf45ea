"""What to do about a pre-copy that gains nothing, as data; decided from its rounds alone."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Self

from vmckpt.plan.convergence import Rounds


class Act(StrEnum):
    """Allow a longer standstill, go over to post-copy, stop the guest for the rest, give up."""

    RAISE_DOWNTIME = "raise-downtime"
    POSTCOPY = "postcopy"
    PAUSE = "pause"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Rule:
    """After so many stalled rounds in a row, `act`.

    To raise is to allow `by_percent` more each time, up to `most_ms`; other acts come once.
    """

    stalls: int
    act: Act
    by_percent: int = 0
    most_ms: int = 0


@dataclass(frozen=True, slots=True)
class Policy:
    """Rules, tried in order at each round.

    A round has stalled that leaves `stall_percent` of the best before it, or more. A rule waits for
    a round that leaves at most `near_best_percent` of the best, until twice its stalls.
    """

    rules: tuple[Rule, ...]
    stall_percent: int = 96
    near_best_percent: int = 104

    @property
    def may_postcopy(self) -> bool:
        """Whether it could come to post-copy."""
        return any(rule.act is Act.POSTCOPY for rule in self.rules)

    def to_json(self) -> dict[str, Any]:
        """For records and jobs."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The inverse."""
        rules = tuple(Rule(**rule | {"act": Act(rule["act"])}) for rule in data["rules"])
        return cls(rules, data["stall_percent"], data["near_best_percent"])


class Decision(NamedTuple):
    """What a policy does now, and why. `downtime_ms` is the new limit when it is raised."""

    act: Act
    downtime_ms: int
    why: str

    @property
    def words(self) -> str:
        """What is being done."""
        return {
            Act.RAISE_DOWNTIME: f"allowing a standstill of {self.downtime_ms} ms",
            Act.POSTCOPY: "going over to post-copy",
            Act.PAUSE: "stopping the VM to send the rest",
            Act.ABORT: "giving up",
        }[self.act]


def stalled_rounds(left_bytes: Sequence[int], stall_percent: int) -> int:
    """How many rounds up to the last have gained nothing over the best before them.

    `left_bytes`: what each round began with. The first, all of memory, says nothing.
    """
    stalled, best = 0, None
    for left in left_bytes[1:]:
        if best is not None:
            stalled = stalled + 1 if 100 * left >= stall_percent * best else 0
        best = left if best is None else min(best, left)
    return stalled


@dataclass(slots=True)
class Pilot:
    """A policy at work on one pre-copy, which begins with `downtime_ms` allowed."""

    policy: Policy
    downtime_ms: int
    _rounds: Rounds = field(default_factory=Rounds)
    _done: set[Rule] = field(default_factory=set)

    def see(self, round_number: int, left_bytes: int, *, held: bool = False) -> Decision | None:
        """What to do, if anything, at this look; only the first look of a round counts.

        None while the end is `held` back.
        """
        if not self._rounds.see(round_number, left_bytes, held=held) or held:
            return None
        stalled = stalled_rounds(self._rounds.counting, self.policy.stall_percent)
        for rule in self.policy.rules:
            if stalled >= rule.stalls and rule not in self._done and self._now(rule, stalled):
                decision = self._act(rule, stalled)
                if decision:
                    return decision
        return None

    def _now(self, rule: Rule, stalled: int) -> bool:
        """Whether this round is a good moment, or there was none for too long."""
        _, *counting = self._rounds.counting
        near = 100 * counting[-1] <= self.policy.near_best_percent * min(counting)
        return near or stalled >= 2 * rule.stalls

    def _act(self, rule: Rule, stalled: int) -> Decision | None:
        why = f"{stalled} rounds in a row gained nothing"
        if rule.act is not Act.RAISE_DOWNTIME:
            self._done.add(rule)
            return Decision(rule.act, self.downtime_ms, why)
        raised_ms = min(self.downtime_ms * (100 + rule.by_percent) // 100, rule.most_ms)
        if raised_ms <= self.downtime_ms:
            self._done.add(rule)
            return None
        self.downtime_ms = raised_ms
        return Decision(rule.act, raised_ms, why)


def replay(
    policy: Policy, downtime_ms: int, samples: Sequence[Mapping[str, Any]]
) -> list[tuple[float, Decision]]:
    """What the policy would have done in a run, by its recorded samples: when, and what.

    What would have come of it the samples cannot tell: after the first act they are another run's.
    """
    pilot, found = Pilot(policy, downtime_ms), []
    for sample in samples:
        if sample["status"] == "active":
            decision = pilot.see(sample["round"], sample["remaining_bytes"])
            if decision:
                found.append((sample["at_s"], decision))
    return found
