"""The cost of moving between two hosts, learned from the run records of past migrations."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import hypot, isfinite
from typing import Any

from vmckpt.events.record import FIGURES_MISSING, LINK_BROKE, SHARED_LINK, RunRecord
from vmckpt.forecast.migrated_by import LIBVIRT, VMCKPT, MigratedBy, migrated_by
from vmckpt.forecast.model.device_phases import DeviceMove
from vmckpt.forecast.model.forecast import TransferMode
from vmckpt.forecast.model.guest import SENT_PAGE_BYTES
from vmckpt.forecast.model.link import LinkModel, Moved, learn
from vmckpt.forecast.model.rounds import HELD_S
from vmckpt.options.declared import About, about
from vmckpt.options.migration import MigrationOptions

# Ignore older runs: they ran on another day, with other neighbours. Both directions count.
LATEST_MOVES = 80
IDLE_ROUNDS = 2
# Prefix of the names of calibration guests.
CALIBRATION = "calibrate-"
# Similarity of a guest to the one asked about; a calibration guest has none.
_OTHER_PROGRAM, _ANOTHER, _ALIKE, _ITSELF = -1, 1, 2, 3
# Weights of moves for the cost of a page. The calibration guest is idle; real ones compete with the
# migration for processors. Another program's QEMUs have other memory (anonymous, not a file). For
# the opposite direction the hosts' parts are exchanged.
_UNLIKE_WEIGHT, _BACK_WEIGHT = 0.2, 0.5
# A migration that used at least this fraction of its bandwidth limit was held back by it.
USED = 0.8
# A guest's agent sets the clock, then has hwclock set the hardware clock, which waits for the start
# of a second: anything up to a second, until such moves have been seen.
UNKNOWN_CLOCK_S, UNKNOWN_CLOCK_SPREAD_S = 0.5, 0.3
# What libvirt adds to a migration and to its switchover, until a domain's has been seen.
UNKNOWN_LIBVIRT_S, UNKNOWN_LIBVIRT_SPREAD_S = 0.4, 0.3
UNKNOWN_LIBVIRT_SWITCH_S, UNKNOWN_LIBVIRT_SWITCH_SPREAD_S = 0.05, 0.04
ENCRYPTED = ", encrypted"
PLAIN, MULTIFD, ZSTD = "plain", "multifd", "zstd"
# Options whose effect on a move is not forecast; such moves teach nothing.
_UNFORECAST = about(MigrationOptions, About.UNFORECAST)
SENDING = {TransferMode.MULTIFD: MULTIFD, TransferMode.ZSTD: ZSTD}


def sending(mode: TransferMode, *, encrypted: bool) -> str:
    """How this method sends pages: what was learned for one does not apply to another."""
    return SENDING.get(mode, PLAIN) + (ENCRYPTED if encrypted else "")


def learned(
    records: Iterable[RunRecord],
    source: str,
    destination: str,
    vm: str | None = None,
    *,
    agent: bool = False,
    in_turn: bool = False,
    by: MigratedBy = VMCKPT,
) -> dict[str, LinkModel]:
    """The pair's constants, in this direction, for every way of sending seen so far.

    Moves in the opposite direction count a little: the hosts of a pair are often alike. What a move
    takes besides sending depends on the guest: it is taken from `vm`'s own moves if there are any,
    else from those of guests that also have, or lack, an `agent`. It also depends on the program
    that migrates (`by`). While moves run `in_turn`, others are prepared beside them: only such
    moves teach the cost of such moves.
    """
    ours, moves = [], dict[str, list[Moved]]()
    for record in records:
        ends = (record.request.get("source"), record.request.get("target"))
        if ends not in ((source, destination), (destination, source)):
            continue
        if bool(record.request.get("in_turn")) is not in_turn:
            continue
        if ends == (source, destination):
            ours.append(record)
        if (one := moved(record)) is not None:
            similarity = _similarity(record.request, vm, by, agent=agent)
            weight = (1.0 if similarity > 0 else _UNLIKE_WEIGHT) * (
                1.0 if ends == (source, destination) else _BACK_WEIGHT
            )
            moves.setdefault(_sent_by(record), []).append(
                one._replace(similarity=similarity, weight=weight)
            )
    links, known = dict[str, LinkModel](), {_sent_by(record) for record in ours}
    # Order matters: the source's cost of scanning for zeroes shows where the destination does not
    # touch them, that is, with several channels (multifd-zero-page.c,
    # multifd_recv_zero_page_process).
    for kind in sorted(known & moves.keys()):
        rest = [one for other, these in moves.items() if other != kind for one in these]
        measured = links.get(kind.replace(PLAIN, MULTIFD)) if kind.startswith(PLAIN) else None
        link = learn(
            moves[kind][-LATEST_MOVES:],
            _misses((one for one in ours if _migrated_by(one.request) is by), kind),
            rest[-LATEST_MOVES:],
            measured.costs.zero_page_s if measured else None,
        )
        if link is not None:
            links[kind] = link
    most = max((one.similarity for seen in moves.values() for one in seen), default=0)
    if agent and most < _ALIKE:
        return {kind: _with_a_clock(link) for kind, link in links.items()}
    if by is LIBVIRT and most == _OTHER_PROGRAM:
        return {kind: _with_libvirt(link) for kind, link in links.items()}
    return links


def _with_a_clock(link: LinkModel) -> LinkModel:
    spread_s = hypot(link.fixed_spread_s, UNKNOWN_CLOCK_SPREAD_S)
    return replace(link, fixed_s=link.fixed_s + UNKNOWN_CLOCK_S, fixed_spread_s=spread_s)


def _with_libvirt(link: LinkModel) -> LinkModel:
    return replace(
        link,
        fixed_s=link.fixed_s + UNKNOWN_LIBVIRT_S,
        fixed_spread_s=hypot(link.fixed_spread_s, UNKNOWN_LIBVIRT_SPREAD_S),
        switch_s=link.switch_s + UNKNOWN_LIBVIRT_SWITCH_S,
        switch_spread_s=hypot(link.switch_spread_s, UNKNOWN_LIBVIRT_SWITCH_SPREAD_S),
    )


def has_moved(records: Iterable[RunRecord], source: str, destination: str, by: MigratedBy) -> bool:
    """Whether a migration by this program between the two, in either direction, teaches."""
    pair = {source, destination}
    return any(
        {one.request.get("source"), one.request.get("target")} == pair
        and _migrated_by(one.request) is by
        and moved(one) is not None
        for one in records
    )


def _migrated_by(request: Mapping[str, Any]) -> MigratedBy:
    return migrated_by(str(request.get("driver")))


def _similarity(request: Mapping[str, Any], vm: str | None, by: MigratedBy, *, agent: bool) -> int:
    if _migrated_by(request) is not by:
        return _OTHER_PROGRAM
    if request.get("vm") == vm:
        return _ITSELF
    if str(request.get("vm")).startswith(CALIBRATION):
        return 0
    return _ALIKE if bool(request.get("guest_agent")) is agent else _ANOTHER


def moved(record: RunRecord) -> Moved | None:
    """The migration as numbers; None if it teaches nothing: undone, or on a shared link."""
    result, samples = record.result or {}, record.samples
    if result.get("outcome") != "completed" or not _is_sound(result):
        return None
    if shared_the_link(record) or _was_disturbed(record):
        return None  # the others' share, or how long the guest was paused, is unknown
    if _is_rare(record.request):
        return None  # no forecast covers that kind
    counted = [sample for sample in samples if sample.get("normal_pages")]
    if not counted:
        return None
    last = counted[-1]
    # A guest last seen in the first pass may have had little or much left.
    active = [
        sample["normal_pages"]
        for sample in counted
        if sample["status"] == "active" and sample["round"] > 1
    ]
    last_pages = last["normal_pages"] - active[-1] if active else None
    if last_pages is not None and not record.request.get("bandwidth_bytes_per_s"):
        # A fast link sends most of it while the guest still runs; little remains.
        last_pages = 0.0
    copied = int(record.request.get("disk_bytes") or 0)
    copying_s = _phase_s(record.events, "mirror") if copied else 0.0
    if copied and copying_s <= 0:
        return None  # the end of the copy is unknown, and all other times include it
    limit = int(record.request.get("bandwidth_bytes_per_s") or 0)
    limited = _mean_bytes_per_s(result) > USED * limit if limit else False
    return Moved(
        pages=last["normal_pages"],
        zero_pages=last.get("zero_pages", 0),
        transfer_s=result["transfer_time_s"],
        # Device time has its own forecast; waiting for others belongs to neither.
        total_s=result["total_time_s"] - sum(_device_s(result)) - _phase_s(record.events, "turn"),
        stalled_s=_stalled_s(result),
        last_pages=last_pages,
        felt=result.get("guest_downtime_ms") is not None,
        slow_s=_phase_s(record.events, "drain"),
        copied_bytes=copied,
        copying_s=copying_s,
        limited=limited,
        squeezed=_squeezed(record, last["normal_pages"]),
        holes=min(record.request.get("hole_pages") or 0, last.get("zero_pages", 0)),
        waited_s=_waited_s(record) if result.get("rounds", 0) > IDLE_ROUNDS else 0.0,
    )


def _waited_s(record: RunRecord) -> float:
    return HELD_S + float(record.request.get("held_s") or 0.0)


def shared_the_link(record: RunRecord) -> bool:
    """Whether other migrations shared its link: forecasts assume an exclusive link."""
    return any(event.get("code") == SHARED_LINK for event in record.events)


def _was_disturbed(record: RunRecord) -> bool:
    """Whether the guest was paused for another reason, or its last figures are missing."""
    return any(event.get("code") in (LINK_BROKE, FIGURES_MISSING) for event in record.events)


def _is_sound(result: Mapping[str, Any]) -> bool:
    """Whether its figures are plausible: an impossible one would distort all later forecasts."""
    for name in ("transfer_time_s", "total_time_s", "transferred_bytes"):
        figure = result.get(name)
        if not isinstance(figure, int | float) or not isfinite(figure) or figure <= 0:
            return False
    return bool(result["transfer_time_s"] <= result["total_time_s"])


def _is_rare(request: Mapping[str, Any]) -> bool:
    """Whether its options make it follow other figures than those that are learned."""
    rare = any(request.get(name, usual) != usual for name, usual in _UNFORECAST.items())
    return rare or request.get("compression") not in (None, ZSTD)


def device_moves(records: Iterable[RunRecord], source: str, destination: str) -> list[DeviceMove]:
    """What moves from one host to the other took for their guests' devices."""
    return [
        DeviceMove(int(record.result.get("device_bytes", 0)), *_device_s(record.result))
        for record in records
        if (record.request.get("source"), record.request.get("target")) == (source, destination)
        and record.result
        and record.result.get("outcome") == "completed"
        and any(_device_s(record.result))
    ][-LATEST_MOVES:]


