"""A libvirtd that answers what a test has it answer."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final

from vmckpt.hosts.host import Host
from vmckpt.hosts.local import LocalHost
from vmckpt.vm.domains.job import DomainJob
from vmckpt.vm.domains.libvirtd import Libvirtd

METHODS: Final = {
    name: inspect.signature(value)
    for name, value in vars(Libvirtd).items()
    if inspect.iscoroutinefunction(value)
}
# Those that change something.
ORDERS: Final = frozenset(
    {
        "start", "start_with_host", "press_power_button", "destroy", "define", "undefine",
        "save_snapshot", "load_snapshot", "delete_snapshot", "migrate", "abort", "start_postcopy",
        "set_max_downtime", "set_max_speed", "begin_dirty_rate", "save", "restore",
    }
)  # fmt: skip


class FakeLibvirtd(Libvirtd):
    """The libvirtd of a host, without a connection.

    `answers`, by the name of a method: a value, an exception that is raised, or a function, async
    or not, of the call's arguments without the domain's UUID, which returns one of these. A call
    of any other method fails the test. `calls`: the methods that were called, in order; `told`: the
    orders among them, each with its arguments. When `migrate` has ended, the end of the job is
    reported with the figures of the last query, unless `is_silent`.
    """

    is_silent = False

    def __init__(self, host: Host | None = None, /, **answers: object) -> None:
        super().__init__("test:///default", host or LocalHost("a", Path("/"), "::1"))
        if unknown := answers.keys() - METHODS:
            raise ValueError(f"a libvirtd has no methods {unknown}")
        self.calls: list[str] = []
        self.told: list[tuple[object, ...]] = []
        self._jobs: asyncio.Queue[DomainJob] = asyncio.Queue()
        self._last_job = DomainJob(active=True)
        for name in METHODS:
            setattr(self, name, partial(self._call, name, answers))

    @property
    def orders(self) -> list[object]:
        """The orders without their arguments."""
        return [name for name, *_ in self.told]

    @asynccontextmanager
    async def ended_jobs(self, uuid: str) -> AsyncIterator[asyncio.Queue[DomainJob]]:
        self._jobs = asyncio.Queue()
        yield self._jobs

    async def _call(
        self, name: str, answers: dict[str, object], *given: object, **named: object
    ) -> object:
        if name not in answers:
            raise AssertionError(f"the libvirtd of {self.host.name} has no answer to {name!r}")
        self.calls.append(name)
        call = METHODS[name].bind(self, *given, **named)
        call.apply_defaults()
        arguments = [value for key, value in call.arguments.items() if key not in ("self", "uuid")]
        if name in ORDERS:
            self.told.append((name, *arguments))
        answer = answers[name]
        if callable(answer):
            answer = answer(*arguments)
        if inspect.isawaitable(answer):
            answer = await answer
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, DomainJob):
            self._last_job = answer
        if name == "migrate" and not self.is_silent:
            self._jobs.put_nowait(self._last_job)
        return answer


def in_turn(*answers: object) -> Callable[..., object]:
    """One answer after the other; the last one stays."""
    left = list(answers)
    return lambda *_: left.pop(0) if len(left) > 1 else left[0]
