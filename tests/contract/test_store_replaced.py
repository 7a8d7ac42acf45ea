"""The file `store` of a store, replaced by one without encryption, or with other keys."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.guest_like import memory, require_same, save
from vmckpt.checkpoint.catalogue.known_stores import known, require_unchanged
from vmckpt.checkpoint.catalogue.location import (
    StoreLocation,
    access_to,
    is_there,
    open_or_create,
    opened,
    reading,
)
from vmckpt.errors import NotFoundError, RefusedError, StorageError
from vmckpt.fleet.schedule.checks import require_stores
from vmckpt.fleet.schedule.record import new_record
from vmckpt.fleet.schedule.request import ScheduleRequest, When
from vmckpt.fleet.schedule.run import clock
from vmckpt.hosts.inventory.inventory import local_host
from vmckpt.store.files.config import NAMES, Config, read_config
from vmckpt.store.keyring import add_key, remove_key
from vmckpt.store.open import Access, create_store, open_store
from vmckpt.store.sealing.keys import KEY_FILE, KeyHolder, KeySource, make_key_file
from vmckpt.store.sealing.wrapping import clear, keys_of

RAM = memory(64, 1)


@dataclass(frozen=True)
class Victim:
    """An encrypted store with a checkpoint, and its key."""

    path: Path
    key: KeySource
    id: str

    @property
    def location(self) -> StoreLocation:
        return StoreLocation(local_host(), str(self.path))

    def replace(self, config: Config) -> None:
        """What an attacker does who can write to the location."""
        for name in NAMES:
            path = self.path / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(config.encode())

    def without_encryption(self) -> None:
        self.replace(Config(self.id, 1, clear(bytes(32))))

    def use(self) -> None:
        """As an operator's command does, which then remembers it."""
        asyncio.run(_used(self.location, self.key))


async def _used(location: StoreLocation, key: KeySource | None) -> str:
    async with opened(location, key) as store:
        return store.config.id


@pytest.fixture
def victim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Victim:
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.delenv(KEY_FILE, raising=False)
    make_key_file(tmp_path / "key")
    key = KeySource(KeyHolder.FILE, str(tmp_path / "key"))
    with create_store(str(tmp_path / "store"), key) as store:
        save(store, RAM)
        return Victim(tmp_path / "store", key, store.config.id)


