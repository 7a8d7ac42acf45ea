"""What is pinned stays: in every kind of store, whatever removes, and a guard's until it ends."""

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.commands import vmckpt
from tests.contract.test_stores import Places, locations, server
from tests.guest_like import memory, require_same, save
from tests.unit.test_checkpoint_tree import facts
from tests.unit.test_guard_records import record
from vmckpt.checkpoint.catalogue.catalogue import Catalogue, catalogue, to_json
from vmckpt.checkpoint.catalogue.maintain import prune, remove
from vmckpt.checkpoint.catalogue.pinning import check_reason, pin, unpin
from vmckpt.checkpoint.catalogue.retention import RetentionRule
from vmckpt.checkpoint.catalogue.tree import lines, rows
from vmckpt.errors import (
    BusyError,
    NotFoundError,
    OperationFailedError,
    RefusedError,
    StorageError,
    UsageError,
)
from vmckpt.fleet.guard.guard import expire
from vmckpt.fleet.guard.pinned import pin_for, without_stale
from vmckpt.fleet.guard.record import GuardPhase, GuardRecord, forget, load_all
from vmckpt.fleet.guard.record import save as write_down
from vmckpt.hosts.inventory.inventory import all_hosts
from vmckpt.store.backends.local import LocalHeld
from vmckpt.store.check import check
from vmckpt.store.collect import collect, plan_gc
from vmckpt.store.copying import copy_checkpoints
from vmckpt.store.files.header import FileKind
from vmckpt.store.files.pins import PINS, new_pin, write_pin
from vmckpt.store.open import create_store, new_archive, open_store
from vmckpt.store.sealing.keys import from_environment
from vmckpt.store.sealing.seal import Box
from vmckpt.store.store import Store

__all__ = ["locations", "server"]
VM = "web"


@pytest.fixture
def store(locations: Places) -> Iterator[Store]:
    with create_store(locations("one"), from_environment()) as made:
        yield made


def test_a_pinned_one_is_not_removed_and_its_file_stays_as_it_was(store: Store) -> None:
    ram = memory(64, 1)
    made, other = save(store, ram), save(store, memory(64, 2))
    before = store.opened.backend.read(f"checkpoints/{made.id}")
    one = new_pin(made.id, "keep it", "me@here")
    store.pin(one)
    with open_store(store.location, from_environment()) as elsewhere:
        assert elsewhere.pins() == {made.id: (one,)}
        with pytest.raises(RefusedError, match="is pinned") as refused:
            elsewhere.remove([other.id, made.id])
    assert "keep it (by me@here)" in refused.value.why
    assert "unpin" in refused.value.remedy
    collect(store, plan_gc(store))
    assert sorted(store.ids()) == sorted([made.id, other.id])
    assert store.opened.backend.read(f"checkpoints/{made.id}") == before
    require_same(store, made, ram)
    store.unpin(one)
    store.remove([made.id])
    assert store.pins() == {}
    assert check(store).whole


def test_what_is_not_there_or_is_being_removed_is_not_pinned(store: Store) -> None:
    made = save(store, memory(64, 1))
    with pytest.raises(NotFoundError):
        store.pin(new_pin("0" * 32, "-", "-"))
    with (
        store.opened.backend.hold(f"checkpoint {made.id}", shared=False),
        open_store(store.location, from_environment()) as other,
        pytest.raises(BusyError),
    ):
        other.pin(new_pin(made.id, "-", "-"))
    assert store.pins() == {}


@pytest.mark.parametrize("locations", ["directory"], indirect=True)
def test_with_a_lost_lock_nothing_is_pinned_or_removed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = save(store, memory(16, 1))

    def lost(self: LocalHeld) -> None:
        raise OperationFailedError("the lock was lost", why="-", remedy="-")

    with monkeypatch.context() as broken:
        broken.setattr(LocalHeld, "require", lost)
        with pytest.raises(OperationFailedError):
            store.pin(new_pin(made.id, "-", "-"))
        with pytest.raises(OperationFailedError):
            store.remove([made.id])
    assert (store.pins(), store.ids()) == ({}, [made.id])


def test_of_a_pin_and_a_removal_at_once_one_wins(locations: Places) -> None:
    with create_store(locations("race"), from_environment()) as store:
        for seed in range(4):
            made = save(store, memory(16, seed))
            told: list[str] = []

            def attempt(pins: bool, made_id: str = made.id, told: list[str] = told) -> None:
                with open_store(store.location, from_environment()) as mine:
                    try:
                        mine.pin(new_pin(made_id, "-", "-")) if pins else mine.remove([made_id])
                        told.append("pinned" if pins else "removed")
                    except (BusyError, NotFoundError, RefusedError):
                        pass

            both = [threading.Thread(target=attempt, args=(pins,)) for pins in (True, False)]
            for one in both:
                one.start()
            for one in both:
                one.join()
            assert told in (["pinned"], ["removed"], []), told
            assert (made.id in store.ids()) == ("removed" not in told)
            assert (made.id in store.pins()) == ("pinned" in told)


