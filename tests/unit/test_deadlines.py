"""Waiting: asked at once, then at each interval, and no longer than the limit allows."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.virtual_time import run
from vmckpt.deadlines import poll, retry
from vmckpt.errors import BusyError

pytestmark = pytest.mark.unit


def now_s() -> float:
    return asyncio.get_running_loop().time()


def test_the_first_answer_that_is_as_wanted_is_returned() -> None:
    async def wait() -> tuple[int, float]:
        answers: Iterator[int] = iter((0, 0, 7, 8))
        return await poll(lambda: next(answers), every_s=0.5), now_s()

    assert run(wait()) == (7, 1.0)


def test_what_is_asked_may_have_to_be_awaited() -> None:
    async def look() -> float:
        return now_s()

    async def wait() -> float:
        return await poll(look, lambda at_s: at_s >= 3.0, every_s=2.0)

    assert run(wait()) == 4.0


@pytest.mark.parametrize(("within_s", "asked_at_s"), [(0.0, [0.0]), (0.9, [0.0, 0.5, 1.0])])
def test_after_the_limit_the_last_answer_is_returned(
    within_s: float, asked_at_s: list[float]
) -> None:
    seen: list[float] = []

    def look() -> bool:
        seen.append(now_s())
        return False

    async def wait() -> bool:
        return await poll(look, every_s=0.5, within_s=within_s)

    assert not run(wait())
    assert seen == asked_at_s


def test_what_fails_is_tried_again_and_its_last_error_is_raised() -> None:
    tries: list[float] = []

    async def attempt() -> str:
        tries.append(now_s())
        if len(tries) < 3:
            raise BusyError(f"try {len(tries)}", why="-", remedy="-")
        return "done"

    async def wait(within_s: float) -> str:
        return await retry(attempt, BusyError, every_s=1.0, within_s=within_s)

    assert run(wait(5.0)) == "done"
    assert tries == [0.0, 1.0, 2.0]
    tries.clear()
    with pytest.raises(BusyError, match="try 2"):
        run(wait(0.5))


def test_any_other_error_is_raised_at_once() -> None:
    async def attempt() -> None:
        raise ValueError

    with pytest.raises(ValueError):
        run(retry(attempt, (BusyError, OSError), every_s=1.0))