def vmckpt(victim: Victim, *words: str, code: int = 0) -> dict[str, Any]:
    """A `store` command's answer."""
    done = subprocess.run(
        [sys.executable, "-m", "vmckpt.cli.entry", "store", *words, "--json"],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.mark.parametrize("in_environment", [False, True])
def test_a_key_refuses_a_store_without_encryption(
    victim: Victim, monkeypatch: pytest.MonkeyPatch, in_environment: bool
) -> None:
    key: KeySource | None = victim.key
    if in_environment:
        monkeypatch.setenv(KEY_FILE, victim.key.where)
        key = None
    victim.without_encryption()
    # Nothing was remembered of it: the key alone says that it has to be encrypted.
    for attempt in (
        partial(access_to, victim.location, key, to_write=True),
        partial(access_to, victim.location, key),
        partial(_used, victim.location, key),
    ):
        with pytest.raises(RefusedError, match="is not encrypted") as refused:
            asyncio.run(attempt())
        assert str(victim.path) in refused.value.what
    with pytest.raises(RefusedError, match="is not encrypted"):
        open_store(str(victim.path), key)


def test_what_a_store_was_is_remembered_without_a_key_too(victim: Victim) -> None:
    victim.use()
    victim.without_encryption()
    for attempt in (
        partial(access_to, victim.location, None, to_write=True),
        partial(_used, victim.location, None),
    ):
        with pytest.raises(RefusedError, match="not the one that was used before") as refused:
            asyncio.run(attempt())
        assert "was encrypted" in refused.value.why
        assert "store accept" in refused.value.remedy


def test_another_store_in_its_location_is_refused_until_it_is_accepted(victim: Victim) -> None:
    victim.use()
    shutil.rmtree(victim.path)
    with create_store(str(victim.path)) as store:
        other = store.config.id
    where = str(victim.path)
    said = vmckpt(victim, "check", where, code=4)["error"]
    assert victim.id[:12] in said["why"]
    assert other[:12] in said["why"]
    assert other[:12] in vmckpt(victim, "info", where)["changed"]
    assert vmckpt(victim, "accept", where)["id"] == other
    assert vmckpt(victim, "check", where)["whole"]
    assert vmckpt(victim, "info", where)["changed"] is None
    # What was accepted without encryption may be used beside a key that is for others.
    asyncio.run(access_to(victim.location, victim.key, to_write=True))


def test_a_service_refuses_what_is_not_what_the_operator_saw(victim: Victim) -> None:
    access = asyncio.run(access_to(victim.location, victim.key, to_write=True))
    victim.without_encryption()
    with pytest.raises(RefusedError, match="not the one that the command began with"):
        open_or_create(str(victim.path), access)
    with pytest.raises(RefusedError, match="not the one that the command began with"):
        asyncio.run(_read(victim, access.secret))
    # And the other way: what had no encryption, has an attacker's.
    with pytest.raises(RefusedError, match="began with"):
        open_or_create(str(victim.path), Access(None, "00" * 16))


async def _read(victim: Victim, secret: bytes | None) -> None:
    async with reading(str(victim.path), "0" * 32, secret):
        raise AssertionError("it was opened")


def test_an_older_list_of_keys_is_refused(victim: Victim, tmp_path: Path) -> None:
    make_key_file(tmp_path / "second")
    second = KeySource(KeyHolder.FILE, str(tmp_path / "second"))
    with open_store(str(victim.path), victim.key) as store:
        add_key(store.opened.backend, victim.key, second, "second")
        old = store.config
    victim.use()
    with open_store(str(victim.path), second) as store:
        [first, _] = vmckpt(victim, "key", "list", "--store", str(victim.path))["keys"]
        remove_key(store.opened.backend, second, first["id"])
    asyncio.run(_used(victim.location, second))
    victim.replace(old)
    with pytest.raises(RefusedError, match="not the one that was used before") as refused:
        asyncio.run(_used(victim.location, victim.key))
    assert "older" in refused.value.why


def test_a_list_of_keys_that_no_holder_of_a_key_wrote_is_refused(
    victim: Victim, tmp_path: Path
) -> None:
    make_key_file(tmp_path / "second")
    second = KeySource(KeyHolder.FILE, str(tmp_path / "second"))
    with open_store(str(victim.path), victim.key) as store:
        add_key(store.opened.backend, victim.key, second, "second")
    with open_store(str(victim.path), victim.key) as store:
        config = store.config
    fewer = config.key | {"keys": config.key["keys"][:1], "revision": 7}
    victim.replace(Config(config.id, config.created_unix_s, fewer, config.format))
    with pytest.raises(StorageError, match="config is damaged"):
        open_store(str(victim.path), victim.key)


def test_a_location_that_is_empty_now_gets_no_new_store(victim: Victim) -> None:
    victim.use()
    shutil.rmtree(victim.path)
    victim.path.mkdir()  # where its file system is not mounted
    with pytest.raises(RefusedError, match="is gone") as refused:
        asyncio.run(access_to(victim.location, None, to_write=True, named=False))
    assert "mounted" in refused.value.remedy
    assert asyncio.run(is_there(victim.location))  # so that a list says that it is gone
    assert "is gone" in vmckpt(victim, "init", str(victim.path), code=4)["error"]["what"]
    assert vmckpt(victim, "accept", str(victim.path))["id"] is None
    vmckpt(victim, "init", str(victim.path))


def test_a_named_location_is_never_made_a_store_by_the_way(victim: Victim, tmp_path: Path) -> None:
    mount_point = StoreLocation(local_host(), str(tmp_path / "mnt"))
    with pytest.raises(NotFoundError, match="there is no store"):
        asyncio.run(access_to(mount_point, None, to_write=True, named=True))
    assert asyncio.run(access_to(mount_point, None, to_write=True, named=False)).may_be_made
    with pytest.raises(NotFoundError, match="there is no store"):
        open_or_create(mount_point.path, Access())


def test_the_secret_of_an_encrypted_store_never_writes_without_encryption(victim: Victim) -> None:
    access = asyncio.run(access_to(victim.location, victim.key, to_write=True))
    with open_or_create(str(victim.path), access) as store:
        require_same(store, save(store, RAM), RAM)
        assert store.opened.sealer.encrypted


def test_a_remembered_location_is_compared_by_all_that_it_was(victim: Victim) -> None:
    victim.use()
    before = known(victim.location.location)
    assert before is not None
    assert (before.id, before.encrypted, before.accepted) == (victim.id, True, False)
    with open_store(str(victim.path), victim.key) as store:
        assert require_unchanged(victim.location.location, "it", store.config) == before


def test_a_schedule_is_refused_whose_stores_its_key_does_not_fit(
    victim: Victim, tmp_path: Path
) -> None:
    create_store(str(tmp_path / "clear")).close()
    hourly = ScheduleRequest("web", When.EVERY, "UTC", every_s=3600.0, key_file=victim.key.where)

    def require(store: str, *copies: str) -> None:
        record = new_record("web", replace(hourly, store=store, copies=copies), clock())
        asyncio.run(require_stores(record, local_host()))

    require(str(victim.path))
    with pytest.raises(RefusedError, match="is not encrypted"):
        require(str(victim.path), str(tmp_path / "clear"))
    with pytest.raises(RefusedError, match="is not encrypted"):
        require(str(tmp_path / "clear"), str(victim.path))
    with pytest.raises(NotFoundError, match="there is no store"):
        require(str(tmp_path / "mnt"))


@pytest.mark.parametrize("verb", ["add", "rotate", "remove", "export"])
def test_keys_of_an_older_list_are_not_changed_as_if_it_were_the_stores(
    victim: Victim, tmp_path: Path, verb: str
) -> None:
    """It would be signed again, a revision later, with a key in it that was removed."""
    make_key_file(tmp_path / "second")
    second = KeySource(KeyHolder.FILE, str(tmp_path / "second"))
    with open_store(str(victim.path), victim.key) as store:
        add_key(store.opened.backend, victim.key, second, "second")
        first, _ = keys_of(read_config(store.opened.backend))
        old = read_config(store.opened.backend)
        remove_key(store.opened.backend, second, first.id)
    asyncio.run(_used(victim.location, second))
    victim.replace(old)
    before = (victim.path / NAMES[0]).read_bytes()
    at = ("--store", str(victim.path))
    new = ("--key-file", second.where, "--new-key-file", str(tmp_path / "new"))
    words = {
        "add": ("key", "add", *at, *new),
        "rotate": ("key", "rotate", *at, *new),
        "remove": ("key", "remove", first.id, *at, "--key-file", second.where),
        "export": ("key", "export", str(tmp_path / "backup"), *at),
    }
    said = vmckpt(victim, *words[verb], code=4)["error"]
    assert "older" in said["why"]
    assert (victim.path / NAMES[0]).read_bytes() == before
    assert not (tmp_path / "new").exists()
    found = known(victim.location.location)
    assert found is not None
    assert found.revision == 2


def test_a_list_of_keys_that_no_key_opens_is_not_remembered(victim: Victim) -> None:
    """The right one would be refused as an older one from then on."""
    victim.use()
    with open_store(str(victim.path), victim.key) as store:
        config = store.config
    later = {"kind": "several", "keys": [config.key], "revision": 99, "mac": "00" * 32}
    victim.replace(Config(config.id, config.created_unix_s, later, 2))
    with pytest.raises(StorageError):
        asyncio.run(access_to(victim.location, victim.key))
    victim.replace(config)
    asyncio.run(access_to(victim.location, victim.key))
