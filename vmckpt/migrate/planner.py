"""The ways a VM can move to a host, what each will come to, and the one that keeps an intent."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from vmckpt.devices.checks import held_bytes
from vmckpt.errors import RefusedError
from vmckpt.events.record import load_all
from vmckpt.hosts.host import Host
from vmckpt.migrate.encryption import Scheme
from vmckpt.migrate.learned import device_moves, learned, sending
from vmckpt.migrate.options import DEFAULT_CHANNELS, Method, Options
from vmckpt.migrate.preflight import Preflight, preflight
from vmckpt.migrate.recorded import runs_dir
from vmckpt.migrate.shared_link import others_on_the_link
from vmckpt.plan.choose import Choice, Intent, Offer, choose, judge
from vmckpt.plan.course import Course
from vmckpt.plan.device_phases import (
    DevicePhases,
    device_phases,
    with_device_memory,
    with_devices,
)
from vmckpt.plan.first_pass import Stretch
from vmckpt.plan.forecast import Limits, Way, forecast
from vmckpt.plan.guest import PAGE_BYTES, Guest
from vmckpt.plan.link import Link
from vmckpt.plan.policy import Act, Policy, Rule
from vmckpt.qemu.abilities import auto_converge
from vmckpt.vm.check import REFUSE
from vmckpt.vm.dirty_rate import DirtyRate, measure, require_measurable
from vmckpt.vm.inventory import Vm
from vmckpt.vm.last_measured import keep

# What a plan measures when nothing else is said: two periods of most loads, and soon over.
LOOK_S = 8.0
# Of a pause that is allowed so much is left to what comes in other than as reckoned.
PAUSE_MARGIN = 0.2
# How a planned pre-copy that gains nothing is helped, see `within`.
STALLS, THROTTLE_STEP_PERCENT, DOWNTIME_STEP_PERCENT = 3, 10, 50


@dataclass(frozen=True, slots=True)
class Plan:
    """What was found out. `closed` are ways that cannot be gone, `unknown` those without figures.

    Each of these with its reason. `options` are those of the way chosen. `devices`: what those that
    are unplugged for the way take; the ways' totals have it in them.
    """

    vm: str
    source: str
    target: str
    measured: DirtyRate
    offers: tuple[Offer, ...]
    closed: tuple[tuple[Way, str], ...]
    unknown: tuple[tuple[Way, str], ...]
    choice: Choice
    intent: Intent
    options: Options
    notes: tuple[str, ...]
    devices: DevicePhases | None = None

    def require(self) -> Options:
        """The options to migrate with. Raises RefusedError, naming the least change that helps."""
        if self.choice.way is None:
            raise RefusedError(
                f"no way of moving '{self.vm}' to {self.target} keeps what is asked for",
                why=self.choice.reason,
                remedy=self.choice.change,
            )
        return self.options

    @property
    def spare_s(self) -> float:
        """How much later a migration may be planned anew and be over in time, in 9 of 10 cases."""
        if self.intent.left_s is None:
            return math.inf
        takes_s = [o.forecast.total_s.p90 for o in self.offers if o.forecast.way is self.choice.way]
        return max(self.intent.left_s - self.intent.gone_s - sum(takes_s), 0.0)

    def record(self) -> dict[str, Any]:
        """For the run record."""
        chosen = next(o.forecast for o in self.offers if o.forecast.way is self.choice.way)
        return {
            "forecast": chosen.to_json(),
            "reason": self.choice.reason,
            "dirty_rate": self.measured.to_json(),
        }

    def to_json(self) -> dict[str, Any]:
        """For `plan --json`."""
        ways = [
            offer.forecast.to_json() | {"misses": [miss.needed for miss in offer.misses]}
            for offer in self.offers
        ]
        return {
            "vm": self.vm,
            "source": self.source,
            "target": self.target,
            "way": self.choice.way,
            "reason": self.choice.reason,
            "change": self.choice.change,
            "ways": ways,
            "closed": {way.value: reason for way, reason in self.closed},
            "unknown": {way.value: reason for way, reason in self.unknown},
            "notes": list(self.notes),
            "devices": self.devices._asdict() if self.devices else None,
            "dirty_rate": self.measured.to_json(),
        }


class _Road(NamedTuple):
    """A way between two hosts: with what is known of it, or why it is closed or not known.

    `downtimes_ms` are the limits to try, the shortest first.
    """

    way: Way
    options: Options
    link: Link | None = None
    disk_bytes: int = 0
    downtimes_ms: tuple[int, ...] = ()
    closed: str = ""
    unknown: str = ""


async def make_plan(
    vm: Vm, target: Host, options: Options, intent: Intent, *, began_s: float, for_s: float = LOOK_S
) -> Plan:
    """Measure the VM, ask both hosts, and forecast every way that they can go. Changes nothing.

    An explicit method in `options` leaves only its own way. The intent's time began at `began_s` on
    the monotonic clock. Raises RefusedError when nothing is known of the pair or no way is open,
    BusyError when the VM is moving.
    """
    if vm.host.name == target.name:
        raise RefusedError(
            f"'{vm.name}' is on {target.name} already",
            why="moving needs another host",
            remedy="name another: vmckpt host list",
        )
    await require_measurable(vm)
    records = load_all(runs_dir())
    links = learned(records, vm.host.name, target.name, vm.name, agent=vm.spec.guest_agent)
    if not links:
        raise _nothing_known(vm.host.name, target.name)
    roads = [
        await _road(way, vm, target, options, intent=intent, links=links) for way in _ways(options)
    ]
    if not any(road.link for road in roads):
        raise RefusedError(
            f"'{vm.name}' cannot move to {target.name}",
            why=_against(roads),
            remedy=f"see `vmckpt check {vm.name} {target.name}`",
        )
    held = await held_bytes(vm)
    devices = None
    if held is not None:
        devices = device_phases(held, device_moves(records, vm.host.name, target.name))
    measured = await measure(vm, for_s)
    keep(vm.name, measured)
    intent = replace(intent, gone_s=time.monotonic() - began_s)
    found = [
        _offer(road, road.link, measured, intent=intent, devices=devices)
        for road in roads
        if road.link
    ]
    offers = tuple(offer for offer, _ in found)
    choice = choose(offers, intent)
    chosen = {offer.forecast.way: meant for offer, meant in found}
    others = await others_on_the_link(vm.host, target)
    return Plan(
        vm=vm.name,
        source=vm.host.name,
        target=target.name,
        measured=measured,
        offers=offers,
        closed=tuple((road.way, road.closed) for road in roads if road.closed),
        unknown=tuple((road.way, road.unknown) for road in roads if road.unknown),
        choice=choice,
        intent=intent,
        options=chosen[choice.way] if choice.way else options,
        notes=(*_notes(measured), *_neighbours(others)),
        devices=devices,
    )


def _against(roads: Sequence[_Road]) -> str:
    """Why each road cannot be gone; those with one reason together."""
    reasons: dict[str, list[str]] = {}
    for road in roads:
        reasons.setdefault(road.closed or road.unknown, []).append(road.way.value)
    if len(reasons) == 1:
        return next(iter(reasons))
    return "; ".join(f"{', '.join(ways)}: {reason}" for reason, ways in reasons.items())


async def _road(
    way: Way,
    vm: Vm,
    target: Host,
    options: Options,
    *,
    intent: Intent,
    links: Mapping[str, Link],
) -> _Road:
    meant = _options(way, options, intent)
    checked = await preflight(vm, target, meant)
    if not checked.possible:
        return _Road(way, meant, closed=_refusals(checked))
    link = links.get(sending(way, encrypted=checked.encryption.scheme is not Scheme.CLEAR))
    if link is None:
        remedy = f"vmckpt host calibrate {vm.host.name} {target.name}"
        return _Road(way, meant, unknown=f"nothing is known of it: {remedy}")
    copied = sum(copy.allocated_bytes for copy in checked.copies)
    if copied and link.disk_bytes_per_s is None:
        unknown = "no disk was copied between these hosts yet: the first such move teaches it"
        return _Road(way, meant, unknown=unknown)
    return _Road(way, meant, link, copied, _downtimes_ms(options, intent, link))


def _offer(
    road: _Road,
    link: Link,
    measured: DirtyRate,
    *,
    intent: Intent,
    devices: DevicePhases | None,
) -> tuple[Offer, Options]:
    """With the shortest standstill that keeps the intent; else with the longest allowed."""
    guest = guest_of(measured, road.disk_bytes, moves_now=True)
    if devices:
        guest = with_device_memory(guest, devices.device_bytes)
    promised_ms = road.downtimes_ms[-1] if intent.max_pause_s is not None else None
    slower = round(100 * intent.max_slowdown) if intent.max_slowdown is not None else None
    for downtime_ms in road.downtimes_ms:
        meant = replace(
            road.options,
            max_downtime_ms=downtime_ms,
            most_downtime_ms=promised_ms,
            most_throttle_percent=slower,
            finish_within_s=intent.left_s,
            policy=road.options.policy or within(promised_ms, slower),
        )
        expected = forecast(road.way, guest, link, limits(meant))
        offer = judge(with_devices(expected, devices) if devices else expected, intent)
        if offer.keeps:
            break
    return offer, meant


def limits(meant: Options) -> Limits:
    """What QEMU will be given."""
    throttle = auto_converge(meant.wish())["max-cpu-throttle"] / 100
    bandwidth = float(meant.bandwidth_bytes_per_s)
    return Limits(meant.max_downtime_ms / 1e3, bandwidth, most_throttle=throttle)


def within(most_downtime_ms: int | None, most_throttle_percent: int | None) -> Policy | None:
    """What is done about a planned pre-copy that gains nothing: all that was allowed, by steps."""
    rules = (
        Rule(STALLS, Act.THROTTLE, THROTTLE_STEP_PERCENT, most_percent=most_throttle_percent or 0),
        Rule(STALLS, Act.RAISE_DOWNTIME, DOWNTIME_STEP_PERCENT, most_ms=most_downtime_ms or 0),
    )
    allowed = Policy(rules).within(most_downtime_ms or 0, most_throttle_percent or 0)
    return allowed if allowed.rules else None


def _downtimes_ms(options: Options, intent: Intent, link: Link) -> tuple[int, ...]:
    """The limits that QEMU may be given: the usual one, and as much as the intent allows."""
    if intent.max_pause_s is None:
        return (options.max_downtime_ms,)
    for_pages_s = intent.max_pause_s * (1 - PAUSE_MARGIN) - link.switch_s
    most_ms = max(1, round(1e3 * for_pages_s))
    return tuple(sorted({min(most_ms, options.max_downtime_ms), most_ms}))


def guest_of(measured: DirtyRate, disk_bytes: int = 0, *, moves_now: bool = False) -> Guest:
    """The measured guest for the model; what was not measured is taken as the costliest."""
    ram, dirtied = measured.ram, measured.dirtied
    return Guest(
        total_pages=measured.ram_bytes // PAGE_BYTES,
        zero_share=ram.zero if ram else 0.0,
        ratio=ram.ratio if ram else 1.0,
        dirtied_zero_share=dirtied.zero if dirtied else 0.0,
        dirtied_ratio=dirtied.ratio if dirtied else 1.0,
        curve=measured.curve,
        disk_bytes=disk_bytes,
        busy=measured.busy,
        layout=_stretches(measured),
        course=Course.seen(*measured.course, measured.curve) if measured.course.ends_s else None,
        moves_now=moves_now,
    )


def _stretches(measured: DirtyRate) -> tuple[Stretch, ...]:
    """Its memory in order; the last piece may be shorter, and counts as long as the others."""
    pages = measured.ram_bytes / PAGE_BYTES / max(len(measured.layout), 1)
    return tuple(
        Stretch(pages * (1 - piece.zero), pages * piece.zero, pages * piece.hole)
        for piece in measured.layout
    )


def _ways(options: Options) -> tuple[Way, ...]:
    if options.method is Method.POSTCOPY:
        return (Way.POSTCOPY,)
    if options.method is Method.HYBRID:
        return (Way.HYBRID,)
    if options.method is Method.STOP:
        return (Way.STOP,)
    if options.compression:
        return (Way.ZSTD,)
    if options.channels:
        return (Way.MULTIFD,)
    if options.method is Method.PRECOPY:
        return (Way.AUTO_CONVERGE if options.auto_converge else Way.PRECOPY,)
    return tuple(Way)


def _options(way: Way, options: Options, intent: Intent) -> Options:
    """What `migrate` is asked for on this way."""
    methods = {
        Way.HYBRID: Method.HYBRID,
        Way.POSTCOPY: Method.POSTCOPY,
        Way.STOP: Method.STOP,
    }
    compressed = options.compression or ("zstd" if way is Way.ZSTD else None)
    parallel = options.channels or (DEFAULT_CHANNELS if way is Way.MULTIFD else None)
    return replace(
        options,
        method=methods.get(way, Method.PRECOPY),
        auto_converge=way is Way.AUTO_CONVERGE,
        compression=compressed,
        channels=parallel,
        never_risk_postcopy=options.never_risk_postcopy or intent.never_risk_postcopy,
    )


def _refusals(checked: Preflight) -> str:
    return "; ".join(
        f"[{check.code}] {check.reason}" for check in checked.checks if check.verdict == REFUSE
    )


def _notes(measured: DirtyRate) -> tuple[str, ...]:
    if measured.ram is not None:
        return ()
    return (
        f"the dirty rate is QEMU's own sample ({measured.why})",
        "what memory holds is not known, and taken as the slowest to send",
    )


def _neighbours(others: int) -> tuple[str, ...]:
    if not others:
        return ()
    words = f"{others} other migrations use" if others > 1 else "another migration uses"
    return (f"{words} the link now: forecasts are for one that has it for itself",)


def _nothing_known(source: str, target: str) -> RefusedError:
    return RefusedError(
        f"nothing is known of moving from {source} to {target}",
        why="no migration without a bandwidth limit has been recorded in this direction",
        remedy=f"measure it with a small guest: vmckpt host calibrate {source} {target}",
    )
