"""The fake libvirtd answers what it was given, and nothing else."""

import asyncio

import pytest

from tests.fake_libvirtd import METHODS, ORDERS, FakeLibvirtd, in_turn
from vmckpt.errors import BusyError

pytestmark = pytest.mark.unit
BUSY = BusyError("it is busy", why="at work", remedy="wait")


def test_what_it_has_no_answer_to_fails_the_test() -> None:
    session = FakeLibvirtd(job=None)
    with pytest.raises(AssertionError, match="no answer to 'destroy'"):
        asyncio.run(session.destroy("u"))
    with pytest.raises(ValueError, match="dig"):
        FakeLibvirtd(dig=None)
    assert METHODS.keys() > ORDERS


def test_an_answer_is_a_value_an_error_or_what_a_function_returns() -> None:
    async def is_named(name: str) -> bool:
        return name == "default"

    session = FakeLibvirtd(version=(8, 0, 0), abort=BUSY, has_network=is_named)
    assert asyncio.run(session.version()) == (8, 0, 0)
    assert [asyncio.run(session.has_network(name)) for name in ("default", "x")] == [True, False]
    with pytest.raises(BusyError):
        asyncio.run(session.abort("u"))
    assert session.calls == ["version", "has_network", "has_network", "abort"]
    assert session.told == [("abort",)]


def test_answers_in_turn_end_with_the_last_and_orders_are_kept_with_their_arguments() -> None:
    session = FakeLibvirtd(has_saved_memory=in_turn(True, BUSY), undefine=None)
    assert asyncio.run(session.has_saved_memory("u"))
    for _ in range(2):
        with pytest.raises(BusyError):
            asyncio.run(session.has_saved_memory("u"))
    asyncio.run(session.undefine("u", keeps_tpm=True))
    asyncio.run(session.undefine("u"))
    assert session.told == [("undefine", True), ("undefine", None)]
    assert session.orders == ["undefine", "undefine"]
