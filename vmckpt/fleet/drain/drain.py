"""Drain a host and bring its VMs back, even if single moves fail or this process dies.

Its record says where each VM was taken, written before the move begins. An interrupted migration is
recovered like any other, before anything else is done with the VM. What is then left to do is
determined from the hosts' state, not from the plan.
"""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

from vmckpt.drivers.driver import VmInfo
from vmckpt.errors import (
    BusyError,
    CancelledByUserError,
    HostDownError,
    NotFoundError,
    OutcomeUnknownError,
    RefusedError,
    StorageError,
    VmckptError,
    VmLostError,
)
from vmckpt.fleet.drain import record as records
from vmckpt.fleet.drain.carry import Carrier
from vmckpt.fleet.drain.events import DrainEvent, Ended, Noted, Planned, Show, unless_gone
from vmckpt.fleet.drain.plan import DrainOptions, DrainPlan, Planner, Stay, planner
from vmckpt.fleet.drain.record import DrainRecord, drains_dir
from vmckpt.fleet.drain.result import DrainResult, Held
from vmckpt.fleet.drain.view import TOOLS, DrainTools, coming
from vmckpt.forecast.drain.crowding import Past, PastMove
from vmckpt.foreign import MalformedError
from vmckpt.hosts.every import Arrival
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory.drained import close, closed_by, is_closed, reopen
from vmckpt.hosts.inventory.inventory import local_host
from vmckpt.jobs.files import new_run
from vmckpt.sequence.steps import finish
from vmckpt.units import counted
from vmckpt.vm.lifecycle import owner

DRAIN, UNDRAIN = "drain", "undrain"
# How often, and after how long, to retry a VM with a running operation.
BUSY_TRIES, BUSY_WAIT_S = 3, 2.0
WORKED_ON_POLL_S = 0.2
# How often to look for VMs that are started while others move.
LATE_TURNS = 3
# At least this long to wait for a process that recovers a VM's interrupted move.
SETTLE_S = 120.0


async def drain(
    host: Host,
    options: DrainOptions,
    show: Show,
    *,
    reason: str = "",
    dry_run: bool = False,
    tools: DrainTools = TOOLS,
) -> DrainResult:
    """Move all that runs on `host` elsewhere, and keep new VMs away until `undrain`.

    A VM that cannot move stays, with the reason in the result; if none could move, nothing was
    changed and the host is as it was. `reason` is for `is_drained_for`; a host that was drained
    before keeps its own. Raises RefusedError (nothing was changed), BusyError, HostDownError,
    CancelledByUserError (repeat the command to continue).
    """
    async with _only_one(host):
        before = records.load(host.name)
        record = before or DrainRecord(host.name, new_run(), time.time())
        destinations = _destinations(host, options, tools)
        was_closed = await is_closed(host)
        if not was_closed:
            record = replace(record, reason=reason)
        if not (dry_run or (reason and was_closed)):
            await close(host, {"run": record.run, "since_unix_s": record.began_unix_s})
        work = _Work(DRAIN, host, record, options=options, tools=tools, show=show)
        try:
            result = await work.carried_out(destinations, dry_run=dry_run)
        except BaseException:
            # An end before the first move has changed nothing.
            if not (was_closed or dry_run or work.may_have_moved):
                await finish(_as_before(host, record.run, before))
            raise
        if dry_run or result.exit_code != RefusedError.exit_code or was_closed:
            return replace(result, closed=was_closed or not dry_run)
        # None could move, and the exit code says that nothing was changed.
        await finish(_as_before(host, record.run, before))
        return result


async def _as_before(host: Host, run: str, before: DrainRecord | None) -> None:
    """No VM was moved. What an earlier drain took away, and has not come back yet, still may."""
    try:
        now = records.load(host.name)
        if before is None:
            records.forget(host.name)
        elif now is not None:
            records.save(replace(before, away=now.away, moving=now.moving))
    finally:
        await reopen(host, run)


async def undrain(
    host: Host,
    options: DrainOptions,
    show: Show,
    *,
    dry_run: bool = False,
    tools: DrainTools = TOOLS,
) -> DrainResult:
    """Reopen `host` for VMs, and bring back those that were drained from it.

    Raises RefusedError if it is not drained, or the VMs cannot be back in time (nothing was
    changed), BusyError, HostDownError, CancelledByUserError.
    """
    async with _only_one(host):
        record = records.load(host.name)
        if record is None and not await is_closed(host):
            raise RefusedError(
                f"{host.name} is not drained",
                why="it is not marked, and no drain of it is recorded here",
                remedy="see vmckpt vm list",
            )
        if record is None:
            show(Noted(f"{host.name} was drained elsewhere: its VMs are not known here"))
        record = record or DrainRecord(host.name, new_run(), time.time())
        work = _Work(UNDRAIN, host, record, options=options, tools=tools, show=show)
        return await work.carried_out([host], dry_run=dry_run)


