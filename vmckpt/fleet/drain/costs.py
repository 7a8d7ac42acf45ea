"""The cost of moving each VM, by the planner's forecasts, for the drain planner."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from vmckpt.drivers.driver import VmInfo
from vmckpt.errors import VmckptError
from vmckpt.events.record import RunRecord
from vmckpt.forecast.drain.crowding import LearnedCrowding
from vmckpt.forecast.drain.fleet import MoveCost
from vmckpt.forecast.guest_of import guest_of
from vmckpt.forecast.learned import learned, sending
from vmckpt.forecast.limits import limits
from vmckpt.forecast.measure.dirty_rate import DirtyRate
from vmckpt.forecast.migrated_by import LIBVIRT, migrated_by
from vmckpt.forecast.model.dirtying import DirtyCurve
from vmckpt.forecast.model.forecast import MigrationLimits, TransferMode, forecast
from vmckpt.forecast.model.guest import PAGE_BYTES, Guest
from vmckpt.forecast.model.link import LinkModel
from vmckpt.hosts.host import Host
from vmckpt.options.migration import MigrationOptions
from vmckpt.preflight.migration.encryption import Scheme, choose

# The method that `auto` chooses.
DRAIN_MODE = TransferMode.AUTO_CONVERGE
_TENTH = 1.28


class Found(NamedTuple):
    """The cost of a move; None if nothing is known. `like`: it is that of another pair of hosts.

    `expected` is the cost by single moves alone; `endless`: it is not expected to end.
    """

    cost: MoveCost | None
    expected: MoveCost | None = None
    like: str = ""
    endless: bool = False


@dataclass(slots=True)
class MoveCosts:
    """Estimates costs from run records, each computed once."""

    records: Sequence[RunRecord]
    options: MigrationOptions
    taught: LearnedCrowding
    _links: dict[tuple[str, str, str, bool], LinkModel | None]
    _forecasts: dict[tuple[str, LinkModel, int], Found]
    _schemes: dict[tuple[str, str], bool]

    @classmethod
    def of(
        cls,
        records: Sequence[RunRecord],
        options: MigrationOptions,
        taught: LearnedCrowding,
    ) -> "MoveCosts":
        """From these records, and the experience of earlier drains, for migrations with these
        options.
        """
        return cls(records, options, taught, {}, {}, {})

    async def find(
        self,
        vm: VmInfo,
        measured: DirtyRate | None,
        source: Host,
        destination: Host,
        copied_bytes: int,
    ) -> Found:
        """The cost of moving the VM, and that much of its disks, between the two hosts."""
        encrypted = await self._encrypted(source, destination)
        pair = (source.name, destination.name)
        link, like = self._link(vm, *pair, encrypted=encrypted), ""
        if link is None:
            for other in self._others(*pair):
                if link := self._link(vm, *other, encrypted=encrypted):
                    like = f"{other[0]} -> {other[1]}"
                    break
        if link is None:
            return Found(None)
        key = (vm.name, link, copied_bytes)
        if key not in self._forecasts:
            guest = _guest(vm, measured, copied_bytes)
            self._forecasts[key] = self._forecast(vm, guest, _with_disks(link))
        return self._forecasts[key]._replace(like=like)

    async def _encrypted(self, source: Host, destination: Host) -> bool:
        pair = (source.name, destination.name)
        if pair not in self._schemes:
            try:
                own_users = bool(source.vm_uids or destination.vm_uids)
                found = await choose(self.options.tls, source, destination, own_users=own_users)
                scheme = found.scheme
            except VmckptError:  # the checks report it before anything moves
                scheme = Scheme.UNENCRYPTED
            self._schemes[pair] = scheme is not Scheme.UNENCRYPTED
        return self._schemes[pair]

    def _link(
        self, vm: VmInfo, source: str, destination: str, *, encrypted: bool
    ) -> LinkModel | None:
        key = (vm.name, source, destination, encrypted)
        if key not in self._links:
            # Single moves are the best source; the difference of moves in drains is learned
            # separately.
            for in_turn in (True, False):
                links = learned(
                    self.records,
                    source,
                    destination,
                    vm.name,
                    agent=bool(vm.guest_agent),
                    in_turn=in_turn,
                    by=migrated_by(vm.driver),
                )
                found = links.get(sending(DRAIN_MODE, encrypted=encrypted))
                self._links[key] = found or self._links.get(key)
        return self._links[key]

    def _others(self, source: str, destination: str) -> list[tuple[str, str]]:
        """Pairs with known costs, those that share an end first."""
        pairs = dict.fromkeys(
            (str(one.request.get("source")), str(one.request.get("target")))
            for one in reversed(self.records)
        )
        pairs.pop((source, destination), None)
        return sorted(pairs, key=lambda pair: -(2 * (pair[0] == source) + (pair[1] == destination)))

    def _forecast(self, vm: VmInfo, guest: Guest, link: LinkModel) -> Found:
        found = forecast(DRAIN_MODE, guest, link, self._limits(vm))
        if not found.ends:
            return Found(None, endless=True)
        total = found.total_s
        work_s = max(total.p50 - link.fixed_s - link.switch_s, 0.0)
        spread_s = (total.p90 - total.p10) / (2 * _TENTH)
        expected = MoveCost(link.fixed_s, work_s, link.switch_s, spread_s)
        fixed_s, end_s = self.taught.around_s or (link.fixed_s, link.switch_s)
        work = self.taught.work
        return Found(MoveCost(fixed_s, work_s * work, end_s, spread_s * work), expected)

    def _limits(self, vm: VmInfo) -> MigrationLimits:
        if (by := migrated_by(vm.driver)) is not LIBVIRT:
            return limits(self.options, by)
        from vmckpt.forecast.subjects.domain import usually_held

        return limits(self.options, by, usually_held(vm.memory_bytes, self.options))


def _with_disks(link: LinkModel) -> LinkModel:
    """If no disk was copied yet, assume the speed of memory."""
    if link.disk_bytes_per_s is not None:
        return link
    return replace(link, disk_bytes_per_s=link.bytes_per_s or None)


def _guest(vm: VmInfo, measured: DirtyRate | None, disk_bytes: int) -> Guest:
    """The guest for the model; one that could not be measured uses all its memory, and dirties
    nothing.
    """
    if measured is not None:
        return guest_of(measured, disk_bytes)
    pages = vm.memory_bytes // PAGE_BYTES
    return Guest(pages, 0.0, 1.0, 0.0, 1.0, DirtyCurve((), pages), disk_bytes)
