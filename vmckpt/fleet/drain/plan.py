"""Plan a drain: where each VM goes, in which order, and how long all of it takes."""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from vmckpt.drivers.driver import Driver, VmInfo, examined
from vmckpt.errors import NotFoundError, RefusedError, VmckptError
from vmckpt.events.record import load_all
from vmckpt.fleet.drain.costs import Found, MoveCosts
from vmckpt.fleet.drain.record import load_past
from vmckpt.fleet.drain.view import DrainTools, HostLimits, HostSeen, inspect_hosts
from vmckpt.forecast.drain.crowding import LearnedCrowding, learn
from vmckpt.forecast.drain.fleet import MoveCost, Mover
from vmckpt.forecast.drain.placement import DrainPlacement, place
from vmckpt.forecast.drain.timetable import AT_ONCE, Timetable, timetable
from vmckpt.forecast.measure.dirty_rate import DirtyRate
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory.directories import runs_dir
from vmckpt.options.migration import MigrationOptions
from vmckpt.preflight.finding import REFUSE, WARN, Examined, Finding
from vmckpt.sequence.steps import all_of
from vmckpt.units import format_duration

# The default time for which each guest is measured, all concurrently.
MEASURE_S = 4.0
# Concurrent queries to hosts.
ASKED_AT_ONCE = 8
# How much moves slow one another down before any drain has been measured: between hosts that are
# parts of this machine and share its processors, and between others.
CROWDING_HERE, CROWDING = 0.5, 0.0
RETURN_CHECK = "way-back"
# If nothing is known of any pair of hosts: enough for an order, not for a forecast.
_UNKNOWN_AROUND_S, _UNKNOWN_BYTES_PER_S = 1.0, 1e9
NO_LIMITS_BUT_SENSE = HostLimits()


@dataclass(frozen=True, slots=True)
class DrainOptions:
    """The operator's options. `to`: only these hosts; the names in `apart` and `together` are VMs.

    `one_way`: a VM may go where it could not return from. `measure_s`: how long to measure guests.
    """

    to: tuple[str, ...] = ()
    finish_within_s: float | None = None
    max_parallel: int | None = None
    bandwidth_bytes_per_s: int = 0
    limits: HostLimits = NO_LIMITS_BUT_SENSE
    apart: tuple[tuple[str, ...], ...] = ()
    together: tuple[tuple[str, ...], ...] = ()
    one_way: bool = False
    measure_s: float = MEASURE_S

    @property
    def options(self) -> MigrationOptions:
        """The options of every migration."""
        return MigrationOptions(bandwidth_bytes_per_s=self.bandwidth_bytes_per_s, in_turn=True)


class Stay(NamedTuple):
    """Why a VM stays, and the remedy."""

    vm: str
    why: str
    remedy: str
    code: int = 4


@dataclass(frozen=True, slots=True)
class DrainPlan:
    """`band_s` is the forecast: the 10th, 50th and 90th percentile; None: nothing is known.

    `expected` is the cost of each move by single moves alone.
    """

    table: Timetable
    stay: tuple[Stay, ...]
    stopped: tuple[str, ...]
    closed: Mapping[str, str]
    band_s: tuple[float, float, float] | None
    crowding: LearnedCrowding
    notes: tuple[str, ...]
    expected: Mapping[str, MoveCost]

    def require(self, within_s: float | None) -> None:
        """Raises RefusedError if a time constraint is not satisfied."""
        if within_s is None:
            return
        if self.band_s is None:
            raise RefusedError(
                "its duration cannot be forecast",
                why="; ".join(self.notes),
                remedy="measure it: vmckpt host calibrate A B; or leave out --finish-within",
            )
        if self.band_s[2] > within_s:
            raise RefusedError(
                f"it does not end within {format_duration(within_s)}",
                why=f"it takes {format_duration(self.band_s[1])}, one time in ten more than "
                f"{format_duration(self.band_s[2])}",
                remedy=f"--finish-within {int(self.band_s[2]) + 1}s would do",
            )

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        spans = self.table.spans
        moves = [
            {
                "vm": move.vm,
                "source": move.source,
                "target": move.destination,
                "begin_s": round(spans[move.vm].begin_s, 3),
                "end_s": round(spans[move.vm].end_s, 3),
                "alone_s": round(move.cost.alone_s, 3),
            }
            for move in self.table.moves
        ]
        return {
            "moves": moves,
            "at_once": self.table.at_once,
            "forecast_s": None if self.band_s is None else [round(s, 3) for s in self.band_s],
            "bound_s": round(self.table.bound_s, 3),
            "crowding": round(self.crowding.crowding, 3),
            "stay": [one._asdict() for one in self.stay],
            "stopped": list(self.stopped),
            "closed": dict(self.closed),
            "notes": list(self.notes),
        }