async def is_drained_for(host: Host, reason: str) -> bool:
    """Whether a drain with this reason took VMs off `host`, and no other drain came after it.

    Raises StorageError, HostDownError.
    """
    record = records.load(host.name)
    if record is None or record.reason != reason:
        return False
    if not await is_closed(host):
        return True  # not all of its VMs came back
    with suppress(MalformedError):
        return await closed_by(host) == record.run
    return False


def _destinations(host: Host, options: DrainOptions, tools: DrainTools) -> list[Host]:
    hosts = tools.hosts()
    for name in options.to:
        if name not in {one.name for one in hosts}:
            raise NotFoundError(
                f"there is no host '{name}'",
                why=f"the inventory has: {', '.join(one.name for one in hosts)}",
                remedy="see `vmckpt host list`",
            )
        if name == host.name:
            raise RefusedError(
                f"{name} cannot be drained to itself", why="--to names it", remedy="name others"
            )
    wanted = [one for one in hosts if one.name in options.to or not options.to]
    return [one for one in wanted if one.name != host.name]


@asynccontextmanager
async def _only_one(host: Host) -> AsyncIterator[None]:
    await local_host().make_dir(drains_dir())
    async with local_host().lock(drains_dir() / f"{host.name}.lock", owner(DRAIN)):
        yield


