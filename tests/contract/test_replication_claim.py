"""A former primary's home is never started while the arbiter says that another host has the guest.

Every test here began with a second guest, or with a VM that could not be started any longer.
"""

import asyncio
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.contract.test_replication_leftovers import home, record, requested, stands
from vmckpt.checkpoint.restore.requests import RestoreOptions
from vmckpt.cli.main import command_line
from vmckpt.cli.nouns.checkpoint import restore as command
from vmckpt.drivers.direct import DirectVm
from vmckpt.drivers.find import require_own
from vmckpt.errors import BusyError, HostDownError, RefusedError
from vmckpt.fleet.guard import rollback
from vmckpt.group import restore as of_groups
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes.process import identify
from vmckpt.lease.record import LeaseRecord, LeaseSpan
from vmckpt.lease.rule import Right, right_of
from vmckpt.options.migration import MigrationOptions
from vmckpt.replicate.operator.begin import _require_new
from vmckpt.replicate.operator.operate import require_decided
from vmckpt.replicate.operator.stop import stop
from vmckpt.replicate.primary.claim import Claim
from vmckpt.replicate.request import ServiceFiles
from vmckpt.vm.inventory import Vm, read_vm
from vmckpt.vm.lifecycle import held, read_again, remove_vm, stop_vm
from vmckpt.vm.record import Replaced
from vmckpt.vm.start import sweep


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
    vm = standing(replaced(hosts, tmp_path, "died"))
    record(tmp_path, "b/1", None)
    assert asyncio.run(vm.is_alive())
    for begun in (
        DirectVm(vm).resume(),
        DirectVm(vm).reboot(force=force, timeout_s=1.0),
        require_own("web", hosts[0]),
    ):
        with pytest.raises(RefusedError, match="may run on b"):
            asyncio.run(begun)
    # A restore in its place, or a migration to a host that has no claim, made it run twice.
    with pytest.raises(BusyError, match="another host may run"):
        asyncio.run(read_again(vm))

    async def held_by_its_service() -> None:
        async with held(vm, "replicate", runs_again=False):
            await DirectVm(vm).resume()

    with pytest.raises(BusyError, match="replicate"):
        asyncio.run(held_by_its_service())


def standing(vm: Vm) -> Vm:
    """With a process in its QEMU's place, which answers nothing: its guest may be paused."""
    alive = identify(os.getpid())
    assert alive
    vm.directory.current.write_text(vm.qemu._replace(process=alive).to_json())
    return vm._replace(qemu=vm.qemu._replace(process=alive))


def test_a_guest_that_lost_its_right_is_not_moved_away_from_its_claim(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path
) -> None:
    """Its QEMU stands. Where it was moved to it had no claim, and it was resumed."""
    vm = standing(replaced(hosts, tmp_path, "died"))
    record(tmp_path, "b/1", None)
    third = LocalHost("c", tmp_path / "c", "127.0.0.1")
    with pytest.raises(RefusedError, match="may run on b"):
        asyncio.run(DirectVm(vm).migrate(third, MigrationOptions(), lambda _: None))
    # Nor by what goes past the driver, nor is it replaced by a checkpoint, which would run.
    for action in ("migrate to c", "checkpoint restore"):
        with pytest.raises(BusyError, match="another host may run") as refused:
            asyncio.run(_hold(vm, action))
        assert refused.value.remedy.startswith("vmckpt vm resume web")
    assert vm.directory.claim.exists()
    asyncio.run(_hold(vm, "vm pause", runs_again=False))


def test_an_adopted_qemu_that_lost_its_right_is_not_forgotten(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path
) -> None:
    """It stands, and could have been adopted again, without its claim, and resumed."""
    vm = standing(replaced(hosts, tmp_path, "died"))
    vm.directory.current.write_text(vm.qemu._replace(is_foreign=True).to_json())
    record(tmp_path, "b/1", None)
    with pytest.raises(BusyError, match="another host may run"):
        asyncio.run(remove_vm(vm))
    assert vm.directory.claim.exists()


async def _hold(vm: Vm, action: str, *, runs_again: bool = True) -> None:
    async with held(vm, action, runs_again=runs_again):
        pass


def test_a_claim_that_the_arbiter_confirms_keeps_no_guest_from_being_moved(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path
) -> None:
    vm = standing(replaced(hosts, tmp_path, "died"))
    record(tmp_path, "a/1", None)
    asyncio.run(require_own("web", hosts[0]))
    assert not vm.directory.claim.exists()
    asyncio.run(_hold(vm, "migrate to c"))


