"""Copying checkpoints while others remove them, write beside it, or where some are damaged."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.guest_like import RAM, Memory, dirtied, memory, require_same, save
from vmckpt.cli.nouns.store.store import export
from vmckpt.errors import BusyError, NotFoundError
from vmckpt.store import copying
from vmckpt.store.check import check
from vmckpt.store.copying import copy_checkpoints
from vmckpt.store.errors import DamagedError
from vmckpt.store.files.manifest import PAGE_CHUNK_BYTES, Manifest
from vmckpt.store.open import create_store, open_store
from vmckpt.store.store import Store
from vmckpt.store.transaction import Origin, Transaction

PAGES = 64


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Store]:
    with create_store(str(tmp_path / "source")) as store:
        yield store


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Store]:
    with create_store(str(tmp_path / "target")) as store:
        yield store


def test_what_a_rule_removes_meanwhile_keeps_no_other_from_being_copied(
    source: Store, target: Store
) -> None:
    ram = memory(PAGES, 1)
    first, gone = save(source, ram), save(source, ram)
    other = save(source, ram, vm="other")

    def copied(manifest: Manifest) -> None:
        if manifest.id == first.id:
            source.remove([gone.id])

    done = copy_checkpoints(source, target, [first, gone, other], copied)
    assert [one.id for one in done] == [first.id, other.id]
    require_same(target, other, ram)


def test_one_that_was_named_and_goes_meanwhile_makes_no_exported_file_without_it(
    source: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path / "state"))
    first, gone = save(source, memory(PAGES, 1)), save(source, memory(PAGES, 2))
    right = copying.missing

    def missing(*args: Any) -> list[Manifest]:
        found = right(*args)
        source.remove([gone.id])
        return found

    monkeypatch.setattr(copying, "missing", missing)
    file = tmp_path / "file.vmckpt"
    with pytest.raises(NotFoundError, match="1 of 2"):
        export(file=file, checkpoints=[first.id, gone.id], store=source.location)
    assert not file.exists()


def test_a_vm_that_is_written_to_the_target_keeps_no_other_vms_from_it(
    source: Store, target: Store
) -> None:
    ram = memory(PAGES, 1)
    mine, other = save(source, ram), save(source, ram, vm="other")
    with (
        open_store(target.location) as beside,
        beside.begin("vm"),
        pytest.raises(BusyError, match="1 of 2 checkpoints were not copied"),
    ):
        copy_checkpoints(source, target, [mine, other])
    assert target.ids() == [other.id]
    assert [one.id for one in copy_checkpoints(source, target, [mine, other])] == [mine.id]


def test_a_parent_that_goes_from_the_target_meanwhile_is_done_without(
    source: Store, target: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    ram = memory(PAGES, 1)
    after, dirty = dirtied(ram, 10, 2)
    first = save(source, ram)
    second = save(source, after, parent=first, dirty=dirty)
    copy_checkpoints(source, target, [first])
    right = target.begin

    def begin(vm: str, parent: str | None = None, *, origin: Origin) -> Transaction:
        if first.id in target.ids():
            target.remove([first.id])
        return right(vm, parent, origin=origin)

    monkeypatch.setattr(target, "begin", begin)
    copy_checkpoints(source, target, [second])
    require_same(target, second, after)
    assert check(target).whole


def test_a_damaged_parent_keeps_no_whole_checkpoint_from_being_copied(
    source: Store, target: Store
) -> None:
    ram = memory(PAGES, 1)
    after, dirty = dirtied(ram, 10, 2)
    first = save(source, ram)
    second = save(source, after, parent=first, dirty=dirty)
    copy_checkpoints(source, target, [first])
    path = Path(source.location) / "checkpoints" / first.id
    path.write_bytes(b"\0" * 200 + path.read_bytes()[200:])
    with open_store(source.location) as again:
        copy_checkpoints(again, target, [second])
    require_same(target, second, after)
    assert check(target).whole


def put_another(target: Store, of: Manifest, ram: Memory) -> None:
    """What a client may do that only adds."""
    with target.begin("vm", origin=Origin(of.id, "vm", None, None)) as new:
        area = new.area(RAM, size_bytes=ram.nbytes, chunk_bytes=PAGE_CHUNK_BYTES)
        area.put(np.arange(PAGES), ram.tobytes())
        new.commit({"name": "first"})


def test_what_another_has_put_in_its_place_is_no_copy(source: Store, target: Store) -> None:
    """It was said to be there already."""
    ram = memory(PAGES, 1)
    first, second = save(source, ram), save(source, ram)
    put_another(target, first, memory(PAGES, 2))
    with pytest.raises(DamagedError, match="1 of 2 checkpoints were not copied") as told:
        copy_checkpoints(source, target, [first, second])
    assert "is another one of that id" in told.value.why
    require_same(target, second, ram)
    target.remove([first.id])
    assert [one.id for one in copy_checkpoints(source, target, [first, second])] == [first.id]
    require_same(target, first, ram)


def test_a_copy_does_not_rest_on_what_another_has_put_in_its_parents_place(
    source: Store, target: Store
) -> None:
    """Who may add to the target knows the parent's id from the copy of another child."""
    ram, wrong = memory(PAGES, 1), memory(PAGES, 2)
    after, dirty = dirtied(ram, 10, 3)
    first = save(source, ram)
    second = save(source, after, parent=first, dirty=dirty)
    put_another(target, first, wrong)
    copy_checkpoints(source, target, [second])
    require_same(target, second, after)
