"""Whose guests are stopped at once in a group's cut, and who is late."""

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import virtual_time
from vmckpt.checkpoint.group.line import Line
from vmckpt.errors import OperationFailedError
from vmckpt.group.head import GroupHead
from vmckpt.group.turns import MemberSite, turns

NEAR_S, MOST_S = 0.002, 0.25


def test_on_few_processors_they_take_turns() -> None:
    here = {vm: MemberSite("one", 2, NEAR_S) for vm in ("web", "db", "cache")}
    assert turns(here, MOST_S) == [["web", "db", "cache"]]


def test_half_of_the_processors_are_for_them() -> None:
    here = {vm: MemberSite("one", 4, NEAR_S) for vm in ("web", "db", "cache")}
    assert turns(here, MOST_S) == [["web", "cache"], ["db"]]


def test_nobody_waits_for_another_machine() -> None:
    sites = {"web": MemberSite("one", 2, NEAR_S), "db": MemberSite("two", 2, NEAR_S)}
    assert turns(sites, MOST_S) == [["web"], ["db"]]


def test_far_away_all_are_stopped_at_once() -> None:
    """A turn would cost a word there and back: more than output may be held for."""
    far = {vm: MemberSite("one", 2, 0.1) for vm in ("web", "db", "cache")}
    assert turns(far, MOST_S) == [["web"], ["db"], ["cache"]]


def test_one_that_was_busy_when_it_was_asked_makes_nobody_far() -> None:
    sites = {"web": MemberSite("one", 2, 0.1), "db": MemberSite("one", 2, NEAR_S)}
    assert turns(sites, MOST_S) == [["web", "db"]]


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=3),
        st.builds(MemberSite, st.sampled_from("abc"), st.integers(1, 16), st.floats(0.0, 1.0)),
        min_size=1,
    ),
    st.floats(0.02, 5.0),
)
def test_each_has_one_turn_and_no_row_costs_more_than_a_share_of_the_hold(
    sites: dict[str, MemberSite], most_held_s: float
) -> None:
    rows = turns(sites, most_held_s)
    assert sorted(vm for row in rows for vm in row) == sorted(sites)
    for row in rows:
        assert row
        assert len({sites[vm].machine for vm in row}) == 1
        words_s = min(sites[vm].answer_s for vm in sites
                      if sites[vm].machine == sites[row[0]].machine)  # fmt: skip
        assert len(row) == 1 or len(row) * words_s <= most_held_s / 4 + 1e-9


class Nowhere:
    """What is said goes nowhere."""

    def write(self, data: bytes) -> None:
        pass

    def close(self) -> None:
        pass


def test_who_is_late_is_told_by_the_limit_for_all_of_its_row() -> None:
    """Not by what those before it have left of that: that may be nothing."""

    async def play() -> None:
        readers = {vm: asyncio.StreamReader() for vm in ("web", "db")}
        head = GroupHead({vm: Line(reader, Nowhere(), vm) for vm, reader in readers.items()})
        said: Any = b'{"word": "stopped"}\n'
        asyncio.get_running_loop().call_later(0.2, readers["web"].feed_data, said)
        with pytest.raises(OperationFailedError) as late:
            await head.in_turns([["web", "db"]], "cut", "stopped", MOST_S)
        assert late.value.why == "'db' was not 'stopped' within 0.25 s"

    virtual_time.run(play())
