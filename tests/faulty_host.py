"""A LocalHost some of whose calls fail, give another answer, or do something first."""

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import KW_ONLY, dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, Final

from vmckpt.errors import HostDownError
from vmckpt.hosts.host import Host
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.lock import Owner

METHODS: Final = frozenset(
    name
    for name, value in vars(Host).items()
    if inspect.isfunction(value) and not name.startswith("_")
)
# The host itself answers.
REAL: Final = object()


@dataclass(slots=True, eq=False)
class Fault:
    """What happens to calls of one method: all, those that `of` selects, or the first `times`.

    `first` runs, then the call raises `raises(host's name)`, returns `answers`, or returns what
    `by` does; with none of the three the host itself answers. `of`, `first` and `by` get the
    call's arguments; `first` and `by` may be async. `used` counts, over all hosts with this fault.
    """

    method: str
    _: KW_ONLY
    raises: Callable[[str], Exception] | None = None
    answers: object = REAL
    by: Callable[..., object] | None = None
    first: Callable[..., object] | None = None
    of: Callable[..., bool] | None = None
    times: int | None = None
    used: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"a host has no method {self.method!r}")
        answers = (self.answers is not REAL) + (self.by is not None)
        if answers + (self.raises is not None) > 1:
            raise ValueError(f"{self.method!r} can only raise, answer a value, or answer `by`")
        if answers and self.method == "lock":
            raise ValueError("a lock is held or raises; it answers nothing")

    def takes(self, *args: Any, **kwargs: Any) -> bool:
        """Whether it happens to a call with these arguments."""
        is_left = self.times is None or self.used < self.times
        return is_left and (self.of is None or self.of(*args, **kwargs))

    async def happen(self, host: str, *args: Any, **kwargs: Any) -> object:
        """The call's answer, or REAL."""
        self.used += 1
        if self.first is not None:
            await _end_of(self.first(*args, **kwargs))
        if self.raises is not None:
            raise self.raises(host)
        return self.answers if self.by is None else await _end_of(self.by(*args, **kwargs))


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultyHost(LocalHost):
    """Each call meets the first of the faults that takes it; without one, LocalHost answers.

    This includes calls that LocalHost makes of its own methods.
    """

    is_this_machine: bool = True
    faults: tuple[Fault, ...] = field(default=(), compare=False)

    def unused(self) -> list[str]:
        """Methods of the faults that no call has met."""
        return [fault.method for fault in self.faults if not fault.used]

    async def meet(self, method: str, *args: Any, **kwargs: Any) -> object:
        """The answer of the fault that takes this call; REAL: the host itself answers."""
        for fault in self.faults:
            if fault.method == method and fault.takes(*args, **kwargs):
                return await fault.happen(self.name, *args, **kwargs)
        return REAL

    @asynccontextmanager
    async def lock(self, path: Path, owner: Owner) -> AsyncIterator[None]:
        await self.meet("lock", path, owner)
        async with LocalHost.lock(self, path, owner):
            yield


def silence(*methods: str) -> tuple[Fault, ...]:
    """Faults of a host that does not answer these methods; without arguments, any method."""
    return tuple(Fault(method, raises=down) for method in methods or sorted(METHODS))


def down(name: str) -> HostDownError:
    return HostDownError(f"{name} is down", why="no way to it", remedy="wait")


def _met(method: str) -> Callable[..., Awaitable[object]]:
    real = getattr(LocalHost, method)

    @wraps(real)
    async def call(self: FaultyHost, *args: Any, **kwargs: Any) -> object:
        answer = await self.meet(method, *args, **kwargs)
        return await real(self, *args, **kwargs) if answer is REAL else answer

    return call


# Set on the class, not written out: for mypy they have the signatures of LocalHost.
for _method in METHODS - {"lock"}:
    setattr(FaultyHost, _method, _met(_method))


async def _end_of(returned: object) -> object:
    return await returned if inspect.isawaitable(returned) else returned
