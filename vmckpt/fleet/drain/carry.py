"""Execute a timetable: a limited number of moves at once; one that fails does not stop the rest."""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from vmckpt.errors import (
    CancelledByUserError,
    HostDownError,
    JobHeldError,
    NotFoundError,
    OperationFailedError,
    OutcomeUnknownError,
    StorageError,
    VmckptError,
    VmLostError,
)
from vmckpt.events.types import Event, PhaseBegan
from vmckpt.fleet.drain.events import Began, Ended, Noted, Progressed, Show
from vmckpt.fleet.drain.view import DrainTools
from vmckpt.forecast.drain.crowding import PastMove
from vmckpt.forecast.drain.fleet import PlannedMove
from vmckpt.forecast.drain.timetable import MoveSpan, Timetable
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory.drained import require_open
from vmckpt.migrate.elsewhere.watch import WatchedNoLongerError
from vmckpt.migrate.outcome.recover import Recovery
from vmckpt.options.migration import MigrationOptions

# Errors after which nothing is retried: it would be useless, or might be unsafe.
_FINAL = (OutcomeUnknownError, VmLostError, CancelledByUserError, NotFoundError, StorageError)


class FailedMove(NamedTuple):
    """A move that failed. The VM is where it was, unless the error says otherwise."""

    move: PlannedMove
    error: VmckptError


class HeldJob(NamedTuple):
    """A VM that has moved, and why its devices' jobs were not resumed."""

    vm: str
    error: JobHeldError


