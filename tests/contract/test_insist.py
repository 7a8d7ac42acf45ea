"""A dead-man's switch that recovers a VM goes on while a host is silent or a lock is held."""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.commands import COMMAND, vmckpt
from vmckpt.errors import BusyError, HostDownError, OutcomeUnknownError, VmckptError
from vmckpt.migrate import recorded
from vmckpt.migrate.outcome import retrying
from vmckpt.migrate.outcome.retrying import retry_recovery

pytestmark = pytest.mark.contract

DOWN = HostDownError("b is down", why="no way to it", remedy="wait")
HELD = BusyError("'web' is held", why="held by migrate to b (run r1)", remedy="wait")
UNKNOWN = OutcomeUnknownError("nobody knows", why="-", remedy="-")


async def played(errors: list[VmckptError]) -> str:
    async def attempt() -> str:
        if errors:
            raise errors.pop(0)
        return "recovered"

    return await retry_recovery(attempt)


def test_a_silent_host_and_a_held_lock_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrying, "RETRY_POLL_S", 0.0)
    assert asyncio.run(played([DOWN, HELD, HELD, DOWN])) == "recovered"


def test_what_time_does_not_mend_is_raised_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrying, "RETRY_POLL_S", 0.0)
    errors: list[VmckptError] = [DOWN, UNKNOWN, HELD]
    with pytest.raises(OutcomeUnknownError):
        asyncio.run(played(errors))
    assert errors == [HELD]


def test_the_last_error_is_raised_when_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrying, "RETRY_S", -1.0)
    with pytest.raises(HostDownError):
        asyncio.run(played([DOWN]))


def test_the_switch_insists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Sequence[str]] = []

    @contextmanager
    def armed(command: Sequence[str], _: Path) -> Iterator[None]:
        given.append(command)
        yield

    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(recorded, "armed", armed)

    async def play() -> None:
        async with recorded.dead_mans_switch("web", "r1"):
            pass

    asyncio.run(play())
    (command,) = given
    assert tuple(command[: len(COMMAND)]) == COMMAND
    words = command[len(COMMAND) :]
    assert "--insist" in words
    # The command line knows it: there is no such VM, exit code 3.
    assert vmckpt(tmp_path, *words).returncode == 3