@dataclass(slots=True)
class Planner:
    """Plans for these VMs, repeatedly if needed; results of checks are reused.

    `closed` are hosts that a VM cannot go to, with the reason; `to_open` as for `inspect_hosts`.
    """

    options: DrainOptions
    tools: DrainTools
    vms: Mapping[str, Driver]
    costs: MoveCosts
    measured: Mapping[str, DirtyRate | None]
    to_open: Collection[str] = ()
    closed: dict[str, dict[str, str]] = field(default_factory=dict)
    _examined: dict[tuple[str, str], Examined] = field(default_factory=dict)

    def close(self, vm: str, host: str, why: str) -> None:
        """Exclude the host for the VM."""
        self.closed.setdefault(vm, {})[host] = why

    async def plan(
        self,
        seen: Sequence[VmInfo],
        names: Sequence[str],
        to: Sequence[Host],
        stopped: tuple[str, ...] = (),
    ) -> DrainPlan:
        """The plan for these VMs, to some of these hosts. Changes nothing."""
        leaving = [vm for vm in seen if vm.name in names and vm.name in self.vms]
        hosts = await inspect_hosts(to, seen, self.options.limits, names, self.to_open)
        rooms = [_with_words(one, self.options, seen, names) for one in hosts]
        while True:
            found = await self._all_costs(leaving, hosts)
            movers = [self._mover(vm, found[vm.name]) for vm in leaving]
            placed = place(movers, [one.room for one in rooms if one.room])
            if not await self._examine(placed, leaving, hosts):
                break
        return replace(self._made(placed, leaving, hosts, found), stopped=stopped)

    def _made(
        self,
        placed: DrainPlacement,
        leaving: Sequence[VmInfo],
        hosts: Sequence[HostSeen],
        found: Mapping[str, Mapping[str, Found]],
    ) -> DrainPlan:
        crowding = self.costs.taught
        most = self.options.max_parallel or AT_ONCE[-1]
        table = timetable(placed.moves, most, crowding.crowding, crowding.at_once)
        used = {move.vm: found[move.vm][move.destination] for move in placed.moves}
        unknown = any(one.cost is None for one in used.values())
        closed = {one.host.name: one.closed for one in hosts if one.closed}
        away = "; ".join(f"{name}: {why}" for name, why in closed.items())
        stay = [
            Stay(vm, "; ".join(filter(None, (why, away))), self._remedy(vm))
            for vm, why in placed.stay.items()
        ]
        return DrainPlan(
            table,
            tuple(stay),
            (),
            closed,
            None if unknown else table.band_s(crowding.spread),
            crowding,
            tuple(_notes(used, leaving, self.measured)),
            {vm: one.expected for vm, one in used.items() if one.expected is not None},
        )

    def _remedy(self, vm: str) -> str:
        if reasons := {one.code for one in self._refusals(vm)}:
            return f"vmckpt check {vm} HOST says what would help ({', '.join(sorted(reasons))})"
        return "give a host more room, or allow more: --to, --keep-free, --vcpus-per-cpu, --max-vms"

    def _refusals(self, vm: str) -> list[Finding]:
        found = [one for (name, _), one in self._examined.items() if name == vm]
        return [check for one in found for check in one.checks if self._is_against(check)]

    def _is_against(self, check: Finding) -> bool:
        one_way = check.code == RETURN_CHECK and check.verdict == WARN and not self.options.one_way
        return check.verdict == REFUSE or one_way

    async def _all_costs(
        self, leaving: Sequence[VmInfo], hosts: Sequence[HostSeen]
    ) -> dict[str, dict[str, Found]]:
        open_ = [one.host for one in hosts if one.room is not None]
        found = dict[str, dict[str, Found]]()
        for vm in leaving:
            source = self.vms[vm.name].host
            found[vm.name] = {
                host.name: await self.costs.find(
                    vm, self.measured.get(vm.name), source, host, self._copied(vm.name, host.name)
                )
                for host in open_
                if host.name != source.name
            }
        return found

    def _copied(self, vm: str, destination: str) -> int:
        examined = self._examined.get((vm, destination))
        return examined.copied_bytes if examined else 0

    def _mover(self, vm: VmInfo, found: Mapping[str, Found]) -> Mover:
        closed = dict(self.closed.get(vm.name, {}))
        for host, one in found.items():
            if one.endless:
                closed[host] = "it dirties its memory faster than it can be sent"
            elif vm.placement.hosts and host not in vm.placement.hosts:
                closed[host] = "its spec does not name it (placement.hosts)"
        work_s = vm.memory_bytes / _UNKNOWN_BYTES_PER_S
        unknown = MoveCost(_UNKNOWN_AROUND_S, work_s, _UNKNOWN_AROUND_S)
        costs = {host: one.cost or unknown for host, one in found.items() if host not in closed}
        return Mover(
            vm.name,
            vm.host,
            vm.memory_bytes,
            vm.vcpus,
            costs,
            words("apart", vm, self.options.apart),
            words("together", vm, self.options.together),
            closed,
        )

    async def _examine(
        self, placed: DrainPlacement, leaving: Sequence[VmInfo], hosts: Sequence[HostSeen]
    ) -> bool:
        """Check both ends of moves that were not checked yet; returns whether that changes the
        plan.
        """
        by_name = {one.host.name: one.host for one in hosts if one.room is not None}
        wanted = [(move.vm, move.destination) for move in placed.moves]
        new = [pair for pair in wanted if pair not in self._examined]
        await self._ask(new, by_name)
        refused = {vm for vm, destination in new if destination in self.closed.get(vm, {})}
        if refused:
            # An obstacle on one host often exists on all.
            rest = [
                (vm, host) for vm in refused for host in by_name if (vm, host) not in self._examined
            ]
            await self._ask(rest, by_name)
        return bool(refused) or any(self._copied(*pair) for pair in new)

    async def _ask(self, pairs: Sequence[tuple[str, str]], hosts: Mapping[str, Host]) -> None:
        slots = asyncio.Semaphore(ASKED_AT_ONCE)

        async def ask(vm: str, destination: str) -> None:
            async with slots:
                self._examined[vm, destination] = await self._examination(vm, hosts[destination])

        await all_of(ask(*pair) for pair in pairs)
        for vm, destination in pairs:
            against = [
                one for one in self._examined[vm, destination].checks if self._is_against(one)
            ]
            if against:
                why = "; ".join(f"[{check.code}] {check.reason}" for check in against)
                self.close(vm, destination, why)

    async def _examination(self, vm: str, destination: Host) -> Examined:
        driver = self.vms[vm]
        if driver.host.name == destination.name:
            return Examined(
                (Finding("same-host", REFUSE, f"it is on {destination.name} already"),), 0
            )
        return await examined(driver, destination, self.options.options)


