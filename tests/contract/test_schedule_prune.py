"""A schedule prunes its own checkpoints, not those of another operator's schedule of its name."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from tests.guest_like import memory, save
from vmckpt.checkpoint.catalogue.retention import RetentionRule
from vmckpt.checkpoint.facts import CheckpointFacts
from vmckpt.fleet.schedule.record import new_record
from vmckpt.fleet.schedule.request import ScheduleRequest, When
from vmckpt.fleet.schedule.run import clock
from vmckpt.fleet.schedule.work import Checkpoints, _this_scheduler
from vmckpt.store.open import create_store
from vmckpt.store.store import Store

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