class _Work:
    """One drain or undrain. The record in memory is always the one on disk."""

    def __init__(
        self,
        action: str,
        host: Host,
        record: DrainRecord,
        *,
        options: DrainOptions,
        tools: DrainTools,
        show: Show,
    ) -> None:
        self._action, self._host, self._options = action, host, options
        self._tools, self._show, self._record = tools, unless_gone(show), record
        self.may_have_moved = False
        self._silent: Sequence[VmckptError] = ()
        self._moved = dict[str, str]()
        self._stay = dict[str, Stay]()
        self._held = dict[str, Held]()
        self._tries = dict[str, int]()

    async def carried_out(self, destinations: Sequence[Host], *, dry_run: bool) -> DrainResult:
        """Carry all of it out."""
        if not dry_run:
            await self._settle()
        seen = await self._inspect()
        leaving, stopped = self._leaving(seen)
        to_open = (self._host.name,) if self._action == UNDRAIN else ()
        plans, cannot = await planner(
            self._options, self._tools, leaving, destinations, tell=self._say, to_open=to_open
        )
        self._stay |= {one.vm: one for one in cannot}
        plan = await self._planned(plans, seen, leaving, destinations, stopped)
        plan.require(self._options.finish_within_s)
        self._show(Planned(plan))
        if dry_run:
            return self._result(plan, None)
        if self._action == UNDRAIN:
            await reopen(self._host)
        self._save(self._record)
        self.may_have_moved = True
        began_s = time.monotonic()
        try:
            await self._carry(plan, plans, destinations)
            if self._action == DRAIN:
                await self._carry_late(destinations)
        except asyncio.CancelledError as exc:
            raise self._cancelled(len(leaving)) from exc
        self._forget_if_done()
        return self._result(plan, time.monotonic() - began_s)

    async def _settle(self) -> None:
        """End the operations of a killed command, and record where those VMs are."""
        for vm in list(self._record.moving):
            try:
                where = await self._settled(vm)
            except NotFoundError:
                self._save(self._record.forgets(vm))
                continue
            except VmckptError as exc:
                self._stay[vm] = _stay(vm, exc)
                continue
            self._say(f"{vm}: its move was interrupted; it is on {where}")
            self._save(self._record.ends(vm, where))

    async def _settled(self, vm: str) -> str:
        """Where it is, once no operation holds it. A recovery may be running on either host."""
        reported, given_up_s = False, math.inf
        while True:
            if await self._tools.is_worked_on(vm):
                if not reported:
                    self._say(f"{vm}: its move, which a killed command began, continues")
                reported, given_up_s = True, math.inf
            else:
                given_up_s = min(given_up_s, time.monotonic() + SETTLE_S)
                try:
                    return (await self._tools.find(vm, self._say)).host.name
                except BusyError:
                    if time.monotonic() > given_up_s:
                        raise
            await asyncio.sleep(WORKED_ON_POLL_S)

    async def _inspect(self) -> Sequence[VmInfo]:
        answers = await self._tools.inspect()
        if self._action == DRAIN and await self._has_ended(answers.arrivals):
            answers = await self._tools.inspect()
        self._silent = answers.silent
        for error in answers.silent:
            self._say(f"not asked: {error}")
        if self._action == DRAIN and self._host.name in answers.unanswered:
            name = self._host.name
            raise HostDownError(
                f"what runs on {name} is not known",
                why="; ".join(f"{error.what}: {error.why}" for error in answers.silent),
                remedy=f"fix that, then continue: vmckpt drain {name}",
            )
        for one in answers.unread:
            if self._action == DRAIN and one.host == self._host.name:
                self._stay[one.vm] = _stay(one.vm, one.error)  # it may well be running
        return answers.given

    async def _has_ended(self, arrivals: Sequence[Arrival]) -> bool:
        """End interrupted migrations to the host, where their guests may run.

        One that cannot be ended stays. Returns whether there are any.
        """
        here = (one for one in arrivals if one.host == self._host.name)
        coming = [one.vm for one in here if one.operation is None]
        for vm in coming:
            try:
                await self._tools.find(vm, self._say)
            except VmckptError as exc:
                self._stay[vm] = _stay(vm, exc)
        return bool(coming)

    def _leaving(self, seen: Sequence[VmInfo]) -> tuple[list[VmInfo], tuple[str, ...]]:
        """Those that are to move, and those that do not run."""
        if self._action == DRAIN:
            here = [vm for vm in seen if vm.host == self._host.name]
            return (
                [vm for vm in here if vm.is_on and vm.name not in self._stay],
                tuple(vm.name for vm in here if not vm.is_on),
            )
        # A domain may be defined on several hosts: where it runs counts.
        by_name = {vm.name: vm for vm in sorted(seen, key=lambda vm: vm.is_on)}
        leaving = []
        for name in [*self._record.away]:
            vm = by_name.get(name)
            if vm is None and self._silent:
                self._stay[name] = Stay(
                    name, "a host that does not answer may have it", "try again when it does", 6
                )
            elif vm is None:
                self._say(f"{name} no longer exists")
                self._record = self._record.forgets(name)
            elif vm.host == self._host.name:
                self._record = self._record.forgets(name)
            elif not vm.is_on:
                why = f"it is stopped, on {vm.host}"
                self._stay[name] = Stay(name, why, f"start it: vmckpt vm start {name}")
            elif name not in self._stay:
                leaving.append(vm)
        return leaving, ()

    async def _planned(
        self,
        plans: Planner,
        seen: Sequence[VmInfo],
        leaving: Sequence[VmInfo],
        destinations: Sequence[Host],
        stopped: tuple[str, ...] = (),
    ) -> DrainPlan:
        plan = await plans.plan(seen, [vm.name for vm in leaving], destinations, stopped)
        self._stay |= {one.vm: one for one in plan.stay}
        return plan

    async def _carry(self, plan: DrainPlan, plans: Planner, destinations: Sequence[Host]) -> None:
        """Move them; if a host refuses a VM, the others are tried."""
        hosts = {host.name: host for host in self._tools.hosts()}
        hosts |= {host.name: host for host in destinations}
        first = True
        while plan.table.moves:
            carrier = Carrier(
                self._tools, self._options.options, hosts, self._begins, self._ends, self._tell
            )
            began_s = time.monotonic()
            try:
                await carrier.carry(plan.table)
            finally:
                self._stay |= {
                    move.vm: _stay(move.vm, exc)
                    for move, exc in carrier.failures
                    if not isinstance(exc, NotFoundError)  # it was removed meanwhile
                }
                for vm, exc in carrier.held:
                    self._held[vm] = Held(vm, f"{exc.what}: {exc.why}", exc.remedy)
                    self._say(str(exc))
            if first and len(carrier.took) == len(plan.table.moves):
                self._keep_past(plan, carrier.took, time.monotonic() - began_s, hosts)
            first = False
            again = list[str]()
            for move, error in carrier.failures:
                if isinstance(error, BusyError):
                    self._tries[move.vm] = self._tries.get(move.vm, 0) + 1
                    if self._tries[move.vm] < BUSY_TRIES:
                        again.append(move.vm)
                elif not carrier.is_final(error) and move.source not in carrier.down:
                    plans.close(move.vm, move.destination, f"{error.what}: {error.why}")
                    again.append(move.vm)
            if not again:
                return
            if self._tries:
                await asyncio.sleep(BUSY_WAIT_S)
            plan = await self._again(plans, again, destinations)

    async def _carry_late(self, destinations: Sequence[Host]) -> None:
        """Also move VMs that were started on the host since it was queried.

        The start, perhaps of a VM that was stopped there, or another drain's move to it began
        before the host was marked; wait for it.
        """
        for turn in range(LATE_TURNS + 1):
            await self._wait_for_arrivals()
            seen = await self._inspect()
            late, stopped = self._leaving(seen)
            for name in stopped:  # one that could not move may have been shut down since
                if name in self._stay and self._stay[name].code == RefusedError.exit_code:
                    del self._stay[name]
            if not late:
                return
            if turn == LATE_TURNS:
                break
            for vm in late:
                self._say(f"{vm.name} was started meanwhile")
            plans, cannot = await planner(
                self._options, self._tools, late, destinations, tell=self._say
            )
            self._stay |= {one.vm: one for one in cannot}
            plan = await self._planned(plans, seen, late, destinations)
            self._show(Planned(plan))
            await self._carry(plan, plans, destinations)
        remedy = f"find out what starts it, then: vmckpt drain {self._host.name}"
        for vm in late:
            why = "it comes back each time it is moved away"
            self._stay[vm.name] = Stay(vm.name, why, remedy, BusyError.exit_code)

    async def _wait_for_arrivals(self) -> None:
        reported = set[str]()
        while found := await coming(self._host):
            for name in sorted(found - reported):
                self._say(f"{name} is on its way to {self._host.name}: waiting for it")
            reported |= found
            await asyncio.sleep(WORKED_ON_POLL_S)

    async def _again(
        self, plans: Planner, names: Sequence[str], destinations: Sequence[Host]
    ) -> DrainPlan:
        """A new plan for those that failed. A VM without a destination keeps its previous
        reason.
        """
        seen = await self._inspect()
        leaving = [vm for vm in seen if vm.name in names]
        before = dict(self._stay)
        plan = await self._planned(plans, seen, leaving, destinations)
        for one in plan.stay:
            if old := before.get(one.vm):
                self._stay[one.vm] = old._replace(why=f"{old.why}; and elsewhere: {one.why}")
        for move in plan.table.moves:
            self._say(f"{move.vm} is tried again, to {move.destination}")
        self._show(Planned(plan))
        return plan

    def _begins(self, vm: str, destination: str) -> None:
        self._save(self._record.begins(vm, destination))

    def _ends(self, vm: str, where: str) -> None:
        self._save(self._record.ends(vm, where))
        if where == self._host.name and self._action == UNDRAIN:
            # It is back on its host: no other drain may bring it back elsewhere.
            for other in records.load_all():
                if other.host != self._host.name and vm in other.away:
                    records.save(other.forgets(vm))

    def _say(self, text: str) -> None:
        self._show(Noted(text))

    def _tell(self, event: DrainEvent) -> None:
        if isinstance(event, Ended) and not event.why:
            self._moved[event.vm] = event.where
            self._stay.pop(event.vm, None)
        self._show(event)

    def _save(self, record: DrainRecord) -> None:
        self._record = record
        records.save(record)

    def _forget_if_done(self) -> None:
        if self._action == UNDRAIN and not (self._record.away or self._record.moving):
            records.forget(self._host.name)

    def _keep_past(
        self, plan: DrainPlan, took: Sequence[PastMove], took_s: float, hosts: Mapping[str, Host]
    ) -> None:
        if plan.band_s is None:
            return  # nothing was expected, so there is no error to learn from
        order = {move.vm: number for number, move in enumerate(plan.table.moves)}
        # Expected without the experience of earlier drains.
        moves = tuple(
            taken._replace(move=taken.move._replace(cost=plan.expected[taken.move.vm]))
            for taken in sorted(took, key=lambda one: order[one.move.vm])
        )
        ends = {name for one in moves for name in (one.move.source, one.move.destination)}
        here = all(hosts[name].is_this_machine for name in ends)
        # It only improves the next forecast.
        with suppress(StorageError):
            records.keep_past(new_run(), Past(moves, plan.table.at_once, took_s), here=here)

    def _result(self, plan: DrainPlan, took_s: float | None) -> DrainResult:
        stay = tuple(sorted(self._stay.values()))
        held = tuple(sorted(self._held.values()))
        return DrainResult(self._host.name, self._action, plan, self._moved, stay, took_s, held)

    def _cancelled(self, wanted: int) -> VmckptError:
        """The cancellation, or a worse error: a VM that is lost or unknown."""
        what = f"cancelled: {len(self._moved)} of {counted(wanted, 'VM')} moved"
        for kind in (VmLostError, OutcomeUnknownError):
            grave = [one for one in sorted(self._stay.values()) if one.code == kind.exit_code]
            if grave:
                why = "; ".join(f"{one.vm}: {one.why}" for one in grave)
                remedy = "; ".join(dict.fromkeys(one.remedy for one in grave))
                return kind(what, why=why, remedy=remedy)
        back = f"vmckpt undrain {self._host.name}"
        other = f"; {back} takes it back" if self._action == DRAIN else ""
        return CancelledByUserError(
            what,
            why="asked to stop; moves in progress were undone, unless it was too late",
            remedy=f"the same command continues{other}",
        )


def _stay(vm: str, error: VmckptError) -> Stay:
    return Stay(vm, f"{error.what}: {error.why}", error.remedy, error.exit_code)
