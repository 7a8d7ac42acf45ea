"""Two VMs of one name in one store: none is pruned by the other's rule, nor keeps it waiting."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from tests.guest_like import RAM, memory
from tests.unit.test_checkpoint_tree import facts
from vmckpt.checkpoint.catalogue.catalogue import CatalogueEntry, catalogue
from vmckpt.checkpoint.catalogue.maintain import Pruned, prune
from vmckpt.checkpoint.catalogue.retention import RetentionRule
from vmckpt.checkpoint.catalogue.whose import chosen, of_vm
from vmckpt.errors import BusyError, NotFoundError, UsageError
from vmckpt.store.files.manifest import PAGE_CHUNK_BYTES, Manifest
from vmckpt.store.open import create_store
from vmckpt.store.store import Store
from vmckpt.store.transaction import Origin, new_id
from vmckpt.vm.identity import new_identity

BERLIN, PARIS = sorted([new_identity(), new_identity()])
RULE = RetentionRule(keep_last=1)


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is remembered of the stores stays with the test."""
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path / "state"))


def take(
    store: Store, vm_id: str | None, number: int, *, clock: float, parent: str | None = None
) -> Manifest:
    ram = memory(16, number)
    origin = Origin(new_id(), "web", parent, clock, vm_id, number if vm_id else None)
    with store.begin("web", parent, origin=origin) as new:
        area = new.area(RAM, size_bytes=ram.nbytes, chunk_bytes=PAGE_CHUNK_BYTES)
        area.put(np.arange(len(ram)), ram.tobytes())
        return new.commit(facts(f"p{number}").to_json())


def listed(location: Path) -> list[CatalogueEntry]:
    return asyncio.run(catalogue([], str(location), vm="web")).entries


def pruned(entries: list[CatalogueEntry], *, apply: bool = True) -> Pruned:
    return asyncio.run(prune(entries, RULE, {}, None, apply=apply))


def test_the_rule_of_one_takes_nothing_of_the_other(tmp_path: Path) -> None:
    with create_store(str(tmp_path / "store")) as store:
        mine = [take(store, BERLIN, n, clock=n) for n in (1, 2)]
        theirs = [take(store, PARIS, n, clock=10 + n) for n in (1, 2)]
        old = take(store, None, 3, clock=0)
        entries = listed(tmp_path / "store")
        found = chosen(entries, "web", [BERLIN], None)
        assert {one.id for one in found.mine} == {one.id for one in mine}
        assert {one.id for one in found.others} == {old.id, *(one.id for one in theirs)}
        pruned(found.mine)
        assert set(store.ids()) == {mine[1].id, old.id, *(one.id for one in theirs)}


def test_which_is_meant_has_to_be_said_where_it_is_not_known(tmp_path: Path) -> None:
    with create_store(str(tmp_path / "store")) as store:
        take(store, BERLIN, 1, clock=1)
        take(store, PARIS, 1, clock=2)
        old = take(store, None, 3, clock=0)
        entries = listed(tmp_path / "store")
        with pytest.raises(UsageError, match="'web' is the name of 3 VMs"):
            chosen(entries, "web", [], None)
        assert [one.id for one in chosen(entries, "web", [], "none").mine] == [old.id]
        assert chosen(entries, "web", [PARIS], BERLIN).mine == of_vm(entries, BERLIN).mine
        with pytest.raises(NotFoundError):
            chosen(entries, "web", [], "x")
        # A store of one VM, which no host has any longer: its name is enough.
        assert chosen([entries[0]], "web", [], None).mine == [entries[0]]


def test_a_clock_behind_costs_no_new_checkpoint_and_is_said(tmp_path: Path) -> None:
    with create_store(str(tmp_path / "store")) as store:
        first = take(store, BERLIN, 1, clock=5e8)
        second = take(store, BERLIN, 2, clock=6e8, parent=first.id)
        behind = take(store, BERLIN, 3, clock=4e8, parent=second.id)
        found = pruned(listed(tmp_path / "store"))
        assert store.ids() == [behind.id]
        assert "contradict the order" in found.clocks
        assert "p3" in found.clocks


def test_two_write_at_once_and_one_alone(tmp_path: Path) -> None:
    with create_store(str(tmp_path / "store")) as store:
        origin = Origin(new_id(), "web", None, None, BERLIN, 1)
        with store.begin("web", origin=origin):
            other = origin._replace(id=new_id(), vm_id=PARIS)
            with store.begin("web", origin=other):
                pass
            again = origin._replace(id=new_id())
            with pytest.raises(BusyError), store.begin("web", origin=again):
                pass
