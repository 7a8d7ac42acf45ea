"""A restore asked of its service: what a foreign checkpoint names is refused there, by name."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_foreign_checkpoints import ASKING, CRONTAB, GUEST, MIB, taken
from vmckpt.checkpoint.catalogue.catalogue import CatalogueEntry
from vmckpt.checkpoint.catalogue.location import StoreLocation
from vmckpt.checkpoint.facts import CheckpointFacts
from vmckpt.checkpoint.fork import fork
from vmckpt.checkpoint.operate import fork_on, restore_to, standing
from vmckpt.checkpoint.origin import marked, run_key
from vmckpt.checkpoint.restore.requests import RestoreOptions
from vmckpt.errors import RefusedError, VmckptError
from vmckpt.hosts.inventory.inventory import local_host
from vmckpt.store.open import create_store
from vmckpt.store.transaction import new_origin

TEXT = GUEST + ASKING["boot"]
WISH = RestoreOptions(None, in_place=False, eager=True, plugged=False, keep_macs=True)


def stored(location: Path, site: Path | None) -> CatalogueEntry:
    """A checkpoint in a store of its own, as `site` takes it."""
    facts = replace(taken(TEXT), disks=(replace(CRONTAB, path="/etc/cron.d/web"),))
    store = create_store(str(location))
    with store.begin("web", origin=new_origin("web", None)) as new:
        new.area("ram", size_bytes=64 * MIB, chunk_bytes=4096)
        new.area("disk-0", size_bytes=MIB, chunk_bytes=65536)
        new.blob("device-state", b"")
        words: dict[str, Any] = facts.to_json()
        key = run_key(site, "web") if site else ""
        manifest = new.commit(marked(words, key, new.id, "web"))
    store.close()
    return CatalogueEntry(
        (StoreLocation(local_host(), str(location)),),
        manifest,
        CheckpointFacts.from_json(manifest.facts),
    )


def why(entry: CatalogueEntry, wish: RestoreOptions) -> VmckptError:
    with pytest.raises(VmckptError) as failed:
        asyncio.run(restore_to(local_host(), entry, wish, lambda _: None))
    return failed.value


def is_refused_as_foreign(error: VmckptError) -> bool:
    return isinstance(error, RefusedError) and "was not taken by this site" in error.what


@pytest.fixture(autouse=True)
def state(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(short_path / "op"))
    return short_path


def test_another_sites_is_refused_until_it_is_trusted(state: Path) -> None:
    entry = stored(state / "theirs", state / "their-site")
    assert asyncio.run(standing(entry)) == (True, ("file /root/.ssh/id_rsa",))
    refused = why(entry, WISH)
    assert is_refused_as_foreign(refused)
    assert "/root/.ssh/id_rsa" in refused.why
    copy = replace(WISH, name="copy", keep_macs=False)
    assert is_refused_as_foreign(why(entry, copy))
    wish = fork.ForkOptions(entry.id, "f", 1, plugged=False)
    with pytest.raises(RefusedError, match="was not taken by this site"):
        asyncio.run(fork_on(local_host(), entry, wish, lambda _: None))
    assert not is_refused_as_foreign(why(entry, replace(WISH, trust=True)))
    assert not (state / "op/vms").exists() or not list((state / "op/vms").iterdir())


def test_this_sites_own_goes_on_without_a_word(state: Path) -> None:
    entry = stored(state / "ours", state / "op")
    assert asyncio.run(standing(entry)) == (False, ())
    assert not is_refused_as_foreign(why(entry, WISH))
