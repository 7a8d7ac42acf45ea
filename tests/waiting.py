"""Wait in a test for what another process or thread does, within a limit."""

import time
from collections.abc import Callable
from typing import Any


def eventually(
    true: Any, within_s: float = 10.0, what: str | Callable[[], str] = "it holds"
) -> None:
    """Wait until `true()` holds; `what` says, or tells at the end, what was waited for."""
    deadline = time.monotonic() + within_s
    while not true():
        if time.monotonic() >= deadline:
            words = what if isinstance(what, str) else what()
            raise AssertionError(f"not within {within_s} s: {words}")
        time.sleep(0.02)
