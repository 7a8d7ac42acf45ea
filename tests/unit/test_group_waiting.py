"""A member of a group that waits for the others comes last: it is first for the moment alone."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from vmckpt.checkpoint import take as taking

pytestmark = pytest.mark.unit


async def nothing(*_: object) -> Any:
    return []


async def no_time() -> float:
    return 0.0


class Told:
    """The member and the capture at once: what happened, and whether the session came first."""

    def __init__(self) -> None:
        self.is_first, self.steps = False, list[tuple[str, bool]]()

    @contextmanager
    def high_priority(self) -> Iterator[None]:
        self.is_first = True
        try:
            yield
        finally:
            self.is_first = False

    def pausing(self, *_: object) -> nullcontext[None]:
        return nullcontext()

    async def all_prepared(self, keep_up: Callable[[], Awaitable[None]]) -> None:
        await keep_up()
        self.steps.append(("waits", self.is_first))

    def saves_devices(self) -> bool:
        return False


def test_it_is_first_for_the_moment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told()

    @asynccontextmanager
    async def capturing(*_: object, **__: object) -> AsyncIterator[Any]:
        yield SimpleNamespace(learn_devices=no_time, saves_devices=told.saves_devices)

    async def epoch(_: object) -> Any:
        told.steps.append(("the moment", told.is_first))
        return SimpleNamespace(pause=SimpleNamespace(total_s=0.0), pages=())

    async def stored(*_: object) -> None:
        told.steps.append(("stores", told.is_first))

    monkeypatch.setattr(taking, "capturing", capturing)
    files = SimpleNamespace(path=None, ram=lambda _: None)
    vm: Any = SimpleNamespace(
        spec=SimpleNamespace(memory_bytes=0, ram_dir=None),
        qemu=SimpleNamespace(files=files, process=SimpleNamespace(pid=1)),
        ram_names=("ram0",),
        ram_is_shared=True,
    )
    monitor: Any = SimpleNamespace()
    options: Any = SimpleNamespace(max_pause_s=1.0)
    store_calls: Any = nothing
    one: Any = taking.Taking(vm, monitor, options, store_calls, lambda _: None)
    one.join(told, lambda _: None)
    one._epoch = epoch
    passes = SimpleNamespace(
        everything=nothing, passes_until_it_fits=nothing, spilled=nothing, put_newest=stored,
        passes=0,
    )  # fmt: skip
    monkeypatch.setattr(taking, "MemoryPasses", lambda *_, **__: passes)
    asyncio.run(one._memory(SimpleNamespace(area=nothing)))
    assert told.steps == [("waits", False), ("the moment", True), ("stores", False)]
