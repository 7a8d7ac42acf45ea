"""Plan a migration: forecast every method, choose one that meets the constraints."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from vmckpt.errors import RefusedError
from vmckpt.events.record import RunRecord, load_all
from vmckpt.forecast.guest_of import guest_of
from vmckpt.forecast.learned import device_moves, has_moved, learned, sending
from vmckpt.forecast.limits import STEPS_MS, limits, limits_ms, within
from vmckpt.forecast.measure.dirty_rate import DirtyRate, measure
from vmckpt.forecast.measure.last_measured import keep
from vmckpt.forecast.measure.link_users import others_on_the_link
from vmckpt.forecast.methods import against, modes, options_of, warnings
from vmckpt.forecast.migrated_by import LIBVIRT, VMCKPT, MigratedBy
from vmckpt.forecast.model.choose import (
    MAX_DOWNTIME,
    MAX_SLOWDOWN,
    Choice,
    Intent,
    Offer,
    change,
    choose,
    judge,
    missed_slowdown,
)
from vmckpt.forecast.model.device_phases import (
    DevicePhases,
    device_phases,
    with_device_memory,
    with_devices,
)
from vmckpt.forecast.model.forecast import (
    PARALLEL,
    POSTCOPIES,
    MigrationLimits,
    TransferMode,
    beyond_bytes_per_s,
    forecast,
)
from vmckpt.forecast.model.guest import Guest
from vmckpt.forecast.model.link import LinkModel
from vmckpt.forecast.model.rounds import NOT_HELD, SwitchoverHold
from vmckpt.forecast.subjects.subject import Subject
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory.directories import runs_dir
from vmckpt.options.migration import USUAL_DOWNTIME_MS, Method, MigrationOptions
from vmckpt.preflight.finding import Finding
from vmckpt.units import format_rate

# Slack between a plan and the new plan after a wait: both may take this many times as long.
ANEW = 1.25
# The default measuring time of a plan: two periods of most loads, and soon over.
MEASURE_S = 8.0
# The slowdowns to try if auto-converge, limited to less, does not converge.
SLOWDOWNS = (0.2, 0.4, 0.6, 0.8, 1.0)


@dataclass(frozen=True, slots=True)
class MigrationPlan:
    """A plan. `closed` has the methods that are impossible, `unknown` those without figures.

    Both with reasons. `options` are those of the chosen method. `notes` concern the forecast,
    `warned` is what the migration itself would warn of. `devices`: the time for devices that have
    to be unplugged for the migration; the methods' totals include it.
    """

    vm: str
    source: str
    destination: str
    measured: DirtyRate
    offers: tuple[Offer, ...]
    closed: tuple[tuple[TransferMode, str], ...]
    unknown: tuple[tuple[TransferMode, str], ...]
    choice: Choice
    intent: Intent
    options: MigrationOptions
    notes: tuple[str, ...]
    warned: tuple[str, ...] = ()
    devices: DevicePhases | None = None

    def require(self) -> MigrationOptions:
        """The options to migrate with. Raises RefusedError, naming the least change that helps."""
        if self.choice.mode is None:
            raise RefusedError(
                f"no method of migrating '{self.vm}' to {self.destination} meets the constraints",
                why=self.choice.reason,
                remedy=self.choice.change,
            )
        return self.options

    @property
    def spare_s(self) -> float:
        """How much later it may be planned again and still end in time, in 9 of 10 cases."""
        if self.intent.left_s is None:
            return math.inf
        takes_s = [
            o.forecast.total_s.p90 for o in self.offers if o.forecast.mode is self.choice.mode
        ]
        return max(self.intent.left_s - ANEW * (self.intent.gone_s + sum(takes_s)), 0.0)

    def record(self) -> dict[str, Any]:
        """For the run record."""
        chosen = next(o.forecast for o in self.offers if o.forecast.mode is self.choice.mode)
        return {
            "forecast": chosen.to_json(),
            "reason": self.choice.reason,
            "dirty_rate": self.measured.to_json(),
        }

    def to_json(self) -> dict[str, Any]:
        """For `plan --json`."""
        modes = [
            offer.forecast.to_json() | {"misses": [miss.needed for miss in offer.misses]}
            for offer in self.offers
        ]
        return {
            "vm": self.vm,
            "source": self.source,
            "target": self.destination,
            "way": self.choice.mode,
            "reason": self.choice.reason,
            "change": self.choice.change,
            "ways": modes,
            "closed": {mode.value: reason for mode, reason in self.closed},
            "unknown": {mode.value: reason for mode, reason in self.unknown},
            "notes": [*self.notes, *self.warned],
            "devices": self.devices._asdict() if self.devices else None,
            "dirty_rate": self.measured.to_json(),
        }


class MethodCandidate(NamedTuple):
    """A method between two hosts: what is known of it, or why it is closed or unknown.

    `downtimes_ms` are the limits to try, in this order. `by` and `held`: see `Subject` and
    `CheckedMethod`.
    """

    mode: TransferMode
    options: MigrationOptions
    link: LinkModel | None = None
    disk_bytes: int = 0
    downtimes_ms: tuple[int, ...] = ()
    checks: tuple[Finding, ...] = ()
    closed: str = ""
    unknown: str = ""
    by: MigratedBy = VMCKPT
    held: SwitchoverHold = NOT_HELD

    def limits(self, meant: MigrationOptions) -> MigrationLimits:
        """The limits of its migration with these options."""
        return limits(meant, self.by, self.held)


async def make_plan(
    vm: Subject,
    destination: Host,
    options: MigrationOptions,
    intent: Intent,
    *,
    began_s: float,
    for_s: float = MEASURE_S,
) -> MigrationPlan:
    """Measure the VM, ask both hosts, and forecast every method they support. Changes nothing.

    An explicit method in `options` excludes the others. The intent's time began at `began_s` on the
    monotonic clock. Raises RefusedError when nothing is known of the pair or no method is open,
    BusyError when the VM is being migrated.
    """
    _require_other_host(vm, destination)
    await vm.require_measurable()
    never = intent.never_risk_postcopy or options.never_risk_postcopy
    intent = replace(intent, never_risk_postcopy=never)
    records = load_all(runs_dir())
    pair = vm.host.name, destination.name
    links = learned(records, *pair, vm.name, agent=vm.has_agent, by=vm.by)
    if not links:
        raise _nothing_known(*pair)
    candidates = [
        await _candidate(mode, vm, destination, options, intent=intent, links=links)
        for mode in modes(options)
    ]
    _require_open(candidates, vm.name, destination.name)
    devices = await _devices(vm, destination, records)
    measured = await measure(vm, for_s)
    keep(vm.name, measured)
    intent = replace(intent, gone_s=time.monotonic() - began_s)
    candidates = [within_bandwidth(candidate, measured, options) for candidate in candidates]
    _require_open(candidates, vm.name, destination.name)
    linked = [(one, one.link) for one in candidates if one.link]
    found = {
        one.mode: offer_of(one, link, measured, intent=intent, devices=devices)
        for one, link in linked
    }
    offers = tuple(offer for offer, _ in found.values())
    choice = choose(offers, intent)
    chosen = next((candidate for candidate in candidates if candidate.mode is choice.mode), None)
    limited = bandwidth_notes(chosen, measured) if chosen else ()
    others = await others_on_the_link(vm.host, destination)
    return MigrationPlan(
        vm=vm.name,
        source=vm.host.name,
        destination=destination.name,
        measured=measured,
        offers=offers,
        closed=tuple((one.mode, one.closed) for one in candidates if one.closed),
        unknown=tuple((one.mode, one.unknown) for one in candidates if one.unknown),
        choice=choice,
        intent=intent,
        options=found[choice.mode][1] if choice.mode else options,
        notes=(*_notes(vm, measured, records, destination), *limited, *_neighbours(others)),
        warned=warnings({one.mode: one.checks for one, _ in linked}),
        devices=devices,
    )


def _require_other_host(vm: Subject, destination: Host) -> None:
    if vm.host.name == destination.name:
        raise RefusedError(
            f"'{vm.name}' is on {destination.name} already",
            why="a migration needs another host",
            remedy="name another: vmckpt host list",
        )


async def _devices(
    vm: Subject, destination: Host, records: Sequence[RunRecord]
) -> DevicePhases | None:
    device_bytes = await vm.device_bytes()
    if device_bytes is None:
        return None
    return device_phases(device_bytes, device_moves(records, vm.host.name, destination.name))


def _require_open(candidates: Sequence[MethodCandidate], vm: str, destination: str) -> None:
    if not any(candidate.link for candidate in candidates):
        raise RefusedError(
            f"'{vm}' cannot move to {destination}",
            why=_against(candidates),
            remedy=f"see `vmckpt check {vm} {destination}`",
        )


def _against(candidates: Sequence[MethodCandidate]) -> str:
    """Why methods are closed; those with the same reason together."""
    reasons: dict[str, list[str]] = {}
    for candidate in candidates:
        reasons.setdefault(candidate.closed or candidate.unknown, []).append(candidate.mode.value)
    if len(reasons) == 1:
        return next(iter(reasons))
    return "; ".join(f"{', '.join(modes)}: {reason}" for reason, modes in reasons.items())


async def _candidate(
    mode: TransferMode,
    vm: Subject,
    destination: Host,
    options: MigrationOptions,
    *,
    intent: Intent,
    links: Mapping[str, LinkModel],
) -> MethodCandidate:
    meant = options_of(mode, options, intent)
    checked = await vm.check(destination, meant)
    if closed := against(options, checked.checks):
        return MethodCandidate(mode, meant, closed=closed)
    link = links.get(sending(mode, encrypted=checked.is_encrypted))
    if link is None:
        remedy = f"vmckpt host calibrate {vm.host.name} {destination.name}"
        return MethodCandidate(mode, meant, unknown=f"no measurements: {remedy}")
    copied = checked.copied_bytes
    if copied and link.disk_bytes_per_s is None:
        unknown = "no disk was copied between these hosts yet: the first such migration measures it"
        return MethodCandidate(mode, meant, unknown=unknown)
    return MethodCandidate(
        mode,
        meant,
        link,
        copied,
        limits_ms(mode, options, intent, link),
        checked.checks,
        by=vm.by,
        held=checked.held,
    )


def within_bandwidth(
    candidate: MethodCandidate, measured: DirtyRate, options: MigrationOptions
) -> MethodCandidate:
    """The method, closed if several channels would send more than the bandwidth limit allows.

    Unless the channels were requested, or compression, which uses them.
    """
    if (
        candidate.mode not in PARALLEL
        or options.channels
        or options.compression
        or not candidate.link
    ):
        return candidate
    beyond = _beyond_bytes_per_s(candidate, candidate.link, measured)
    if not beyond:
        return candidate
    most = format_rate(options.bandwidth_bytes_per_s)
    closed = f"over several channels QEMU would send {format_rate(beyond)}, not {most}"
    return candidate._replace(link=None, closed=closed)


def bandwidth_notes(candidate: MethodCandidate, measured: DirtyRate) -> Iterator[str]:
    """Notes on how a method exceeds its bandwidth limit."""
    limit = candidate.options.bandwidth_bytes_per_s
    if not limit or not candidate.link:
        return
    if beyond := _beyond_bytes_per_s(candidate, candidate.link, measured):
        yield f"QEMU will send {format_rate(beyond)}, it holds {format_rate(limit)} no better here"
    if candidate.mode in POSTCOPIES:
        yield "the bandwidth limit holds until post-copy begins: then pages are sent at link speed"


def _beyond_bytes_per_s(candidate: MethodCandidate, link: LinkModel, measured: DirtyRate) -> float:
    given = candidate.limits(candidate.options)
    return beyond_bytes_per_s(candidate.mode, guest_of(measured), link, given)


def offer_of(
    candidate: MethodCandidate,
    link: LinkModel,
    measured: DirtyRate,
    *,
    intent: Intent,
    devices: DevicePhases | None = None,
) -> tuple[Offer, MigrationOptions]:
    """The method's offer with the first downtime limit that meets the intent.

    If none does, the limit that needs the smallest change. With that change requested, the same
    limit meets the intent: a longer pause allows the same limits again, except the longest, which
    grows with it. Auto-converge behaves differently if it may slow the guest more.
    """
    guest = guest_of(measured, candidate.disk_bytes, moves_now=True)
    if devices:
        guest = with_device_memory(guest, devices.device_bytes)
    offer, meant = _by_limits(candidate, link, guest, intent=intent, devices=devices)
    if (
        offer.keeps
        or candidate.mode is not TransferMode.AUTO_CONVERGE
        or intent.max_slowdown is None
    ):
        return offer, meant
    offers = [offer]
    for slowdown in SLOWDOWNS:
        if slowdown > intent.max_slowdown:
            slower = replace(intent, max_slowdown=slowdown)
            found, _ = _by_limits(candidate, link, guest, intent=slower, devices=devices)
            if MAX_SLOWDOWN not in (miss.option for miss in found.misses):
                misses = (*found.misses, missed_slowdown(intent.max_slowdown, slowdown))
                offers.append(Offer(found.forecast, misses))
    return min(offers, key=change), meant


def _by_limits(
    candidate: MethodCandidate,
    link: LinkModel,
    guest: Guest,
    *,
    intent: Intent,
    devices: DevicePhases | None,
) -> tuple[Offer, MigrationOptions]:
    found = []
    for downtime_ms in candidate.downtimes_ms:
        meant = _promising(candidate, intent, downtime_ms)
        expected = forecast(candidate.mode, guest, link, candidate.limits(meant))
        offer = judge(with_devices(expected, devices) if devices else expected, intent)
        if offer.keeps:
            return offer, meant
        usual = USUAL_DOWNTIME_MS, candidate.options.max_downtime_ms
        fixed = downtime_ms in STEPS_MS or downtime_ms in usual
        if fixed or MAX_DOWNTIME not in (miss.option for miss in offer.misses):
            found.append((offer, meant))
    return min(found, key=lambda one: change(one[0]))


def _promising(candidate: MethodCandidate, intent: Intent, downtime_ms: int) -> MigrationOptions:
    """The options of a method with that limit, and what else is promised."""
    most_ms = max(candidate.downtimes_ms) if intent.max_downtime_s is not None else None
    slower = round(100 * intent.max_slowdown) if intent.max_slowdown is not None else None
    steered = None
    if candidate.options.method is Method.PRECOPY:
        # Auto-converge slows the guest independently of the policy.
        may_throttle = candidate.by.throttles and candidate.mode is not TransferMode.AUTO_CONVERGE
        steered = within(most_ms, slower if may_throttle else None)
    return replace(
        candidate.options,
        max_downtime_ms=downtime_ms,
        most_downtime_ms=most_ms,
        most_throttle_percent=slower,
        finish_within_s=intent.left_s,
        policy=candidate.options.policy or steered,
    )


def _notes(
    vm: Subject, measured: DirtyRate, records: Sequence[RunRecord], destination: Host
) -> Iterator[str]:
    if measured.ram is None:
        yield f"the dirty rate is QEMU's own sample ({measured.why})"
        yield "the content of memory is unknown, and assumed to be the slowest to send"
    pair = vm.host.name, destination.name
    if vm.by is LIBVIRT and not has_moved(records, *pair, vm.by):
        yield (
            f"no migration of a domain between {' and '.join(pair)} is recorded yet: what libvirt "
            "adds to time and downtime is assumed"
        )


def _neighbours(others: int) -> tuple[str, ...]:
    if not others:
        return ()
    words = f"{others} other migrations use" if others > 1 else "another migration uses"
    return (f"{words} the link now: forecasts assume that it is free",)


def _nothing_known(source: str, destination: str) -> RefusedError:
    return RefusedError(
        f"no migration from {source} to {destination} has been measured",
        why="no migration without a bandwidth limit has been recorded in this direction",
        remedy=f"measure it with a small guest: vmckpt host calibrate {source} {destination}",
    )
