"""The end of a checkpoint: what cannot be taken away again fails none that is there."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.test_checkpoint_tree import facts
from vmckpt.checkpoint.requests import TakenCheckpoint, TakeOptions
from vmckpt.checkpoint.take import StopTimes, Taking
from vmckpt.errors import OperationFailedError
from vmckpt.hosts.local import LocalHost
from vmckpt.store.open import create_store
from vmckpt.store.store import Store
from vmckpt.vm.paths import vm_dir

pytestmark = pytest.mark.contract

STAYS = OperationFailedError("QEMU does not let go of 'vmckpt-filter0'", why="busy", remedy="-")


class Disks:
    """QEMU keeps a filter."""

    async def prepare(self, *_: object) -> None:
        pass

    async def end(self, *, keep_bitmap: bool) -> None:
        raise STAYS


def taking(tmp_path: Path, fails: Exception | None = None) -> Any:
    async def called(call: Callable[[], Any]) -> Any:
        return call()

    async def moment(_: object) -> StopTimes:
        if fails is not None:
            raise fails
        return StopTimes(1.0, [0.01], 1, 1, "epoch", "")

    async def stored(_: object) -> None:
        pass

    async def described(_: object) -> Any:
        return facts("one")

    host, directory = LocalHost("a", tmp_path, "127.0.0.1"), vm_dir(tmp_path, "web")
    directory.path.mkdir(parents=True)
    spec = SimpleNamespace(disks=())
    vm: Any = SimpleNamespace(name="web", host=host, directory=directory, spec=spec, nodes=())
    vm.qemu = SimpleNamespace(files=directory.qemu("0"))
    monitor: Any = None
    aside: Any = called
    made: Any = Taking(vm, monitor, TakeOptions("one", {}, "operator", 1.0), aside, print)
    made._disks, made._moment, made._store_disks, made._facts = Disks(), moment, stored, described
    return made


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return create_store(str(tmp_path / "store"))


def test_a_filter_that_does_not_go_away_fails_no_checkpoint(store: Store, tmp_path: Path) -> None:
    taken: TakenCheckpoint = asyncio.run(taking(tmp_path)._take(store))
    assert store.ids() == [taken.id]
    assert taken.not_ended == f"{STAYS.what}: busy"
    assert taken.to_json()["not_ended"] == taken.not_ended


def test_a_full_disk_after_it_was_stored_fails_no_checkpoint(store: Store, tmp_path: Path) -> None:
    """It was said to have failed, and was in the store."""
    made = taking(tmp_path)
    (made._vm.directory.path / ".checkpoint.part").mkdir()  # in the way of its record

    async def end(*, keep_bitmap: bool) -> None:
        assert keep_bitmap

    made._disks.end = end
    taken: TakenCheckpoint = asyncio.run(made._take(store))
    assert store.ids() == [taken.id]
    assert taken.not_ended is not None
    assert "vms/web/checkpoint" in taken.not_ended


def test_without_a_checkpoint_it_is_an_error(store: Store, tmp_path: Path) -> None:
    with pytest.raises(OperationFailedError, match="does not let go"):
        asyncio.run(taking(tmp_path, OperationFailedError("no", why="-", remedy="-"))._take(store))
    assert not store.ids()
