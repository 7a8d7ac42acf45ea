"""Which pages a guest writes in every epoch."""

from vmckpt.epoch.hot import (
    CONFIRMED_PASSES,
    LEAST_BYTES,
    MOST_RUNS,
    SPARED_PASSES,
    HotRuns,
)
from vmckpt.memory.ram_file import Span

RUN = LEAST_BYTES


def learned(*passes: list[Span]) -> HotRuns:
    hot = HotRuns()
    for spans in passes:
        assert not hot.spared
        hot.found(spans)
    return hot


def test_runs_are_spared_that_were_written_in_every_pass() -> None:
    always = (8 * RUN, 10 * RUN)
    hot = learned([(0, 2 * RUN), always], [always, (30 * RUN, 31 * RUN)], [(7 * RUN, 9 * RUN)])
    assert list(hot.spared) == [(8 * RUN, 9 * RUN)]


def test_short_runs_are_not() -> None:
    hot = learned(*[[(0, RUN - 4096), (2 * RUN, 3 * RUN)]] * CONFIRMED_PASSES)
    assert list(hot.spared) == [(2 * RUN, 3 * RUN)]
    assert not learned(*[[(0, RUN)], [(4096, RUN + 4096)], [(0, RUN)]]).spared


def test_after_a_while_they_are_protected_and_learned_anew() -> None:
    hot = learned(*[[(0, RUN)]] * CONFIRMED_PASSES)
    for _ in range(SPARED_PASSES):
        assert list(hot.spared) == [(0, RUN)]
        hot.found([(0, RUN)])
    # One pass protects all of it; it finds the run, which was not protected, whatever was written.
    assert not hot.spared
    hot.found([(0, RUN)])
    for _ in range(CONFIRMED_PASSES):
        assert not hot.spared
        hot.found([])
    assert not hot.spared


def test_no_more_runs_than_are_worth_it_and_the_longest_of_them() -> None:
    runs = [(4 * at * RUN, (4 * at + 1 + at % 2) * RUN) for at in range(3 * MOST_RUNS)]
    hot = learned(*[runs] * CONFIRMED_PASSES)
    assert len(hot.spared) == MOST_RUNS
    assert all(end - start == 2 * RUN for start, end in hot.spared)
    assert list(hot.spared) == sorted(hot.spared)
