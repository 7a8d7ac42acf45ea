"""A policy in action: its decisions about a pre-copy, from the rounds alone."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vmckpt.forecast.model.convergence import Passes, Rounds
from vmckpt.options.policy import Act, Policy, PolicyRule


class PolicyDecision(NamedTuple):
    """What a policy does now, and why.

    `downtime_ms` is the new limit, `throttle_percent` the share of processor time that the guest
    loses.
    """

    act: Act
    downtime_ms: int
    why: str
    throttle_percent: int = 0

    @property
    def words(self) -> str:
        """The action in words."""
        return {
            Act.RAISE_DOWNTIME: f"allowing a downtime of {self.downtime_ms} ms",
            Act.THROTTLE: f"slowing the guest's processors by {self.throttle_percent} %",
            Act.POSTCOPY: "switching to post-copy",
            Act.PAUSE: "stopping the VM to send the rest",
            Act.ABORT: "giving up",
        }[self.act]


def stalled_rounds(left_bytes: Sequence[int], stall_percent: int) -> int:
    """How many of the last rounds made no progress over the best before them.

    `left_bytes`: what was left at the start of each round. The first, all of memory, shows nothing.
    """
    stalled, best = 0, None
    for left in left_bytes[1:]:
        if best is not None:
            stalled = stalled + 1 if 100 * left >= stall_percent * best else 0
        best = left if best is None else min(best, left)
    return stalled


class PrecopySample(NamedTuple):
    """The state of a pre-copy that a policy uses.

    `round_number` counts from 1, `at_s` from any origin. `held`: the switchover is held back.
    `throttle_percent`: QEMU's throttling of the guest; None: as requested.
    """

    at_s: float
    round_number: int
    left_bytes: int
    held: bool = False
    throttle_percent: int | None = None


@dataclass(slots=True)
class Pilot:
    """A policy applied to one pre-copy, which begins with the limit `downtime_ms`."""

    policy: Policy
    downtime_ms: int
    throttle_percent: int = 0
    _rounds: Rounds = field(default_factory=Rounds)
    _done: set[PolicyRule] = field(default_factory=set)
    _passed: Passes = field(default_factory=Passes)
    _throttled_in_round: int = 0

    def see(self, now: PrecopySample) -> PolicyDecision | None:
        """What to do at this sample; None: nothing.

        Rules for stalls use only the first sample of each round, and none that is held.
        """
        self._passed.see(now.round_number, now.at_s)
        new = self._rounds.see(now.round_number, now.left_bytes, held=now.held)
        stalled = 0
        if new and not now.held:
            stalled = stalled_rounds(self._rounds.counting, self.policy.stall_percent)
        for rule in self.policy.rules:
            if rule in self._done or not self._is_due(rule, stalled, now):
                continue
            if decision := self._act(rule, now, self._why(rule, stalled)):
                return decision
        return None

    def _is_due(self, rule: PolicyRule, stalled: int, now: PrecopySample) -> bool:
        if rule.passes and (self._passed.gone(now.at_s) or 0.0) < rule.passes:
            return False
        return not rule.stalls or (stalled >= rule.stalls and self._now(rule, stalled))

    def _now(self, rule: PolicyRule, stalled: int) -> bool:
        """Whether this round is a good moment, or none came for too long."""
        _, *counting = self._rounds.counting
        near = 100 * counting[-1] <= self.policy.near_best_percent * min(counting)
        return near or stalled >= 2 * rule.stalls

    def _why(self, rule: PolicyRule, stalled: int) -> str:
        reasons = [f"{stalled} rounds in a row gained nothing"] if rule.stalls else []
        if rule.passes:
            reasons.append(f"it takes more than {rule.passes} times as long as memory took once")
        return ", and ".join(reasons)

    def _act(self, rule: PolicyRule, now: PrecopySample, why: str) -> PolicyDecision | None:
        if rule.act is Act.RAISE_DOWNTIME:
            raised_ms = min(self.downtime_ms * (100 + rule.by_percent) // 100, rule.most_ms)
            if raised_ms <= self.downtime_ms:
                self._done.add(rule)
                return None
            self.downtime_ms = raised_ms
        elif rule.act is Act.THROTTLE:
            if self._is_settling(rule, now):
                return None
            slower = min(self.throttle_percent + rule.by_percent, rule.most_percent)
            if slower <= self.throttle_percent:
                self._done.add(rule)
                return None
            self.throttle_percent, self._throttled_in_round = slower, now.round_number
        else:
            self._done.add(rule)
        return PolicyDecision(rule.act, self.downtime_ms, why, self.throttle_percent)

    def _is_settling(self, rule: PolicyRule, now: PrecopySample) -> bool:
        """Whether the last step has yet to take effect, or to show within the rule's rounds."""
        requested = self.throttle_percent
        effective = requested if now.throttle_percent is None else now.throttle_percent
        return effective < requested or (
            requested > 0 and now.round_number < self._throttled_in_round + max(rule.stalls, 1)
        )


def replay(
    policy: Policy, downtime_ms: int, samples: Sequence[Mapping[str, Any]]
) -> list[tuple[float, PolicyDecision]]:
    """What the policy would have done in a run, by its recorded samples: when, and what.

    The samples cannot show the result: after the first action they belong to another run.
    """
    pilot, found = Pilot(policy, downtime_ms), []
    for sample in samples:
        if sample["status"] == "active":
            now = PrecopySample(sample["at_s"], sample["round"], sample["remaining_bytes"])
            if decision := pilot.see(now):
                found.append((sample["at_s"], decision))
    return found
