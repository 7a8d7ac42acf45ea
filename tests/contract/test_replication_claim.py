"""A former primary's home is never started while the arbiter says that another host has the guest.

Every test here began with a second guest, or with a VM that could not be started any longer.
"""

import asyncio
import json
import os
from pathlib import Path

import pytest

from tests.contract.test_replication_leftovers import home, record, requested, stands
from vmckpt.drivers.direct import DirectVm
from vmckpt.errors import BusyError, HostDownError, RefusedError
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes.process import identify
from vmckpt.lease.record import LeaseRecord, LeaseSpan
from vmckpt.lease.rule import Right, right_of
from vmckpt.options.migration import MigrationOptions
from vmckpt.replicate.operator.operate import require_decided
from vmckpt.replicate.operator.stop import stop
from vmckpt.replicate.primary.claim import Claim
from vmckpt.replicate.request import ServiceFiles
from vmckpt.vm.inventory import Vm
from vmckpt.vm.lifecycle import held, read_again, remove_vm, stop_vm


@pytest.fixture
def hosts(tmp_path: Path) -> tuple[LocalHost, LocalHost]:
    first, second = (LocalHost(name, tmp_path / name, "127.0.0.1") for name in ("a", "b"))
    return first, second


def replaced(hosts: tuple[LocalHost, LocalHost], tmp_path: Path, ending: str = "replaced") -> Vm:
    """A stale home: its service ended, and the standby's host can be out of reach."""
    vm, files = home(hosts[0], "old"), requested(hosts, tmp_path)
    told = {"role": "primary", "state": "ended", "run": "1", "ending": ending, "why": ending}
    files.status.write_text(json.dumps(told))
    Claim("web", "a/1", "b", str(tmp_path / "leases")).write(vm.directory.claim)
    return vm


@pytest.mark.parametrize(
    ("holder", "in_sync", "released", "right"),
    [
        ("a/1", None, False, Right.OURS),
        ("a/1/recovery", None, False, Right.OURS),
        ("a/1", "b/1", False, Right.PENDING),
        ("a/1", "b/1", True, Right.PENDING),
        ("a/12", None, False, Right.ELSEWHERE),
        ("b/1", None, False, Right.ELSEWHERE),
        ("b/1", "c/2", False, Right.ELSEWHERE),
        ("b/1", None, True, Right.OURS),
        ("b/1", "c/2", True, Right.PENDING),
        ("b/1/abandon/2", None, True, Right.OURS),
        ("b/2", None, True, Right.ELSEWHERE),
        ("c/2", None, True, Right.ELSEWHERE),
        ("c/2", "d/3", True, Right.ELSEWHERE),
    ],
)
def test_who_may_run_the_guest_of_a_former_primary(
    holder: str, in_sync: str | None, right: Right, *, released: bool
) -> None:
    assert (
        right_of(LeaseRecord(2, holder, 1, LeaseSpan(1.0), in_sync, released), "a/1", "b/1")
        is right
    )
    assert right_of(None, "a/1", "b/1") is Right.FORGOTTEN


@pytest.mark.parametrize("ending", ["replaced", "yours", "died"])
def test_a_stale_home_is_not_started_while_its_successor_is_out_of_reach(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path, ending: str
) -> None:
    vm = replaced(hosts, tmp_path, ending)
    record(tmp_path, "b/1", None)
    elsewhere, offline = LocalHost("c", tmp_path / "c", "127.0.0.1"), MigrationOptions(offline=True)
    for begun in (
        lambda: DirectVm(vm).start(),
        lambda: DirectVm(vm).migrate(elsewhere, offline, lambda _: None),
        lambda: DirectVm(vm).examine(elsewhere, offline),
    ):
        with pytest.raises(RefusedError, match="may run on b"):
            asyncio.run(begun())
    # Nor by any command that goes past the driver, whatever became of the service's own files.
    asyncio.run(hosts[0].remove(ServiceFiles.of(hosts[0], "web").path))
    with pytest.raises(BusyError, match="another host may run"):
        asyncio.run(read_again(vm))
    with pytest.raises(RefusedError, match="may run on b"):
        asyncio.run(DirectVm(vm).start())


