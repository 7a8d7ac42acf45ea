"""A schedule prunes its own checkpoints, not those of another operator's schedule of its name."""

import asyncio
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import pytest

from tests.guest_like import memory, save
from vmckpt.checkpoint.catalogue.retention import RetentionRule
from vmckpt.checkpoint.facts import CheckpointFacts
from vmckpt.errors import BusyError, OperationFailedError
from vmckpt.fleet.schedule import work
from vmckpt.fleet.schedule.due import ClaimedRun
from vmckpt.fleet.schedule.record import PendingCheckpoint, new_record
from vmckpt.fleet.schedule.request import ScheduleRequest, When
from vmckpt.fleet.schedule.run import Point, clock
from vmckpt.fleet.schedule.work import Checkpoints, _this_scheduler
from vmckpt.hosts.inventory.inventory import local_host
from vmckpt.store.open import create_store
from vmckpt.store.store import Store
from vmckpt.vm.lifecycle import owner
from vmckpt.vm.paths import lock_path

pytestmark = pytest.mark.contract


def taken(store: Store, name: str, **tags: str) -> str:
    facts = CheckpointFacts(
        name=name, host="h", taken_unix_s=1.0, trigger="schedule", tags=tags, spec="", platform={},
        qemu_version="", machine={}, firmware=None, memory_bytes=1, disks=(), macs=(),
        pause_ms=1.0, passes=1, took_s=1.0, changed_pages=0,
    )  # fmt: skip
    return save(store, memory(16, 1), vm="web", facts=facts.to_json()).id


def test_two_operators_schedules_of_one_name_keep_each_others_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path / "state"))
    here = asyncio.run(_this_scheduler())
    location = str(tmp_path / "store")
    with create_store(location) as store:
        for name in ("theirs-1", "theirs-2"):
            taken(store, name, schedule="nightly", scheduler="0badcafe")
        taken(store, "by-hand", purpose="test")
        # As by earlier versions: whose it is, nothing says.
        taken(store, "before", schedule="nightly")
        taken(store, "ours-1", schedule="nightly", scheduler=here)
        last = taken(store, "ours-2", schedule="nightly", scheduler=here)
    request = ScheduleRequest(
        "web", When.EVERY, "UTC", every_s=60.0, rule=RetentionRule(keep_last=1)
    )
    record = replace(new_record("nightly", request, clock()), places=(location,))
    gone = asyncio.run(Checkpoints(print).prune(record, last))
    assert sorted(gone.names) == ["before", "ours-1"]


@pytest.mark.parametrize(("action", "may_be_ours"), [
    ("checkpoint create", True),
    ("replicate to lab-b", False),
])  # fmt: skip
def test_a_run_whose_vm_is_protected_does_not_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str, *, may_be_ours: bool
) -> None:
    """What holds the VM may be the run's own job, if its scheduler died; a protection is not."""
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path / "state"))
    location = str(tmp_path / "store")
    create_store(location).close()
    making = PendingCheckpoint("0" * 32, location, "local")
    record = replace(
        new_record("nightly", ScheduleRequest("web", When.EVERY, "UTC", every_s=60.0), clock()),
        making=making,
    )

    async def found() -> Point | None:
        host = local_host()
        async with host.lock(lock_path(host.state_dir, "web"), owner(action)):
            return await Checkpoints(print).find(record)

    if may_be_ours:
        with pytest.raises(BusyError, match="may be this run's own work"):
            asyncio.run(found())
    else:
        assert asyncio.run(found()) is None


def test_no_checkpoint_of_a_protected_vm_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Busy it would be tried again every few seconds, for as long as it is protected."""
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path / "state"))
    request = ScheduleRequest("web", When.EVERY, "UTC", every_s=60.0)
    record = new_record("nightly", request, clock())
    held = replace(record, state=replace(record.state, claim=ClaimedRun(1, 0.0, 0, clock())))
    record = replace(held, making=PendingCheckpoint("0" * 32))

    async def taken() -> None:
        host = local_host()
        vm = SimpleNamespace(host=host, inspect=AsyncMock(return_value=Mock(is_on=True)))
        monkeypatch.setattr(work, "find", AsyncMock(return_value=vm))
        async with host.lock(lock_path(host.state_dir, "web"), owner("replicate to lab-b")):
            await Checkpoints(print).take(record, lambda _, __: None)

    with pytest.raises(OperationFailedError, match="'web' is replicated"):
        asyncio.run(taken())
