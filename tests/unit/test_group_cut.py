"""A group's cut in virtual time: hosts that are slow, die or fall silent at any moment.

What is run is the code of the head and of its members; only lines, guests and QEMU's buffers are
played. A dead member's guard frees its guest at once, QEMU's buffers empty themselves in time.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import virtual_time
from vmckpt.checkpoint.group.line import SILENT_S, Line
from vmckpt.checkpoint.group.member import TOGETHER_S, Member, MemberHost, OutputHold
from vmckpt.errors import OperationFailedError, VmckptError
from vmckpt.group.head import ANSWER_S, GroupHead, cut, restore

pytestmark = pytest.mark.unit

MOST_S = 0.25
NEVER_S = 1e9


class Far:
    """A writer whose bytes come to a reader later, in order; or never, once it is cut."""

    def __init__(self, reader: asyncio.StreamReader, delay_s: float) -> None:
        self._reader, self._delay_s = reader, delay_s
        self.silent = False

    def write(self, data: bytes) -> None:
        self._later(lambda: self._reader.feed_data(data))

    def close(self) -> None:
        self._later(self._reader.feed_eof)

    def _later(self, do: Callable[[], None]) -> None:
        if not self.silent:
            asyncio.get_running_loop().call_later(self._delay_s, do)


@dataclass
class Guest:
    """One VM, as the world sees it. Its moment is when it is paused.

    `pauses_guest`: nothing holds its output, so it is paused as long as that may not leave.
    """

    prepare_s: float
    stop_s: float
    capture_s: float
    store_s: float
    delay_s: float
    dies_s: float = NEVER_S
    silent_s: float = NEVER_S
    held_s: float = NEVER_S
    let_go_s: float = NEVER_S
    moment_s: float = NEVER_S
    stands_still: bool = False
    is_committed: bool = False
    links: list[Far] = field(default_factory=list)
    machine: str = ""
    processors: int = 1
    pauses_guest: bool = False
    runs_s: float = NEVER_S

    def begin(self) -> list[Coroutine[Any, Any, Any]]:
        return []

    async def release_all(self) -> None:
        self.let_go_s = min(self.let_go_s, _now_s())

    async def release(self) -> None:
        await self.release_all()

    async def capture(self, hold: OutputHold | None) -> None:
        assert hold is not None
        assert hold.begin == self.begin
        assert (hold.may_run is not None) is self.pauses_guest
        self.held_s = _now_s()
        try:
            await asyncio.sleep(self.stop_s)
            self.stands_still = True
            self.moment_s = _now_s()
            hold.stopped()
            await asyncio.sleep(self.capture_s)
            if hold.may_run is not None:
                await hold.may_run()
            hold.runs()
        finally:
            self.stands_still, self.runs_s = False, _now_s()

    @property
    def leaves_s(self) -> float:
        """When something that it said after its moment can leave first."""
        if self.pauses_guest:
            return self.runs_s
        return min(self.let_go_s, self.held_s + MOST_S, max(self.dies_s, self.held_s))


def _now_s() -> float:
    return asyncio.get_running_loop().time()


async def _serve(guest: Guest, line: Line) -> None:
    machine = guest.machine or str(id(guest))
    here = MemberHost(machine, guest.processors, guest.pauses_guest)
    member = Member(line, MOST_S, here)

    async def nothing() -> None:
        return None

    async with line.beating():
        with suppress(OperationFailedError):
            await asyncio.sleep(guest.prepare_s)
            await member.all_prepared(nothing)
            await member.cut(lambda _: guest, lambda _: None, guest.capture)
            await asyncio.sleep(guest.store_s)
            await member.all_stored("id")
            guest.is_committed = True
            member.send("committed")


def _joined(guest: Guest) -> tuple[Line, Line]:
    """The member's end, and the head's."""
    inward, outward = asyncio.StreamReader(), asyncio.StreamReader()
    guest.links = [Far(outward, guest.delay_s), Far(inward, guest.delay_s)]
    return Line(inward, guest.links[0], "head"), Line(outward, guest.links[1], "member")


@dataclass
class Ended:
    """How it ended: whether all had stored, and were told to commit."""

    commits: bool
    took_s: float


async def _play(guests: list[Guest], head_dies_s: float) -> Ended:
    ends = [_joined(guest) for guest in guests]
    tasks = [
        asyncio.ensure_future(_serve(guest, mine))
        for guest, (mine, _) in zip(guests, ends, strict=True)
    ]
    heads = [asyncio.ensure_future(_lead([theirs for _, theirs in ends]))]
    loop = asyncio.get_running_loop()
    loop.call_later(head_dies_s, heads[0].cancel)
    for guest, task in zip(guests, tasks, strict=True):
        loop.call_later(guest.dies_s, task.cancel)
        loop.call_later(guest.silent_s, _cut_off, guest)
    commits = False
    with suppress(VmckptError, asyncio.CancelledError):
        commits = await heads[0]
    took_s = _now_s()
    await asyncio.wait(tasks)
    return Ended(commits, took_s)


def _cut_off(guest: Guest) -> None:
    for link in guest.links:
        link.silent = True


async def _lead(lines: list[Line]) -> bool:
    head = GroupHead({str(number): line for number, line in enumerate(lines)})
    async with lines[0].beating():
        beats = [line.beating() for line in lines[1:]]
        for beat in beats:
            await beat.__aenter__()
        try:
            await cut(head, MOST_S, lambda _: None)
            head.send_all("commit", group={})
            await asyncio.sleep(1.0)  # so that they hear it before the lines are closed
        except OperationFailedError as exc:
            head.give_up(str(exc))
            raise
        finally:
            for beat in beats:
                await beat.__aexit__(None, None, None)
    return True


_short = st.floats(0.0, 0.12)
# Seldom, or no cut would ever be made.
_moments = st.one_of(*[st.just(NEVER_S)] * 9, st.floats(0.0, 1.5))
_guests = st.builds(
    Guest,
    prepare_s=st.floats(0.0, 0.5),
    stop_s=_short,
    capture_s=_short,
    store_s=st.floats(0.0, 0.5),
    delay_s=st.floats(0.0, 0.05),
    dies_s=_moments,
    silent_s=_moments,
    machine=st.sampled_from(["", "one", "two"]),
    processors=st.integers(1, 8),
    pauses_guest=st.booleans(),
)


@settings(max_examples=15)
@given(st.lists(_guests, min_size=2, max_size=4), _moments)
def test_no_guest_stays_held_and_no_cut_counts_that_is_not_consistent(
    guests: list[Guest], head_dies_s: float
) -> None:
    ended = virtual_time.run(_play(guests, head_dies_s))
    for guest in guests:
        assert not guest.stands_still
        if guest.held_s < NEVER_S:
            assert guest.let_go_s <= guest.held_s + MOST_S + 1e-6
        if guest.pauses_guest and guest.held_s < NEVER_S:
            work_s = guest.stop_s + guest.capture_s
            assert guest.runs_s <= guest.held_s + max(MOST_S, work_s) + 1e-6
    if any(guest.is_committed for guest in guests):
        # Nothing that anybody said after his moment was heard by anybody before his.
        last_s = max(guest.moment_s for guest in guests)
        assert all(guest.leaves_s >= last_s - 1e-9 for guest in guests)
        assert head_dies_s > last_s
    assert ended.took_s <= 2.0 + SILENT_S + TOGETHER_S + ANSWER_S


@settings(max_examples=15)
@given(st.lists(_guests, min_size=2, max_size=4))
def test_a_head_that_is_gone_before_all_have_stored_commits_nothing(guests: list[Guest]) -> None:
    stored_s = max(guest.prepare_s for guest in guests)
    virtual_time.run(_play(guests, stored_s))
    assert not any(guest.is_committed for guest in guests)


def test_whoever_is_well_commits() -> None:
    guests = [Guest(0.1 * n, 0.005, 0.01, 0.1, 0.001) for n in range(3)]
    assert virtual_time.run(_play(guests, NEVER_S)).commits
    assert all(guest.is_committed for guest in guests)


def test_one_that_stops_too_late_spoils_it_and_nobody_waits_for_it() -> None:
    guests = [Guest(0.0, 0.0, 0.01, 0.0, 0.001), Guest(0.0, 2 * MOST_S, 0.0, 0.0, 0.001)]
    assert not virtual_time.run(_play(guests, NEVER_S)).commits
    assert not any(guest.is_committed for guest in guests)
    assert guests[0].let_go_s - guests[0].held_s <= MOST_S + 0.01


def test_nobody_is_held_until_another_has_captured() -> None:
    """When all are paused nothing that is heard any longer is in the cut."""
    guests = [Guest(0.0, 0.0, 0.01, 0.0, 0.001), Guest(0.0, 0.02, 0.2, 0.0, 0.001)]
    assert virtual_time.run(_play(guests, NEVER_S)).commits
    assert guests[0].let_go_s - guests[0].held_s == pytest.approx(0.022)


def test_a_guest_whose_output_nothing_holds_runs_when_all_are_paused() -> None:
    """On its machine it is the last to be paused, so that it is paused briefly."""
    pausing = Guest(0.0, 0.01, 0.01, 0.0, 0.001, machine="one", processors=2, pauses_guest=True)
    here = Guest(0.0, 0.01, 0.01, 0.0, 0.001, machine="one", processors=2)
    there = Guest(0.0, 0.06, 0.01, 0.0, 0.001, machine="two")
    assert virtual_time.run(_play([pausing, here, there], NEVER_S)).commits
    assert here.moment_s < pausing.moment_s < there.moment_s
    assert pausing.runs_s == pytest.approx(there.moment_s + 0.002)
    # Nobody tells it: it runs in time all the same, and nothing is taken.
    alone = [replace(pausing, is_committed=False), replace(there, is_committed=False)]
    alone[1].stop_s = 2 * MOST_S
    assert not virtual_time.run(_play(alone, NEVER_S)).commits
    assert alone[0].runs_s - alone[0].held_s == pytest.approx(MOST_S)
    assert not any(guest.is_committed for guest in alone)


@pytest.mark.parametrize("pauses_guest", [False, True])
def test_a_guest_that_its_guard_resumed_while_it_was_captured_spoils_it(
    *, pauses_guest: bool
) -> None:
    """It was told in time that all are paused, but its disks or devices came later."""
    late = Guest(0.0, 0.01, MOST_S, 0.0, 0.001, pauses_guest=pauses_guest)
    guests = [late, Guest(0.0, 0.01, 0.01, 0.0, 0.001)]
    assert not virtual_time.run(_play(guests, NEVER_S)).commits
    assert not any(guest.is_committed for guest in guests)


def test_on_one_machine_guests_are_stopped_one_after_the_other() -> None:
    """Each as soon as the one before it is paused: on two processors, beside another machine."""
    here = [Guest(0.0, 0.01, 0.03, 0.0, 0.001, machine="one", processors=2) for _ in range(3)]
    there = Guest(0.0, 0.01, 0.03, 0.0, 0.001, machine="two", processors=2)
    assert virtual_time.run(_play([*here, there], NEVER_S)).commits
    first_s = there.moment_s
    # A word to the head, a word of its, and the stop.
    assert [one.moment_s - first_s for one in here] == pytest.approx([0.0, 0.012, 0.024])
    last_s = here[-1].moment_s
    assert all(guest.leaves_s == pytest.approx(last_s + 0.002) for guest in (*here, there))


def test_the_guard_is_told_of_a_pause_before_the_cut_and_one_in_which_it_acted_counts_not() -> None:
    told: list[str] = []
    member = Member(_no_line(), MOST_S, MemberHost("one", 2, stays_paused=False))
    with member.pausing(told.append):
        assert [word.split()[0] for word in told] == ["free"]
    assert told[1:] == ["free inf"]
    with pytest.raises(OperationFailedError), member.pausing(told.append, most_s=0.0):
        pass
    assert told[3:] == ["free inf"]


def _no_line() -> Line:
    loop = asyncio.new_event_loop()
    try:
        reader = asyncio.StreamReader(loop=loop)
        return Line(reader, Far(reader, 0.0), "nobody")
    finally:
        loop.close()


async def _restore_member(
    line: Line, ready_s: float, run: Callable[[str], None], fails: Callable[[], bool]
) -> None:
    member = Member(line, 0.0, MemberHost("one", 2, stays_paused=False))
    async with line.beating():
        try:
            await asyncio.sleep(ready_s)
            await member.all_ready()
            run("stands still")
            await member.all_switched()
            if fails():
                raise OperationFailedError("no", why="no", remedy="-")
            run("new")
            await member.all_running()
        except OperationFailedError:
            run("old")
            member.send("failed", error=["OperationFailedError", "no", "no", "-"])
            return
        member.send("settled", result={})
        await asyncio.sleep(1.0)


def _restored(ready_s: list[float], failing: int | None) -> list[list[str]]:
    ran: list[list[str]] = [[] for _ in ready_s]
    everything: list[tuple[str, int]] = []

    async def play() -> None:
        tasks: list[Awaitable[None]] = []
        lines = []
        for number, seconds in enumerate(ready_s):
            mine, theirs = _joined(Guest(0, 0, 0, 0, 0.001))
            lines.append(theirs)

            def run(state: str, number: int = number) -> None:
                ran[number].append(state)
                everything.append((state, number))

            fails = lambda number=number: number == failing  # noqa: E731
            tasks.append(asyncio.ensure_future(_restore_member(mine, seconds, run, fails)))
        head = GroupHead({str(number): line for number, line in enumerate(lines)})
        async with lines[0].beating(), lines[1].beating(), lines[2].beating():
            try:
                await restore(head, lambda _: None)
            except OperationFailedError as exc:
                head.give_up(str(exc))
                await asyncio.sleep(0.1)
        await asyncio.gather(*tasks)

    virtual_time.run(play())
    words = [word for word, _ in everything]
    if "new" in words:
        # No restored guest runs while any old one does.
        assert words[:3] == ["stands still"] * 3
    return ran


def test_a_group_is_restored_when_no_old_guest_runs_any_more() -> None:
    assert _restored([0.0, 0.5, 1.0], None) == [["stands still", "new"]] * 3


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_if_one_cannot_run_the_others_go_back(failing: int) -> None:
    ran = _restored([0.0, 0.5, 1.0], failing)
    assert [states[-1] for states in ran] == ["old"] * 3