def test_a_pin_that_cannot_be_read_holds_and_check_names_it(store: Store) -> None:
    made = save(store, memory(64, 1))
    one = new_pin(made.id, "-", "-")
    writer = store.opened.backend.write(one.name)
    writer.write(b"nonsense")
    writer.publish()
    with pytest.raises(RefusedError, match="is pinned"):
        store.remove([made.id])
    assert [finding.name for finding in check(store).findings] == [one.name]
    store.unpin(store.pins()[made.id][0])
    store.remove([made.id])


def test_a_killed_writers_pins_are_collected(store: Store) -> None:
    write_pin(store.opened, new_pin("f" * 32, "-", "-"))
    made = save(store, memory(64, 1))
    store.pin(new_pin(made.id, "-", "-"))
    collect(store, plan_gc(store))
    assert list(store.pins()) == [made.id]


def test_copies_have_what_operators_pinned_and_guards_did_not(
    store: Store, locations: Places, tmp_path: Path
) -> None:
    made = save(store, memory(64, 1))
    store.pin(new_pin(made.id, "by hand", "me@here"))
    store.pin(new_pin(made.id, "rollback", "me@here", "20250101-000000-abcd"))
    with create_store(locations("two"), from_environment()) as second:
        copy_checkpoints(store, second, [made])
        assert [pin.reason for pin in second.pins()[made.id]] == ["by hand"]
    file = tmp_path / "file"
    with new_archive(file, store) as archive:
        copy_checkpoints(store, archive, [made])
    with (
        open_store(str(file), from_environment()) as archive,
        create_store(locations("three"), from_environment()) as third,
    ):
        copy_checkpoints(archive, third, [made])
        assert [pin.reason for pin in third.pins()[made.id]] == ["by hand"]


# -- as it is typed, and guards ---------------------------------------------------------------


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state directory with two checkpoints, `one` and `two`."""
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path))
    with create_store(str(tmp_path / "checkpoints")) as store:
        for name in ("one", "two"):
            save(store, memory(16, 1), vm=VM, facts=facts(name).to_json())
    return tmp_path


def ids(state: Path) -> list[str]:
    with open_store(str(state / "checkpoints")) as store:
        return [str(one.facts["name"]) for one in store.manifests()]


def seen() -> Catalogue:
    """All checkpoints, as a command sees them."""

    async def looked() -> Catalogue:
        return await without_stale(await catalogue(all_hosts(), None))

    return asyncio.run(looked())


def prune_all_but_one() -> list[str]:
    """Why each is kept or removed."""
    done = prune(seen().entries, RetentionRule(keep_last=1), {}, None, apply=True)
    return [one.why for one in asyncio.run(done).decisions]


def test_one_that_is_being_read_keeps_no_other_from_being_removed(state: Path) -> None:
    """A disk of it may be mounted for weeks."""
    with open_store(str(state / "checkpoints")) as store:
        save(store, memory(16, 1), vm=VM, facts=facts("three").to_json())
        (one, *_) = [m for m in store.manifests() if m.facts["name"] == "one"]
        with store.read(one.id):
            assert prune_all_but_one() == [
                "it is being read: not removed yet",
                "no rule keeps it",
                "last",
            ]
            assert ids(state) == ["one", "three"]
    prune_all_but_one()
    assert ids(state) == ["three"]


def test_pin_and_unpin_as_they_are_typed(state: Path) -> None:
    pinned = vmckpt(state, "checkpoint", "pin", "one", "--reason", "the audit", "--json")
    assert json.loads(pinned.stdout)["pin"]["reason"] == "the audit"
    refused = vmckpt(state, "checkpoint", "rm", "two", "one")
    assert (refused.returncode, "one is pinned" in refused.stderr) == (4, True)
    found = seen()
    assert [[pin["reason"] for pin in to_json(one)["pins"]] for one in found.entries] == [
        ["the audit"],
        [],
    ]
    assert "the audit" in dict(lines(found.find("one")))["pinned"]
    assert [row[-2] for row in rows(found.entries)] == ["pinned", ""]
    assert "pinned: the audit" in prune_all_but_one()[0]
    assert ids(state) == ["one", "two"]
    assert vmckpt(state, "checkpoint", "unpin", "one").returncode == 0
    with pytest.raises(RefusedError, match="not pinned"):
        asyncio.run(unpin(seen().find("one"), force=False))
    prune_all_but_one()
    assert ids(state) == ["two"]


def test_a_reason_is_one_printable_line() -> None:
    for reason in ("", " ", "a\nb", "\x1b[31mred", "x" * 501):
        with pytest.raises(UsageError):
            check_reason(reason)


def guard_of(state: Path, name: str) -> GuardRecord:
    """A guard in the middle of its command, whose checkpoint is that one."""

    async def begun() -> GuardRecord:
        found = await catalogue(all_hosts(), None)
        entry = found.find(name)
        made = write_down(record("20250101-000000-abcd", GuardPhase.COMMAND), checkpoint=entry.id)
        await pin_for(made, entry)
        return made

    (state / "guards").mkdir(exist_ok=True)
    return asyncio.run(begun())


def test_one_of_a_store_that_hosts_share_is_removed_once(state: Path) -> None:
    """Under two hosts' names it is one directory: the second removal failed with exit code 3."""
    link = state / "shared"
    link.symlink_to(state / "checkpoints")
    entry = seen().find("one")
    other = replace(entry.location, path=str(link))
    asyncio.run(remove([replace(entry, locations=(entry.location, other))]))
    assert ids(state) == ["two"]
    with pytest.raises(NotFoundError):
        asyncio.run(remove([entry]))