@dataclass(slots=True)
class Carrier:
    """Moves VMs. `begins` and `ends` record what is about to happen, and where a VM is then.

    `down` are hosts that stopped answering: no move to or from them is begun. `took` are the
    successful moves, with their times. `held` succeeded too, but jobs that used the VM's devices
    were not resumed.
    """

    tools: DrainTools
    options: MigrationOptions
    hosts: Mapping[str, Host]
    begins: Callable[[str, str], None]
    ends: Callable[[str, str], None]
    show: Show
    failures: list[FailedMove] = field(default_factory=list)
    held: list[HeldJob] = field(default_factory=list)
    down: dict[str, HostDownError] = field(default_factory=dict)
    took: list[PastMove] = field(default_factory=list)
    _began_s: float = 0.0
    _waiting: list[PlannedMove] = field(default_factory=list)
    _under_way: "dict[asyncio.Task[None], PlannedMove]" = field(default_factory=dict)

    @staticmethod
    def is_final(error: VmckptError) -> bool:
        """Whether nothing is to be retried."""
        return isinstance(error, _FINAL)

    async def carry(self, table: Timetable) -> None:
        """Carry all of it out; failed moves are in `failures`.

        On cancellation it begins no more moves, undoes running ones that are not past their
        switchover, and raises CancelledError.
        """
        self._waiting, self._began_s = list(table.moves), time.monotonic()
        try:
            while self._waiting or self._under_way:
                self._begin(table.at_once)
                if not self._under_way:
                    break
                done, _ = await asyncio.wait(self._under_way, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    del self._under_way[task]
                    task.result()
        except BaseException:
            await self._go_back()
            raise

    async def _go_back(self) -> None:
        """Each further cancellation is passed to the moves: what hosts do is no longer watched.

        Otherwise it would wait endlessly for a move whose host has died.
        """
        ask_again = True
        while any(not task.done() for task in self._under_way):
            for task in self._under_way if ask_again else ():
                task.cancel()
            ask_again = False
            try:
                await asyncio.wait(self._under_way)
            except asyncio.CancelledError:
                ask_again = True

    def _begin(self, at_once: int) -> None:
        """Repeatedly begin the first move in order whose hosts have room for another."""
        for move in list(self._waiting):
            if error := self.down.get(move.source) or self.down.get(move.destination):
                self._waiting.remove(move)
                self._failed(move, error, 0.0)
                continue
            others = self._under_way.values()
            out = sum(other.source == move.source for other in others)
            coming = sum(other.destination == move.destination for other in others)
            if max(out, coming) < at_once:
                self._waiting.remove(move)
                self._under_way[asyncio.create_task(self._move(move))] = move

    async def _move(self, move: PlannedMove) -> None:
        began_s = time.monotonic()
        self.show(Began(move.vm, move.source, move.destination))
        marks = dict[str, float]()
        try:
            where = await self._carried(move, marks)
        except WatchedNoLongerError as exc:
            unknown = OutcomeUnknownError(exc.what, why=exc.why, remedy=exc.remedy)
            self._failed(move, unknown, time.monotonic() - began_s)
            return
        except VmckptError as exc:
            if isinstance(exc, HostDownError):
                await self._who_is_down(move)
            self._failed(move, exc, time.monotonic() - began_s)
            return
        except Exception as exc:  # noqa: BLE001 - whatever it is, it is this VM's alone
            broken = OutcomeUnknownError(
                f"the migration of '{move.vm}' failed unexpectedly",
                why=f"vmckpt has a bug: {type(exc).__name__}: {exc}",
                remedy=f"see where it is: vmckpt vm show {move.vm}; report the bug",
            )
            self._failed(move, broken, time.monotonic() - began_s)
            return
        self._write_down(move.vm, where)
        if (span := _span(began_s, marks, time.monotonic())) is not None:
            self.took.append(PastMove(move, MoveSpan(*(at_s - self._began_s for at_s in span))))
        self.show(Ended(move.vm, where, time.monotonic() - began_s))

    async def _carried(self, move: PlannedMove, marks: dict[str, float]) -> str:
        """Where the VM is then. Raises what `migrate` raises."""
        vm = await self.tools.find(move.vm, lambda text: self.show(Noted(text)))
        if vm.host.name != move.source:
            return vm.host.name  # it has been moved meanwhile
        await require_open(self.hosts[move.destination])  # it may be drained, too, by now
        self.begins(move.vm, move.destination)

        def tell(event: Event) -> None:
            if isinstance(event, PhaseBegan):
                marks.setdefault(event.phase, time.monotonic())
            self.show(Progressed(move.vm, event))

        try:
            done = await vm.migrate(self.hosts[move.destination], self.options, tell)
        except JobHeldError as exc:
            if await self._where(move) != move.destination:
                raise  # an interrupted earlier operation was recovered first
            self.held.append(HeldJob(move.vm, exc))
            return move.destination
        where = done.host if isinstance(done, Recovery) else done.target
        if where != move.destination:
            raise OperationFailedError(
                f"'{move.vm}' was not migrated; it is still on {where}",
                why="the process that migrated it was killed",
                remedy="try again",
            )
        return where

    async def _where(self, move: PlannedMove) -> str:
        """Raises OutcomeUnknownError."""
        try:
            return (await self.tools.find(move.vm, lambda text: self.show(Noted(text)))).host.name
        except VmckptError as exc:
            raise OutcomeUnknownError(
                f"it is unknown where '{move.vm}' is: {exc.what}", why=exc.why, remedy=exc.remedy
            ) from exc

    def _failed(self, move: PlannedMove, error: VmckptError, took_s: float) -> None:
        self.failures.append(FailedMove(move, error))
        if not isinstance(error, (OutcomeUnknownError, VmLostError)):
            self._write_down(move.vm, move.source)
        self.show(Ended(move.vm, move.source, took_s, f"{error.what}: {error.why}"))

    def _write_down(self, vm: str, where: str) -> None:
        try:
            self.ends(vm, where)
        except StorageError as exc:
            # The record says that it began: the next command checks where the VM is.
            self.show(Noted(str(exc)))

    async def _who_is_down(self, move: PlannedMove) -> None:
        for name in (move.source, move.destination):
            try:
                await self.hosts[name].require_up()
            except HostDownError as exc:
                self.down[name] = exc


def _span(began_s: float, marks: Mapping[str, float], ended_s: float) -> MoveSpan | None:
    """None if the move reported too little."""
    sends_s = marks.get("mirror", marks.get("transfer"))
    sent_s = marks.get("verify", marks.get("release"))
    if sends_s is None or sent_s is None:
        return None
    return MoveSpan(began_s, marks.get("turn", sends_s), sends_s, sent_s, ended_s)