def _device_s(result: Mapping[str, Any]) -> tuple[float, float]:
    return result.get("device_out_s", 0.0), result.get("device_back_s", 0.0)


def pause_ms(result: Mapping[str, Any]) -> float | None:
    """Downtime: guest-visible if measured, otherwise QEMU's."""
    felt = result.get("guest_downtime_ms")
    return felt if felt is not None else result.get("downtime_ms")


def _squeezed(record: RunRecord, pages: float) -> float:
    """The number of pages whose bytes compression saved."""
    if not record.request.get("compression") or record.result is None:
        return 0.0
    return max(pages - float(record.result["transferred_bytes"]) / SENT_PAGE_BYTES, 0.0)


def _mean_bytes_per_s(result: Mapping[str, Any]) -> float:
    return float(result["transferred_bytes"] / result["transfer_time_s"])


def _stalled_s(result: Mapping[str, Any]) -> float | None:
    pause = pause_ms(result)
    # QEMU switches an idle guest over without asking whether the destination is ready.
    idle = result.get("rounds", 0) <= IDLE_ROUNDS
    if result.get("method") == "postcopy":
        felt = result.get("guest_downtime_ms")  # QEMU's figure hides the waiting for pages
        return felt / 1e3 if felt is not None else None
    if pause is None or idle or result.get("method") != "precopy":
        return None
    return pause / 1e3


def _phase_s(events: Sequence[Mapping[str, Any]], phase: str) -> float:
    began = [e for e in events if e["event"] == "PhaseBegan"]
    for event, after in pairwise(began):
        if event["phase"] == phase:
            return float(after["at_s"] - event["at_s"])
    return 0.0


def _sent_by(record: RunRecord) -> str:
    request, result = record.request, record.result or {}
    # `auto` requests no channels and reports at the end how many it used.
    has_channels = request.get("channels") or result.get("channels", 1) > 1
    how = ZSTD if request.get("compression") else MULTIFD if has_channels else PLAIN
    return how + (ENCRYPTED if result.get("encryption", "off") != "off" else "")


def _misses(records: Iterable[RunRecord], kind: str) -> list[float]:
    """Relative errors of the pair's forecasts of total time, for moves that teach."""
    misses = []
    for record in list(records)[-LATEST_MOVES:]:
        result, forecast = record.result or {}, record.forecast
        if forecast and moved(record) is not None and _sent_by(record) == kind:
            expected_s = forecast["forecast"]["total_s"][1]
            if expected_s:
                misses.append(result["total_time_s"] / expected_s - 1)
    return misses