@pytest.mark.parametrize("is_alive", [True, False])
def test_no_checkpoint_takes_the_place_of_a_vm_whose_term_was_taken(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path, *, is_alive: bool
) -> None:
    """It took over, and its host was off when `stop --standby-is-dead` let the old primary run:
    `vm start` was refused, and `restore --in-place` ran beside it.
    """
    requested(hosts, tmp_path)
    vm = home(hosts[1], "new", Replaced("a", "old"))
    told = {"role": "standby", "state": "promoted", "run": "1", "qemu_id": "new"}
    ServiceFiles.of(hosts[1], "web").status.write_text(json.dumps(told))
    record(tmp_path, "a/1/recovery", None)
    if is_alive:
        vm = standing(vm)
        third = LocalHost("c", tmp_path / "c", "127.0.0.1")
        with pytest.raises(RefusedError, match="may run on a"):
            asyncio.run(DirectVm(vm).migrate(third, MigrationOptions(), lambda _: None))
    with pytest.raises(RefusedError, match="may run on a"):
        asyncio.run(require_own("web", hosts[1]))


def lost_its_term(hosts: tuple[LocalHost, LocalHost], tmp_path: Path) -> None:
    """A VM on b that took over, while a has its term."""
    requested(hosts, tmp_path)
    home(hosts[1], "new", Replaced("a", "old"))
    record(tmp_path, "a/1/recovery", None)


def test_nor_does_a_group_or_a_guard_put_one_there(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost_its_term(hosts, tmp_path)
    options = RestoreOptions(name=None, in_place=True, eager=False, plugged=True, keep_macs=True)
    group: Any = SimpleNamespace(entries={"web": None})
    monkeypatch.setattr(of_groups, "require_whole", lambda _: None)
    with pytest.raises(RefusedError, match="may run on a"):
        asyncio.run(of_groups.restore_group(group, {"web": hosts[1]}, options, lambda _: None))

    async def nothing(*_: object) -> None:
        """It has no checkpoint that is looked for, and no job."""

    async def there(*_: object) -> tuple[LocalHost, bool]:
        return hosts[1], True

    for name, fake in (("point_of", nothing), ("_revoke_restores", nothing), ("_home", there)):
        monkeypatch.setattr(rollback, name, fake)
    guarded, find = SimpleNamespace(vm="web"), nothing
    with pytest.raises(RefusedError, match="may run on a"):
        asyncio.run(rollback._put_back(guarded, find, lambda _: None))  # type: ignore[arg-type]


def test_nor_does_the_command(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost_its_term(hosts, tmp_path)

    async def there(*_: object, **__: object) -> LocalHost:
        return hosts[1]

    point = SimpleNamespace(manifest=SimpleNamespace(vm="web"))
    monkeypatch.setattr(command, "find", lambda *_: point)
    monkeypatch.setattr(command, "home", there)
    argv = ["checkpoint", "restore", "one", "--in-place", "--yes"]
    result = CliRunner().invoke(command_line(argv), argv)
    assert "may run on a" in str(result.exception)


def test_while_its_service_holds_a_vm_that_is_what_is_said(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path
) -> None:
    vm = standing(replaced(hosts, tmp_path, "died"))
    third = LocalHost("c", tmp_path / "c", "127.0.0.1")

    async def main() -> None:
        async with held(vm, "replicate to b", runs_again=False):
            await DirectVm(vm).migrate(third, MigrationOptions(), lambda _: None)

    with pytest.raises(BusyError) as busy:
        asyncio.run(main())
    assert "replicate to b" in f"{busy.value.what} {busy.value.why}"


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


@pytest.mark.parametrize("word", ["ended", ""])
def test_a_vm_that_came_to_its_lost_standbys_host_by_another_way_runs_and_is_protected_there(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path, word: str
) -> None:
    """Its primary went on alone, and it was migrated to that host, or restored there: as it had
    been its standby's, it was neither started nor protected, since the term was the old host's.
    """
    requested(hosts, tmp_path)
    for host, role in zip(hosts, ("primary", "standby"), strict=True):
        told = {"role": role, "state": "ended", "run": "1", "vm": "web", "ending": "alone"}
        if word or role == "primary":  # or the standby was killed
            ServiceFiles.of(host, "web").status.write_text(json.dumps(told))
    record(tmp_path, "a/1", None)
    left = home(hosts[1], "waiting", Replaced("a", "old"))
    left.directory.current.unlink()  # a standby's directory, after a power cut
    asyncio.run(sweep(hosts[1], left.spec, left.directory, None))
    left.directory.current.write_text(left.qemu._replace(replaces=None).to_json())
    vm = asyncio.run(read_vm(hosts[1], "web"))
    assert vm is not None
    asyncio.run(require_decided(vm))
    asyncio.run(_require_new(vm, hosts[0]))
    assert not ServiceFiles.of(hosts[1], "web").path.exists()


@pytest.mark.parametrize("is_same", [True, False])
def test_a_vm_that_is_back_by_a_migration_is_not_held_by_what_its_host_had_before(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path, *, is_same: bool
) -> None:
    """Its host lost power, its standby took it over and it was migrated back: when it was off it
    could not be started, since that host did not know how its replication had ended.
    """
    requested(hosts, tmp_path)  # both services were killed
    record(tmp_path, "b/1", None)
    vm = home(hosts[0], "old" if is_same else "came-back")
    if is_same:  # the one that may have been taken over
        with pytest.raises(RefusedError, match="a standby may be about to take over"):
            asyncio.run(require_decided(vm))
    else:
        asyncio.run(require_decided(vm))
