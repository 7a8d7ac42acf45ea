"""What of a forecast differs for a libvirt domain: what libvirt cannot do, holds back, and adds."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_forecast import guest
from tests.unit.test_learned import MOVES, run
from tests.unit.test_planner import LINK, measured, road
from vmckpt.drivers.driver import VmInfo
from vmckpt.fleet.drain.costs import MoveCosts
from vmckpt.forecast.drain.crowding import LearnedCrowding
from vmckpt.forecast.learned import (
    UNKNOWN_LIBVIRT_S,
    UNKNOWN_LIBVIRT_SPREAD_S,
    UNKNOWN_LIBVIRT_SWITCH_S,
    has_moved,
    learned,
    moved,
)
from vmckpt.forecast.limits import limits
from vmckpt.forecast.migrated_by import LIBVIRT, VMCKPT, migrated_by
from vmckpt.forecast.model.choose import Intent
from vmckpt.forecast.model.forecast import MigrationLimits, TransferMode, forecast
from vmckpt.forecast.model.rounds import HELD_S, SwitchoverHold
from vmckpt.forecast.planner import offer_of
from vmckpt.forecast.subjects.domain import held
from vmckpt.hosts.local import LocalHost
from vmckpt.options.migration import Method, MigrationOptions
from vmckpt.options.policy import Act
from vmckpt.preflight.domains.checks import DomainPreflight
from vmckpt.preflight.domains.options import SAMPLE_POSTCOPY_S, SAMPLE_S, option_checks
from vmckpt.preflight.finding import REFUSE
from vmckpt.units import MIB
from vmckpt.vm.spec.spec import Placement

pytestmark = pytest.mark.unit
DOMAINS = {"driver": "libvirt", "vm": "dom"}
HALF_A_SECOND = SwitchoverHold(0.5, 100.0)


def test_a_driver_names_the_program_that_migrates() -> None:
    assert (migrated_by("libvirt"), migrated_by("qemu")) == (LIBVIRT, VMCKPT)


def test_libvirt_slows_as_it_likes_and_counts_in_whole_mib() -> None:
    options = MigrationOptions(bandwidth_bytes_per_s=5 * MIB + 7, most_throttle_percent=30)
    ours, libvirts = limits(options), limits(options, LIBVIRT, HALF_A_SECOND)
    assert (ours.bandwidth_bytes_per_s, ours.most_throttle) == (5 * MIB + 7, 0.3)
    assert (libvirts.bandwidth_bytes_per_s, libvirts.most_throttle) == (5 * MIB, 0.99)
    assert libvirts.held == HALF_A_SECOND
    assert limits(MigrationOptions(bandwidth_bytes_per_s=1), LIBVIRT).bandwidth_bytes_per_s == MIB


def test_a_planned_domain_is_steered_only_as_libvirt_can() -> None:
    wish = Intent(max_downtime_s=1.0, max_slowdown=0.3)
    for mode in TransferMode:
        candidate = road(mode, wish)._replace(by=LIBVIRT)
        _, meant = offer_of(candidate, LINK, measured(1, 100), intent=wish)
        acts = [rule.act for rule in meant.policy.rules] if meant.policy else []
        assert acts == ([Act.RAISE_DOWNTIME] if meant.method is Method.PRECOPY else []), mode
        assert not [one for one in option_checks(meant) if one.verdict == REFUSE], mode


def test_a_busy_guest_is_held_until_libvirt_is_asked_again_and_an_idle_one_is_not() -> None:
    busy, idle = guest(5_000, 50_000), guest(0.001, 100)
    for one, more_s in ((busy, 0.5), (idle, 0.0)):
        plain, waits = (
            forecast(TransferMode.PRECOPY, one, LINK, MigrationLimits(0.3, held=given))
            for given in (MigrationLimits(0.3).held, HALF_A_SECOND)
        )
        assert waits.total_s.p50 - plain.total_s.p50 == pytest.approx(more_s, abs=0.05)
        # The question comes at any moment of the interval.
        assert waits.total_s.p90 - waits.total_s.p50 > plain.total_s.p90 - plain.total_s.p50


@pytest.mark.parametrize(
    ("method", "after_s"),
    [
        (Method.PRECOPY, SAMPLE_S / 2),
        (Method.HYBRID, SAMPLE_POSTCOPY_S / 2),
        (Method.POSTCOPY, 0.0),
    ],
)
def test_how_long_it_is_held_follows_from_how_often_libvirt_is_asked(
    method: Method, after_s: float
) -> None:
    checked = DomainPreflight((), MigrationOptions(method), held_mib_per_s=2)
    # At 2 MiB/s QEMU's own 300 ms are 0.6 MiB.
    assert held(checked) == pytest.approx((after_s, 0.6 * MIB / 4096))
    assert held(checked._replace(held_mib_per_s=0)) == (0.0, 0.0)


def domain_move(**result: Any) -> Any:
    """One that took 0.9 s besides, and 80 ms for its switch."""
    record = run(request=DOMAINS | {"held_s": 0.25}, result={"downtime_ms": 80} | result)
    assert record.result is not None
    took_s = record.result["transfer_time_s"] + 0.25
    record.result = {**record.result, "transfer_time_s": took_s, "total_time_s": took_s + 0.9}
    return record


def test_until_a_domain_has_moved_what_libvirt_adds_is_assumed() -> None:
    ours, theirs = (learned(MOVES, "a", "b", by=by)["plain"] for by in (VMCKPT, LIBVIRT))
    assert theirs.costs == pytest.approx(ours.costs)
    assert theirs.fixed_s == pytest.approx(ours.fixed_s + UNKNOWN_LIBVIRT_S)
    assert theirs.fixed_spread_s >= UNKNOWN_LIBVIRT_SPREAD_S
    assert theirs.switch_s == pytest.approx(ours.switch_s + UNKNOWN_LIBVIRT_SWITCH_S)
    assert not has_moved(MOVES, "a", "b", LIBVIRT)
    assert has_moved(MOVES, "b", "a", VMCKPT)


def test_what_a_migration_takes_besides_is_learned_of_its_program_alone() -> None:
    records = [*MOVES, domain_move(), domain_move()]
    assert has_moved(records, "a", "b", LIBVIRT)
    ours, theirs = (learned(records, "a", "b", by=by)["plain"] for by in (VMCKPT, LIBVIRT))
    assert (ours.fixed_s, ours.switch_s) == pytest.approx((0.3, 0.025))
    assert (theirs.fixed_s, theirs.switch_s) == pytest.approx((0.9, 0.08))
    # What a page costs shows in both, and how long it was held does not count as that.
    assert theirs.costs.page_s == pytest.approx(1e-5, rel=1e-3)
    one = moved(domain_move())
    assert one is not None
    assert one.waited_s == pytest.approx(HELD_S + 0.25)


def test_forecasts_of_another_program_that_missed_widen_none_of_its_own() -> None:
    missed = {"forecast": {"total_s": [1.0, 1.0, 1.0]}}
    late = domain_move()
    late = replace(late, forecast=missed)
    records = [*MOVES, late]
    ours, theirs = (learned(records, "a", "b", by=by)["plain"] for by in (VMCKPT, LIBVIRT))
    assert ours.spread < 0.2 < theirs.spread


def test_a_drain_counts_with_what_libvirt_takes_for_its_domains_alone(tmp_path: Path) -> None:
    turn = {"in_turn": True}
    records = [replace(one, request={**one.request, **turn}) for one in (*MOVES, domain_move())]
    costs = MoveCosts.of(records, MigrationOptions(in_turn=True), LearnedCrowding(0.0, 0.1))
    a, b = (LocalHost(name, tmp_path / name, "::1") for name in ("a", "b"))
    found = dict[str, float]()
    for driver in ("qemu", "libvirt"):
        vm = VmInfo(
            f"new-{driver}", "a", driver, "running", None, False, "", (), None, False, False, 1,
            256 * MIB, "q35", "kvm", "host", Placement(),
        )  # fmt: skip
        cost = asyncio.run(costs.find(vm, measured(5_000, 20_000), a, b, 0)).cost
        assert cost is not None
        found[driver] = cost.alone_s
    # 0.9 s instead of 0.3 s around it, 55 ms more of switch, and half an interval more.
    more_s = 0.6 + 0.055 + SAMPLE_S / 2
    assert found["libvirt"] - found["qemu"] == pytest.approx(more_s, abs=0.1)
