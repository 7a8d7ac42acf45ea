"""What of a checkpoint is kept aside before it is in the store: little, however large that is."""

import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tests.guest_like import RAM, read_whole
from vmckpt.errors import StorageError
from vmckpt.store import chunk_sink
from vmckpt.store.backends.local import TEMPORARY
from vmckpt.store.backends.s3 import SPOOL_BYTES, S3Writer
from vmckpt.store.check import check
from vmckpt.store.files.manifest import PAGE_CHUNK_BYTES
from vmckpt.store.open import create_store

PAGES = 1024


class Usage(NamedTuple):
    free: int


@pytest.mark.parametrize("commits", [True, False])
def test_packs_go_to_the_store_as_they_are_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, commits: bool
) -> None:
    monkeypatch.setattr(chunk_sink, "MOST_BYTES", 1 << 20)
    ram = np.random.default_rng(1).integers(0, 256, (PAGES, PAGE_CHUNK_BYTES), dtype=np.uint8)
    with create_store(str(tmp_path / "store")) as store:
        with store.begin("vm") as new:
            area = new.area(RAM, size_bytes=ram.nbytes, chunk_bytes=PAGE_CHUNK_BYTES)
            for at in range(0, PAGES, 64):
                area.put(np.arange(at, at + 64), ram[at : at + 64].tobytes())
                kept_bytes = sum(
                    one.stat().st_size for one in (tmp_path / "store" / TEMPORARY).iterdir()
                )
                assert kept_bytes < 2 << 20
            assert len(list((tmp_path / "store" / "packs").glob("[0-9a-f]*"))) >= 3
            if commits:
                manifest = new.commit({})
        if not commits:
            assert not list((tmp_path / "store" / "packs").glob("[0-9a-f]*"))
            return
        with store.read(manifest.id) as point:
            assert read_whole(point.area(RAM)) == ram.tobytes()
        assert check(store).whole


def test_no_room_to_keep_an_object_aside_is_said_before_it_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writer = S3Writer(None, "packs/x")  # type: ignore[arg-type]  # nothing is put
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(free=100 << 20))
    writer.write(bytes(SPOOL_BYTES))
    with pytest.raises(StorageError, match="cannot write the replacement of packs/x") as told:
        writer.write(b"x")
    assert "100 MiB are free" in told.value.why
    assert "TMPDIR" in told.value.remedy
    writer.discard()
