"""tests/faulty_host.py: which fault takes a call, and what the call returns."""

import asyncio
from pathlib import Path

import pytest

from tests.faulty_host import METHODS, Fault, FaultyHost, down, silence
from vmckpt.errors import HostDownError
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.lock import Owner

pytestmark = pytest.mark.unit


def faulty(state: Path, *faults: Fault) -> FaultyHost:
    return FaultyHost("a", state, "127.0.0.1", faults=faults)


def test_a_fault_of_what_no_host_can_do_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="no method 'raed_text'"):
        Fault("raed_text", raises=down)
    with pytest.raises(ValueError, match="can only raise"):
        Fault("exists", raises=down, answers=False)
    with pytest.raises(ValueError, match="answers nothing"):
        Fault("lock", answers=None)


def test_every_method_of_a_host_meets_its_faults() -> None:
    assert {"run", "exists", "lock", "own_command"} <= METHODS
    assert [name for name in METHODS if getattr(FaultyHost, name) is getattr(LocalHost, name)] == []


def test_the_first_fault_that_takes_a_call_happens_and_else_the_host_answers(
    tmp_path: Path,
) -> None:
    seen: list[Path] = []

    async def look(path: Path) -> None:
        seen.append(path)

    x, y = tmp_path / "x", tmp_path / "y"
    x.write_text("x")
    host = faulty(
        tmp_path,
        Fault("read_text", raises=down, times=1),
        Fault("read_text", answers=None, of=lambda path: path == x, times=1),
        Fault("read_text", by=str, of=lambda path: path == y),
        Fault("read_text", first=look),
        Fault("remove", raises=down),
    )

    async def ask() -> None:
        with pytest.raises(HostDownError, match="a is down"):
            await host.read_text(x)
        assert [await host.read_text(path) for path in (x, x, y)] == [None, "x", str(y)]

    asyncio.run(ask())
    assert seen == [x]
    assert host.unused() == ["remove"]
    assert [fault.used for fault in host.faults] == [1, 1, 1, 1, 0]


def test_a_silent_host_answers_none_of_the_calls_and_gives_no_lock(tmp_path: Path) -> None:
    owner = Owner("r1", "migrate", 1, 0.0)

    async def ask(host: FaultyHost) -> None:
        with pytest.raises(HostDownError):
            await host.exists(tmp_path)
        async with host.lock(tmp_path / "lock", owner):
            assert await host.lock_owner(tmp_path / "lock") == owner

    asyncio.run(ask(faulty(tmp_path, *silence("exists"))))
    with pytest.raises(HostDownError):
        asyncio.run(ask(faulty(tmp_path, *silence("exists", "lock"))))
    assert {fault.method for fault in silence()} == METHODS
