"""Time, the arbiter, the networks, and the laws that all that runs in a schedule has to keep.

A guest's state is (branch, step). A branch begins where a guest goes on from another's state: in a
standby that takes over, or from its disk. So "one guest runs, and nothing that was let out is lost"
is one law: whatever is let out goes on from all that was let out before.
"""

import heapq
import random
import types
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from vmckpt.lease.record import LeaseRecord, LeaseSpan
from vmckpt.lease.store import NONE_YET, Versioned

if TYPE_CHECKING:
    from tests.replication_model.machine import Host
    from tests.replication_model.process import Wire
    from tests.replication_model.qemu import Qemu

SPAN = LeaseSpan(3.0)
GUEST_S = 0.5
# Without output commit a guest that thaws emits until it is stopped, or a pause that was cut off
# lets it run once more: for no longer than this.
ENFORCED_S = 0.5

State = tuple[int, int]


class ViolationError(Exception):
    """The protocol broke its promise."""


class Act(NamedTuple):
    """One thing that happens, so long after the one before: a fault or an operator's command.

    `on`: the host, by its name, or by what is there when it happens ("primary", "standby").
    """

    after_s: float
    kind: str
    on: str = ""
    for_s: float = 0.0


@dataclass(frozen=True)
class Plan:
    """All that a schedule is made of. `proof`: how often a fencing agent gives one; 0: no agent.

    `trouble`: how often the arbiter's answer is lost. `drift`: of both hosts' clocks, as a part of
    what the lease allows for. `slow_s`: how long a standby may need for each thing.
    `names`: the hosts'. `unfit`: how often a standby cannot load the guest at least. `is_careful`:
    the operator says that a host is off only while the arbiter answers, which then knows of it.
    `autostarts`: a host that has booted starts the VM that is off there.
    """

    seed: int
    acts: tuple[Act, ...]
    trouble: float = 0.0
    holds_output: bool = True
    proof: float = 0.0
    drift: tuple[float, float] = (0.0, 0.0)
    slow_s: float = 0.0
    names: str = "ab"
    unfit: float = 0.0
    is_careful: bool = False
    autostarts: bool = False


class Signal:
    """What tasks wait for."""

    __slots__ = ("waiting",)

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def set(self) -> None:
        """Wake all that wait."""
        waiting, self.waiting = self.waiting, []
        for wake in waiting:
            wake()


@types.coroutine
def sleep(seconds: float) -> Generator[float, None, None]:
    yield seconds


@types.coroutine
def wait(signal: Signal, at_most_s: float) -> Generator[tuple[Signal, float], None, None]:
    """Until the signal is set, or for so long."""
    yield signal, at_most_s