def words(kind: str, vm: VmInfo, options: Sequence[tuple[str, ...]]) -> frozenset[str]:
    """What a VM has in common with others, by its spec and by the operator's options."""
    own = vm.placement.apart if kind == "apart" else vm.placement.together
    # The two kinds cannot be confused: a spec's label never begins with a comma.
    return frozenset(own) | {f",{number}" for number, vms in enumerate(options) if vm.name in vms}


def _with_words(
    one: HostSeen, options: DrainOptions, seen: Sequence[VmInfo], leaving: Sequence[str]
) -> HostSeen:
    """Add the labels from the operator's options to the VMs that stay there."""
    if one.room is None:
        return one
    there = [vm for vm in seen if vm.host == one.host.name and vm.is_on and vm.name not in leaving]
    apart = one.room.apart.union(*(words("apart", vm, options.apart) for vm in there))
    together = one.room.together.union(*(words("together", vm, options.together) for vm in there))
    return one._replace(room=replace(one.room, apart=apart, together=together))


def _notes(
    used: Mapping[str, Found], leaving: Sequence[VmInfo], measured: Mapping[str, DirtyRate | None]
) -> list[str]:
    notes = []
    if blind := sorted(vm for vm, one in used.items() if one.cost is None):
        notes.append(
            f"no measurements of migrations: {', '.join(blind)}: vmckpt host calibrate A B"
        )
    likes = dict.fromkeys(one.like for one in used.values() if one.like)
    notes += [f"forecasts of unmeasured pairs are those of {like}" for like in likes]
    unseen = [vm.name for vm in leaving if measured.get(vm.name) is None]
    if unseen:
        names = ", ".join(unseen)
        notes.append(f"not measured, assumed full and quiet: {names}")
    return notes


async def planner(
    options: DrainOptions,
    tools: DrainTools,
    seen: Sequence[VmInfo],
    destinations: Sequence[Host],
    *,
    tell: Callable[[str], None],
    to_open: Collection[str] = (),
) -> tuple[Planner, list[Stay]]:
    """A planner for these VMs, each measured; and those that cannot even be searched for.

    `tell` as for `drivers.find`, `to_open` as for `inspect_hosts`.
    """
    vms, stay = dict[str, Driver](), list[Stay]()
    measured = dict[str, DirtyRate | None]()

    async def inspect(vm: VmInfo) -> None:
        try:
            driver = await tools.find(vm.name, tell)
        except NotFoundError:
            tell(f"{vm.name} no longer exists")
            return
        except VmckptError as exc:
            stay.append(Stay(vm.name, f"{exc.what}: {exc.why}", exc.remedy, exc.exit_code))
            return
        vms[vm.name] = driver
        measured[vm.name] = await _measured(driver, options.measure_s)

    await all_of(inspect(vm) for vm in seen)
    ends = [*destinations, *(driver.host for driver in vms.values())]
    here = all(host.is_this_machine for host in ends)
    taught = learn(load_past(here=here), CROWDING_HERE if here else CROWDING)
    costs = MoveCosts.of(load_all(runs_dir()), options.options, taught)
    return Planner(options, tools, vms, costs, measured, to_open), stay


async def _measured(driver: Driver, for_s: float) -> DirtyRate | None:
    """None for a VM that is paused or busy: it moves without a forecast, once it is free."""
    if for_s == 0:
        return None
    try:
        return await driver.measure(for_s)
    except VmckptError:
        return None