@pytest.mark.parametrize("force", [True, False])
def test_a_primary_that_was_paused_for_its_lost_right_is_not_resumed(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path, *, force: bool
) -> None:
    """Its service has died since; its QEMU stands, and its standby may run the guest."""
    vm = replaced(hosts, tmp_path, "died")
    record(tmp_path, "b/1", None)
    alive = identify(os.getpid())
    assert alive
    vm.directory.current.write_text(vm.qemu._replace(process=alive).to_json())
    vm = vm._replace(qemu=vm.qemu._replace(process=alive))
    assert asyncio.run(vm.is_alive())
    for begun in (DirectVm(vm).resume(), DirectVm(vm).reboot(force=force, timeout_s=1.0)):
        with pytest.raises(RefusedError, match="may run on b"):
            asyncio.run(begun)

    async def held_by_its_service() -> None:
        async with held(vm, "replicate"):
            await DirectVm(vm).resume()

    with pytest.raises(BusyError, match="replicate"):
        asyncio.run(held_by_its_service())


def test_an_end_of_the_replication_frees_no_stale_home_by_itself(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path
) -> None:
    vm = replaced(hosts, tmp_path)
    record(tmp_path, "b/1", None)
    with pytest.raises(RefusedError, match="may run on b"):
        asyncio.run(stop("web", hosts[:1]))
    assert stands(tmp_path).holder == "b/1"
    # The operator's word that it is dead for good has the term taken from it.
    asyncio.run(stop("web", hosts[:1], standby_is_dead=True))
    assert stands(tmp_path).holder == "a/1/recovery"
    assert not vm.directory.claim.exists()
    asyncio.run(require_decided(vm))


def test_a_term_that_the_standby_gave_up_lets_the_former_primary_run(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path
) -> None:
    vm = replaced(hosts, tmp_path)
    record(tmp_path, "b/1/abandon/1", None, released=True)
    asyncio.run(require_decided(vm))
    assert not vm.directory.claim.exists()


@pytest.mark.parametrize("holder", ["c/2", "b/2", "b/12"])
def test_a_term_that_was_given_up_by_whoever_came_later_frees_no_earlier_home(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path, holder: str
) -> None:
    """The guest went on with b, which c protected then: that could not take it over, or its QEMU
    died there. What was left from before was started in its place.
    """
    vm = replaced(hosts, tmp_path)
    record(tmp_path, holder, None, released=True)
    with pytest.raises(RefusedError, match="may run on b"):
        asyncio.run(require_decided(vm))
    assert vm.directory.claim.exists()


@pytest.mark.parametrize("is_mounted", [True, False])
def test_without_the_arbiters_word_nothing_is_started(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path, *, is_mounted: bool
) -> None:
    vm = replaced(hosts, tmp_path)
    if is_mounted:
        (tmp_path / "leases").mkdir()
        (tmp_path / "leases" / "web.lease").write_text("nonsense\n")
    expected = HostDownError if is_mounted else RefusedError
    with pytest.raises(expected):
        asyncio.run(require_decided(vm))
    assert vm.directory.claim.exists()


def test_a_stale_home_can_be_removed(hosts: tuple[LocalHost, LocalHost], tmp_path: Path) -> None:
    vm = replaced(hosts, tmp_path)
    record(tmp_path, "b/1", None)
    asyncio.run(stop_vm(vm, force=True, timeout_s=1.0))
    asyncio.run(remove_vm(vm))
    assert not vm.directory.path.exists()


def test_a_vm_that_came_back_is_not_held_to_an_earlier_home(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path
) -> None:
    """It was migrated back: its directory is new, and has no claim; the service's files stay."""
    stale = replaced(hosts, tmp_path)
    record(tmp_path, "b/1", None)
    asyncio.run(hosts[0].remove(stale.directory.path))
    vm = home(hosts[0], "new")

    async def main() -> None:
        await require_decided(vm)
        async with held(vm, "test"):
            pass

    asyncio.run(main())
