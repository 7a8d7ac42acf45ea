"""Merged packs beside clients that may only add, and beside what others have put there."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contract.test_store_bundles import Ready, lent, merged, ready
from tests.small_packs import collect_now, objects, require_all, require_whole
from vmckpt.store.backends.local import LocalBackend
from vmckpt.store.check import check
from vmckpt.store.manifest import PAGE_CHUNK_BYTES
from vmckpt.store.open import open_store
from vmckpt.store.pack import PackWriter
from vmckpt.store.store import Store

__all__ = ["merged", "ready"]


def put_another(store: Store, pack_id: bytes) -> None:
    """A pack of that name that is whole, of other content."""
    opened = store.opened
    slots = opened.packs.find(pack_id).table.slot_count
    content = b"evil" * (PAGE_CHUNK_BYTES // 4) * slots
    writer = PackWriter(opened.packs, pack_id, 0, PAGE_CHUNK_BYTES, opened.pool)
    writer.add(content, opened.sealer.hashes(memoryview(content), PAGE_CHUNK_BYTES))
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
    place = merged.copied(tmp_path / "store")
    with lent(place, append_only=True) as backend, open_store(backend) as intruder:
        for pack in {pack for one in merged.made for pack in one.manifest.packs}:
            put(intruder, bytes.fromhex(pack))
    for _ in range(2):
        with open_store(str(place)) as store:
            require_all(store, merged.made)
            require_whole(store)
            collect_now(store)
    assert objects(LocalBackend(place))["packs"] == 0


def test_a_pack_whose_table_is_damaged_in_a_bundle_is_read_as_its_own_object_has_it(
    tmp_path: Path, ready: Ready, merged: Ready
) -> None:
    """Gc was killed before it removed what it had merged."""
    place = merged.copied(tmp_path / "store")
    for one in (ready.place / "packs").iterdir():
        (place / "packs" / one.name).write_bytes(one.read_bytes())
    with open_store(str(place)) as store:
        (bundle,) = store.opened.backend.look().bundles.values()
    path = place / bundle.name
    data = bytearray(path.read_bytes())
    for member in bundle.members.values():
        data[member.tail_at + 20] ^= 1
        data[member.tail_at + member.size - member.frame_bytes - 1] ^= 1
    path.write_bytes(data)
    for _ in range(2):
        with open_store(str(place)) as store:
            require_all(store, merged.made)
            assert not check(store).lost
            collect_now(store)