def test_nothing_removes_a_guards_rollback_checkpoint(state: Path) -> None:
    guard = guard_of(state, "one")
    prune_all_but_one()
    with pytest.raises(RefusedError, match="is pinned") as told:
        asyncio.run(remove([seen().find("one")]))
    assert guard.run in told.value.remedy
    with pytest.raises(RefusedError, match="by a guard") as told:
        asyncio.run(unpin(seen().find("one"), force=False))
    assert "--force" in told.value.remedy
    with open_store(str(state / "checkpoints")) as store:
        collect(store, plan_gc(store))
    assert ids(state) == ["one", "two"]
    asyncio.run(unpin(seen().find("one"), force=True))
    asyncio.run(remove([seen().find("one")]))


def test_a_guard_that_expires_takes_its_pin_and_its_checkpoint_along(state: Path) -> None:
    guard = guard_of(state, "one")
    write_down(guard, phase=GuardPhase.KEPT, expires_unix_s=1.0)
    asyncio.run(expire())
    assert ids(state) == ["two"]
    assert load_all().records == {}
    assert list((state / "guards").glob("*.pin")) == []


def test_what_the_operator_pinned_too_outlives_its_guard(state: Path) -> None:
    guard = guard_of(state, "one")
    asyncio.run(pin(seen().find("one"), "by hand"))
    write_down(guard, phase=GuardPhase.KEPT, expires_unix_s=1.0)
    asyncio.run(expire())
    assert (ids(state), load_all().records) == (["one", "two"], {})


def test_a_guard_that_is_gone_leaves_a_pin_that_the_next_command_takes_out(state: Path) -> None:
    guard = guard_of(state, "one")
    forget(guard)  # as when its store did not answer at its end
    assert vmckpt(state, "checkpoint", "rm", "one").returncode == 0
    assert ids(state) == ["two"]


def test_another_operators_guard_is_never_taken_for_stale(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = guard_of(state, "one")
    forget(guard)
    (state / "guards" / f"{guard.run}.pin").unlink()

    assert [bool(one.pins) for one in seen().entries] == [True, False]


def test_a_pin_is_in_all_stores_of_its_checkpoint_or_in_none(
    state: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path_factory.mktemp("other") / "store"
    with create_store(str(other)) as second, open_store(str(state / "checkpoints")) as store:
        copy_checkpoints(store, second, store.manifests())
    written: list[str] = []
    real = Store.pin

    def fails_second(store: Store, one: object) -> None:
        written.append(store.location)
        if len(written) > 1:
            raise StorageError("cannot write", why="no space", remedy="-")
        real(store, one)  # type: ignore[arg-type]

    async def tried() -> None:
        here = (await catalogue(all_hosts(), None)).find("one")
        there = (await catalogue(all_hosts(), str(other))).find("one")
        with pytest.raises(StorageError):
            await pin(replace(here, locations=(*here.locations, *there.locations)), "-")

    monkeypatch.setattr(Store, "pin", fails_second)
    asyncio.run(tried())
    for location in (str(state / "checkpoints"), str(other)):
        with open_store(location) as store:
            assert store.opened.backend.names(PINS) == {}


PINS_SAY: list[object] = [
    [],
    None,
    {"reason": 1, "by": "", "guard": None, "pinned_unix_s": 1},
    {"reason": "", "by": "", "guard": [], "pinned_unix_s": 1},
    {"reason": "", "by": "", "guard": None, "pinned_unix_s": 10**400},
    {"reason": "", "by": "", "guard": None, "pinned_unix_s": 1e30},
    {"reason": "", "by": "", "guard": None, "pinned_unix_s": -1},
    {"reason": "", "by": "", "guard": None, "pinned_unix_s": True},
    {"reason": "", "by": ""},
]


@pytest.mark.parametrize("locations", ["directory"], indirect=True)
@pytest.mark.parametrize("text", [*map(json.dumps, PINS_SAY), "[" * 100_000, "9" * 5000])
def test_hostile_pins_hold_and_end_no_list(store: Store, text: str) -> None:
    """A client that only adds may write any."""
    made = save(store, memory(16, 1))
    name = f"{PINS}/{made.id}-{'0' * 16}"
    header = store.opened.files.header(FileKind.PIN).new()
    sealed = store.opened.sealer.file(header, name).seal(Box.PIN, 0, text.encode())
    store.opened.files.write(name, [header, sealed])
    [[pinned]] = store.pins().values()
    assert "damaged" in pinned.reason
    with pytest.raises(RefusedError, match="is pinned"):
        store.remove([made.id])
    assert [one.name for one in check(store).findings] == [name]
    store.unpin(pinned)
    store.remove([made.id])