class World:
    """One schedule. `without`: the fixes that are taken out of the protocol."""

    def __init__(self, plan: Plan, without: frozenset[str] = frozenset()) -> None:
        self.plan, self.without = plan, without
        self.random = random.Random(plan.seed)
        self.trouble, self.holds_output, self.proof = plan.trouble, plan.holds_output, plan.proof
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()
        self.stands: Versioned | None = None
        self.is_arbiter_lost = False  # for good
        self.paths_up_from_s = [0.0, 0.0]  # both ways between the hosts
        self.wires: list[Wire] = []
        self.parents: dict[int, State] = {}
        self.branches, self.ids, self.runs = count(1), count(1), count(1)
        self.let_out: State = (0, 0)
        self.qemus: list[Qemu] = []
        self.hosts: tuple[Host, ...] = ()
        self.standbys: dict[str, str] = {}  # of a primary, by their names with the arbiter
        self.log: list[tuple[float, str]] = []
        self.seen: Counter[str] = Counter()
        self.events = 0
        self.at(0.0, self._tick)

    # -- time ------------------------------------------------------------------------------------

    def at(self, time_s: float, do: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._heap, (time_s, next(self._order), do, args))

    def play(self, until_s: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Let time pass."""
        heap = self._heap
        while heap and heap[0][0] <= until_s and not is_over():
            self.now_s, _, do, args = heapq.heappop(heap)
            self.events += 1
            do(*args)
        if not is_over():
            self.now_s = until_s

    def note(self, what: str) -> None:
        self.log.append((self.now_s, what))

    def count(self, what: str) -> None:
        self.seen[what] += 1
        self.log.append((self.now_s, what))

    # -- the arbiter: a register ----------------------------------------------------------------

    def put(self, record: LeaseRecord, over: int) -> Versioned:
        if (self.stands.version if self.stands else NONE_YET) == over:
            self.stands = Versioned(record, over + 1)
            self.note(
                f"the arbiter: term {record.term} of {record.holder}, in sync: {record.in_sync}"
                f"{', given up' if record.released else ''} ({record.attempt})"
            )
        if self.stands is None:
            raise RuntimeError(f"version {over} was never there")
        return self.stands

    # -- the law ---------------------------------------------------------------------------------

    def has(self, state: State, other: State) -> bool:
        """Whether `state` goes on from `other`."""
        branch, step = state
        while branch != other[0]:
            if branch not in self.parents:
                return False
            branch, step = self.parents[branch]
        return step >= other[1]

    def _is_in_line(self, state: State) -> bool:
        """Whether it is of the guest that was last seen, or goes on from it."""
        branch = state[0]
        while branch != self.let_out[0]:
            if branch not in self.parents:
                return False
            branch = self.parents[branch][0]
        return True

    def fork(self, state: State) -> State:
        """A guest goes on from that state."""
        branch = next(self.branches)
        self.parents[branch] = state
        return branch, 0

    def release(self, qemu: "Qemu", state: State) -> None:
        """What the guest sent before that state reaches the world."""
        if self.has(state, self.let_out):
            self.let_out = state
        elif self.holds_output and not self.has(self.let_out, state):
            raise ViolationError(
                f"{qemu} lets out {state}, which lacks {self.let_out}: that was seen before"
            )

    def look(self) -> None:
        """At most one guest emits; without output commit: but for a moment."""
        loose = [qemu for qemu in self.qemus if qemu.is_loose]
        if self.holds_output:
            if len(loose) > 1:
                raise ViolationError(f"{loose[0]} and {loose[1]} run, and both emit")
            for qemu in loose:
                self.release(qemu, qemu.state)
            return
        for qemu in loose:
            if self._is_in_line(qemu.state):
                self.let_out = qemu.state
        for qemu in self.qemus:
            if not qemu.is_loose or self._is_in_line(qemu.state):
                qemu.stale_since_s = None
            elif qemu.stale_since_s is None:
                qemu.stale_since_s = self.now_s
                self.at(self.now_s + ENFORCED_S, self._look_again, qemu, self.now_s)

    def _look_again(self, qemu: "Qemu", since_s: float) -> None:
        if qemu.stale_since_s != since_s or not qemu.is_loose:
            return
        if not qemu.host.has_enforcer:  # the guard and the service are frozen, or dead, both
            self.at(self.now_s + ENFORCED_S, self._look_again, qemu, since_s)
        else:
            raise ViolationError(f"{qemu} emits for {ENFORCED_S} s beside the guest that took over")

    def _tick(self) -> None:
        self.qemus = [qemu for qemu in self.qemus if qemu.lives]
        for qemu in self.qemus:
            if qemu.is_loose:
                qemu.step()
        self.look()
        self.at(self.now_s + GUEST_S, self._tick)

    def forgive(self, left: list[State]) -> None:
        """A host is gone for good: if nothing that is left has what was let out, that is lost."""
        is_kept = self.has if self.holds_output else lambda state, _: self._is_in_line(state)
        if not any(is_kept(state, self.let_out) for state in left):
            self.count("lost with its host")
            self.let_out = max(
                (state for state in left if self.has(self.let_out, state)), default=(0, 0)
            )
