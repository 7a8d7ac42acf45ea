"""An event loop whose time passes at once: what sleeps wakes in order, without waiting."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Skipping(selectors.SelectSelector):
    """Nothing comes from outside: when all sleep, time goes on to the first to wake."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RuntimeError("everybody waits for somebody else")
        self.now_s += max(0.0, timeout)
        return []


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._skipping = _Skipping()
        super().__init__(self._skipping)

    def time(self) -> float:
        return self._skipping.now_s


def run(work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns; its loop begins at second 0."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(work)
