"""Merged packs beside clients that may only add, and beside what others have put there."""

import errno
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from tests.contract.test_store_bundles import Ready, merged, ready, write_bundle
from tests.contract.test_store_lost_locks import prepared
from tests.guest_like import require_same
from tests.lent_store import lent
from tests.small_packs import collect_now, objects, require_all, require_one, require_whole
from vmckpt.errors import RefusedError
from vmckpt.store.backends.local import LocalBackend
from vmckpt.store.bundles import layout, merging
from vmckpt.store.bundles.bundled import Holdings
from vmckpt.store.bundles.layout import MOST_PACKS, Bundle, BundledPack, Whole, is_bundle
from vmckpt.store.bundles.merging import plan_merges
from vmckpt.store.check import check
from vmckpt.store.files.maps import make_refs
from vmckpt.store.files.pack import PackWriter
from vmckpt.store.open import open_store
from vmckpt.store.store import Store
from vmckpt.store.transaction import Transaction

__all__ = ["merged", "ready"]


def put_another(store: Store, pack_id: bytes) -> None:
    """A pack of that name that is whole, of other content."""
    opened = store.opened
    table = opened.packs.find(pack_id).table
    size, content = table.chunk_bytes, b"evil" * (table.chunk_bytes // 4)
    writer = PackWriter(opened.packs, pack_id, 0, size, opened.pool)
    for _ in range(table.slot_count):
        writer.add(content, opened.sealer.hashes(memoryview(content), size))
    writer.publish()


def put_nonsense(store: Store, pack_id: bytes) -> None:
    """An object of that name that is no pack."""
    writer = store.opened.backend.write(f"packs/{pack_id.hex()}-0")
    writer.write(b"nonsense" * 100)
    writer.publish()


@pytest.mark.parametrize("put", [put_another, put_nonsense])
def test_a_client_that_may_only_add_hides_no_pack_that_was_merged(
    tmp_path: Path, merged: Ready, put: Callable[[Store, bytes], None]
) -> None:
    location = merged.copied(tmp_path / "store")
    with lent(location, append_only=True) as backend, open_store(backend) as intruder:
        for pack in {pack for one in merged.made for pack in one.manifest.packs}:
            put(intruder, bytes.fromhex(pack))
    for _ in range(2):
        with open_store(str(location)) as store:
            require_all(store, merged.made)
            require_whole(store)
            collect_now(store)
    assert objects(LocalBackend(location))["packs"] == 0


def test_a_pack_whose_table_is_damaged_in_a_bundle_is_read_as_its_own_object_has_it(
    tmp_path: Path, ready: Ready, merged: Ready
) -> None:
    """Gc was killed before it removed what it had merged."""
    location = merged.copied(tmp_path / "store")
    for one in (ready.location / "packs").glob("[0-9a-f]*"):
        (location / "packs" / one.name).write_bytes(one.read_bytes())
    with open_store(str(location)) as store:
        (bundle,) = store.opened.backend.list_holdings().bundles.values()
    path = location / bundle.name
    data = bytearray(path.read_bytes())
    for member in bundle.members.values():
        data[member.tail_at + 20] ^= 1
        data[member.tail_at + member.size - member.frame_bytes - 1] ^= 1
    path.write_bytes(data)
    for _ in range(2):
        with open_store(str(location)) as store:
            require_all(store, merged.made)
            assert not check(store).lost
            collect_now(store)


class Unreadable(LocalBackend):
    """A disk that cannot read 16 bytes of each bundle from `bad` on."""

    bad = 0

    def read(self, name: str, start: int = 0, length: int | None = None) -> bytes:
        """Part of a file."""
        data = super().read(name, start, length)
        self._require_good(name, start, start + len(data))
        return data

    def read_end(self, name: str, length: int) -> tuple[bytes, int]:
        """Its end."""
        data, size = super().read_end(name, length)
        self._require_good(name, size - len(data), size)
        return data, size

    def _require_good(self, name: str, start: int, end: int) -> None:
        if name.startswith("bundles/") and start < self.bad + 16 and self.bad < end:
            raise self.error(OSError(errno.EIO, os.strerror(errno.EIO)), name)


def test_a_sector_of_a_bundle_that_cannot_be_read_takes_one_pack_with_it_at_most(
    tmp_path: Path, merged: Ready
) -> None:
    """The list's, or that of a table: all packs that have nothing there can be read."""
    location = merged.copied(tmp_path / "store")
    with open_store(str(location)) as store:
        (bundle,) = store.opened.backend.list_holdings().bundles.values()
    backend = Unreadable(location)
    backend.bad = 0
    with open_store(backend) as store:
        require_all(store, merged.made)
        assert {one.name for one in check(store).findings} == {bundle.name}
    last = list(bundle.members.values())[-1]
    backend = Unreadable(location)
    backend.bad = last.tail_at + last.size - last.frame_bytes - 16
    lost = last.name.removeprefix("packs/").partition("-")[0]
    with open_store(backend) as store:
        good = [one for one in merged.made if lost not in one.manifest.packs]
        assert 0 < len(good) < len(merged.made)
        for one in good:
            require_one(store, *one)
    backend = Unreadable(location)
    backend.bad = 0
    with open_store(backend) as store:
        assert collect_now(store).bundles == 1
    with open_store(str(location)) as store:
        require_all(store, merged.made)
        require_whole(store)


@pytest.mark.parametrize("frames", [0, 250 << 20])
def test_a_bundle_that_claims_more_than_any_has_is_refused(
    tmp_path: Path, ready: Ready, frames: int
) -> None:
    """Its file is as large as it says: all of it would be read into memory at once."""
    location = ready.copied(tmp_path / "store")
    rows = [[f"{number:032x}", 0, 250 << 20, frames] for number in range(16)]
    with open_store(str(location)) as store:
        write_bundle(store, rows, 16 * (250 << 20))
        held = store.opened.backend.list_holdings()
        assert not held.bundles
        assert len(held.unreadable) == 1
        require_one(store, *ready.made[-1])
        assert not check(store).lost


def test_beside_a_bundle_of_the_highest_rank_gc_makes_none_that_is_not_seen(
    tmp_path: Path, ready: Ready, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor one more each time: a client of object storage that may only add can put one there."""
    location = ready.copied(tmp_path / "store")
    found = list[int]()
    for _ in range(3):
        with open_store(str(location)) as store:
            backend = store.opened.backend
            if not found:
                (taken, *_) = (f"packs/{name}" for name in backend.names("packs"))
                with monkeypatch.context() as patched:
                    patched.setattr(layout, "_RANKS", 1)
                    backend.files.write([Whole(taken, b"nonsense" * 100, 0)], 10**19 - 2)
            collect_now(store)
            require_all(store, ready.made)
            names = list(backend.names("bundles"))
            assert all(map(is_bundle, names))
            found.append(len(names))
    assert found[2] <= found[1]


def test_full_bundles_of_tiny_packs_are_not_made_anew_by_each_gc() -> None:
    """They have as many packs as a bundle may have, and few bytes."""
    bundles, kept = dict[str, Bundle](), dict[str, int]()
    for number in range(merging.MANY + 1):
        names = [f"packs/{number:016x}{one:016x}-0" for one in range(MOST_PACKS)]
        members = {name: BundledPack(name, 700, 300, 0, 0) for name in names}
        name = f"bundles/{number:032x}-{number}"
        bundles[name] = Bundle(name, number, 700 * MOST_PACKS, 400 * MOST_PACKS, members)
        kept |= dict.fromkeys(names, 700)
    held = Holdings(
        bundles=bundles, within={pack: (one,) for one in bundles.values() for pack in one.members}
    )
    assert not plan_merges(
        held, kept, frozenset(), changing=(), faulty=(), age=lambda name: int(name[6:38], 16)
    )


@pytest.mark.parametrize("is_merged", [False, True])
def test_a_client_that_may_only_add_has_gc_keep_no_earlier_generation_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_merged: bool
) -> None:
    """It adds a pack of the name that one had before gc wrote it again, and a checkpoint that names
    what gc has left out of that.
    """
    location = tmp_path / "store"
    kept, ram = prepared(location)
    monkeypatch.setattr(merging, "MANY", 2 if is_merged else 100)
    for _ in range(4):
        with open_store(str(location)) as store:
            collect_now(store)
            later = [name for name in store.opened.backend.names("packs") if name[-2:] != "-0"]
            assert later
            bundles = store.opened.backend.names("bundles")
    assert bool(bundles) == is_merged
    ids = [bytes.fromhex(name.partition("-")[0]) for name in later]
    monkeypatch.setattr(Transaction, "_require_complete", lambda *_: None)
    with lent(location, append_only=True) as backend, open_store(backend) as intruder:
        new = intruder.begin("intruder")
        for number, pack in enumerate(ids):
            table = intruder.opened.packs.find(pack).table
            with nullcontext() if is_merged else pytest.raises(RefusedError):
                put_another(intruder, pack)
            size = table.slot_count * table.chunk_bytes
            area = new.area(f"disk-{number}", size_bytes=size, chunk_bytes=table.chunk_bytes)
            new._packs.append(pack)
            area.map.refs[:] = make_refs(len(new._packs) - 1, np.arange(table.slot_count))
        new.commit({})
    monkeypatch.undo()
    for _ in range(2):
        with open_store(str(location)) as store:
            require_same(store, kept, ram)
            collect_now(store)
            assert set(later) <= store.opened.backend.names("packs").keys()
