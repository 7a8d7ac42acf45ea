"""The file `store` in several copies, its backup, and keys that come and go."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from tests.guest_like import memory, require_same, save
from vmckpt.errors import NotFoundError, RefusedError, StorageError, UsageError
from vmckpt.state.durable import sync_directory
from vmckpt.store import keyring
from vmckpt.store.backends import local
from vmckpt.store.backends.local import LocalBackend
from vmckpt.store.check import check
from vmckpt.store.copying import copy_checkpoints
from vmckpt.store.errors import DamagedError
from vmckpt.store.files import config
from vmckpt.store.files.config import NAMES, Config, read_config, write_copy
from vmckpt.store.files.manifest import Manifest
from vmckpt.store.keyring import (
    add_key,
    backup_text,
    parse_backup,
    remove_key,
    restore_backup,
    rotate_key,
)
from vmckpt.store.open import create_store, new_archive, open_store
from vmckpt.store.sealing.keys import KeyHolder, KeySource, make_key_file
from vmckpt.store.sealing.wrapping import keys_of

RAM = memory(64, 1)
NewKey = Callable[[str], KeySource]


@pytest.fixture
def new_key(tmp_path: Path) -> NewKey:
    def made(name: str) -> KeySource:
        make_key_file(tmp_path / name)
        return KeySource(KeyHolder.FILE, str(tmp_path / name))

    return made


@pytest.fixture(params=["clear", "encrypted", "several keys"])
def made(
    request: pytest.FixtureRequest, tmp_path: Path, new_key: NewKey
) -> tuple[Path, KeySource | None, Manifest]:
    """A store, what opens it, and its checkpoint."""
    key = None if request.param == "clear" else new_key("key")
    path = tmp_path / "store"
    with create_store(str(path), key) as store:
        manifest = save(store, RAM)
        if request.param == "several keys":
            add_key(store.opened.backend, key, new_key("other"), "other")
    return path, key, manifest


def test_one_bit_anywhere_in_a_copy_loses_nothing_and_check_writes_it_anew(
    made: tuple[Path, KeySource | None, Manifest],
) -> None:
    path, key, manifest = made
    right = (path / NAMES[0]).read_bytes()
    chosen = Random(1)
    for round_ in range(30):
        name = NAMES[round_ % 3]
        flipped = bytearray(right)
        flipped[chosen.randrange(len(right))] ^= 1 << chosen.randrange(8)
        (path / name).write_bytes(flipped)
        with open_store(str(path), key) as store:
            assert store.manifests() == [manifest]
            [finding] = check(store).findings
            assert finding.name == name
            assert "rewritten" in finding.why
            assert check(store).whole
        assert [(path / one).read_bytes() for one in NAMES] == [right] * 3


def test_any_one_copy_opens_it(made: tuple[Path, KeySource | None, Manifest]) -> None:
    path, key, manifest = made
    right = (path / NAMES[0]).read_bytes()
    for kept in NAMES:
        for name in NAMES:
            if name != kept:
                (path / name).unlink()
        with open_store(str(path), key) as store:
            require_same(store, manifest, RAM)
            check(store)
            assert check(store).whole
        assert [(path / one).read_bytes() for one in NAMES] == [right] * 3


def test_no_copy_at_all_is_damage_and_never_a_new_store(
    made: tuple[Path, KeySource | None, Manifest],
) -> None:
    path, key, _ = made
    (path / NAMES[0]).unlink()
    shutil.rmtree(path / "config")
    with pytest.raises(DamagedError, match="is missing") as missing:
        open_store(str(path), key)
    assert "key import" in missing.value.remedy
    with pytest.raises(RefusedError, match="had a store"):
        create_store(str(path), key)


@pytest.mark.parametrize("on_paper", [False, True])
def test_a_backup_brings_it_back(
    made: tuple[Path, KeySource | None, Manifest], on_paper: bool
) -> None:
    path, key, manifest = made
    backend = LocalBackend(path)
    text = backup_text(read_config(backend), on_paper=on_paper)
    if on_paper:
        # As a person types it.
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        text = "\n".join(f"  {line.lower()} " for line in lines)
    for name in NAMES:
        (path / name).unlink()
    restore_backup(backend, parse_backup(text), key, replace=False)
    with open_store(str(path), key) as store:
        require_same(store, manifest, RAM)
        assert check(store).whole


def test_a_backup_of_an_encrypted_store_does_not_hold_its_secret(
    tmp_path: Path, new_key: NewKey
) -> None:
    with create_store(str(tmp_path / "store"), new_key("key")) as store:
        for on_paper in (False, True):
            text = backup_text(store.config, on_paper=on_paper)
            assert store.opened.secret.hex() not in text
        other = parse_backup(text)
    with pytest.raises(RefusedError, match="does not open"):
        restore_backup(LocalBackend(tmp_path / "store"), other, new_key("wrong"), replace=True)


def test_a_backup_goes_to_its_own_store_alone(tmp_path: Path, new_key: NewKey) -> None:
    key = new_key("key")
    with (
        create_store(str(tmp_path / "one"), key) as one,
        create_store(str(tmp_path / "two")) as two,
    ):
        save(one, RAM)
        save(two, RAM)
        with pytest.raises(RefusedError, match="is not of the store"):
            restore_backup(two.opened.backend, one.config, key, replace=True)
        before = one.config
        rotate_key(one.opened.backend, key, new_key("new"), "")
        with pytest.raises(RefusedError, match="has an intact file"):
            restore_backup(one.opened.backend, before, key, replace=False)
        restore_backup(one.opened.backend, before, key, replace=True)
        assert read_config(one.opened.backend) == before


@pytest.mark.parametrize("failing", NAMES)
def test_a_backup_that_is_put_back_in_part_is_not_undone_by_a_check(
    tmp_path: Path, new_key: NewKey, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    """The check wrote the later list of keys over it, and the key that had just opened it did so
    no more.
    """
    path, key, later = tmp_path / "store", new_key("key"), new_key("later")
    with create_store(str(path), key) as store:
        save(store, RAM)
        backup = store.config
    backend = LocalBackend(path)
    rotate_key(backend, key, later, "")
    write = config.write_copy

    def written(backend: LocalBackend, name: str, new: config.Config) -> None:
        if name == failing:
            raise StorageError(f"cannot write {name}", why="no space", remedy="make room")
        write(backend, name, new)

    monkeypatch.setattr(config, "write_copy", written)
    monkeypatch.setattr(keyring, "write_copy", written)
    with suppress(StorageError):
        restore_backup(backend, backup, key, replace=True)
    monkeypatch.undo()
    opens = key if read_config(backend) == backup else later
    for _ in range(2):
        with open_store(str(path), opens) as store:
            check(store)


@pytest.mark.parametrize("change", ["a line is gone", "a letter is another", "lines swapped", ""])
def test_a_mistyped_backup_says_which_line(tmp_path: Path, change: str) -> None:
    with create_store(str(tmp_path / "store")) as store:
        text = backup_text(store.config, on_paper=True)
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    if change == "a line is gone":
        del lines[-1]
    elif change == "lines swapped":
        lines[1], lines[2] = lines[2], lines[1]
    elif change:
        lines[2] = lines[2].replace(lines[2][4], "7" if lines[2][4] != "7" else "A", 1)
    else:
        lines = ["nothing of the kind"]
    with pytest.raises(UsageError, match="cannot be read"):
        parse_backup("\n".join(lines))


def test_keys_come_and_go_and_no_data_are_written(tmp_path: Path, new_key: NewKey) -> None:
    path = tmp_path / "store"
    first, second, third = (
        new_key("1"),
        new_key("2"),
        KeySource(KeyHolder.COMMAND, "echo 'a phrase'"),
    )
    with create_store(str(path), first) as store:
        manifest = save(store, RAM)
    backend = LocalBackend(path)
    before = {one: one.stat().st_mtime_ns for one in path.rglob("packs/[0-9a-f]*")}
    add_key(backend, first, second, "the second")
    add_key(backend, second, third, "a passphrase")
    for key in (first, second, third):
        with open_store(str(path), key) as store:
            require_same(store, manifest, RAM)
            assert check(store).whole
    kinds = [(one.kind, one.name) for one in keys_of(read_config(backend))]
    assert kinds == [("key", ""), ("key", "the second"), ("passphrase", "a passphrase")]
    remove_key(backend, third, keys_of(read_config(backend))[0].id)
    with pytest.raises(RefusedError, match="does not open"):
        open_store(str(path), first)
    fourth = new_key("4")
    rotate_key(backend, second, fourth, "")
    with pytest.raises(RefusedError, match="does not open"):
        open_store(str(path), second)
    with open_store(str(path), fourth) as store:
        require_same(store, manifest, RAM)
        require_same(store, save(store, RAM), RAM)
    assert read_config(backend).revision == 4
    assert (
        before.items()
        <= {one: one.stat().st_mtime_ns for one in path.rglob("packs/[0-9a-f]*")}.items()
    )


def test_the_key_that_is_given_is_not_removed_nor_one_that_is_not_there(
    tmp_path: Path, new_key: NewKey
) -> None:
    key = new_key("key")
    with create_store(str(tmp_path / "store"), key) as store:
        backend = store.opened.backend
        [only] = keys_of(store.config)
        with pytest.raises(RefusedError, match="is not removed"):
            remove_key(backend, key, only.id)
        with pytest.raises(NotFoundError, match="no key"):
            remove_key(backend, key, "00000000")
        # A command that prints something else each time would open nothing.
        unsteady = KeySource(KeyHolder.COMMAND, "date +%N")
        with pytest.raises(RefusedError, match="does not open"):
            rotate_key(backend, key, unsteady, "")
    with (
        create_store(str(tmp_path / "clear")) as store,
        pytest.raises(RefusedError, match="no keys"),
    ):
        add_key(store.opened.backend, None, key, "")


def test_an_exported_file_has_all_the_keys(tmp_path: Path, new_key: NewKey) -> None:
    first, second = new_key("1"), new_key("2")
    with create_store(str(tmp_path / "store"), first) as store:
        manifest = save(store, RAM)
        add_key(store.opened.backend, first, second, "")
    with (
        open_store(str(tmp_path / "store"), first) as store,
        new_archive(tmp_path / "file", store) as archive,
    ):
        copy_checkpoints(store, archive, [manifest])
    for key in (first, second):
        with open_store(str(tmp_path / "file"), key) as archive:
            require_same(archive, manifest, RAM)
            assert check(archive).whole


def test_a_killed_change_of_keys_leaves_one_or_the_other(tmp_path: Path, new_key: NewKey) -> None:
    first, second = new_key("1"), new_key("2")
    path = tmp_path / "store"
    with create_store(str(path), first) as store:
        old, backend = store.config, store.opened.backend
        rotate_key(backend, first, second, "")
        new = read_config(backend)
    for written in range(4):
        for number, name in enumerate(NAMES):
            write_copy(backend, name, new if number < written else old)
        key = second if written else first
        with open_store(str(path), key) as store:
            check(store)
            assert check(store).whole
        assert read_config(backend) == (new if written else old)
        assert len({(path / name).read_bytes() for name in NAMES}) == 1


def test_check_of_a_store_that_was_opened_before_its_keys_changed_keeps_the_change(
    tmp_path: Path, new_key: NewKey
) -> None:
    first, second = new_key("1"), new_key("2")
    with create_store(str(tmp_path / "store"), first) as store:
        rotate_key(store.opened.backend, first, second, "")
        changed = read_config(store.opened.backend)
        assert check(store).whole
        assert read_config(store.opened.backend) == changed


@pytest.mark.parametrize(
    "change",
    [
        {"scrypt": {"n": 1 << 30, "r": 8, "p": 1}},
        {"scrypt": {"n": -2, "r": 8, "p": 1}},
        {"scrypt": 7},
        {"salt": 12},
        {"nonce": "00"},
        {"secret": "xy"},
        {"kind": "several"},
        {"kind": None},
    ],
)
def test_a_config_that_makes_no_sense_is_damage(tmp_path: Path, change: dict[str, object]) -> None:
    path, phrase = tmp_path / "store", KeySource(KeyHolder.COMMAND, "echo phrase")
    create_store(str(path), phrase).close()
    config = read_config(LocalBackend(path))
    config.key.update(change)
    for name in NAMES:
        (path / name).write_bytes(config.encode())
    with pytest.raises(StorageError, match="damaged"):
        open_store(str(path), phrase)


def test_a_store_of_format_1_gets_its_copies_by_check(tmp_path: Path) -> None:
    with create_store(str(tmp_path / "store")) as store:
        shutil.rmtree(tmp_path / "store" / "config")  # as older versions made them
        assert check(store).whole
    assert all((tmp_path / "store" / name).exists() for name in NAMES)


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path / "state"))
    location, one, two = str(tmp_path / "store"), str(tmp_path / "one"), str(tmp_path / "two")

    def run(*words: str, code: int = 0) -> dict[str, object]:
        command = [sys.executable, "-m", "vmckpt.cli.entry", "store", *words, "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        answer: dict[str, object] = json.loads(done.stdout)
        return answer

    at = ("--store", location)
    run("init", location, "--key-file", one)
    run("key", "export", str(tmp_path / "backup"), *at)
    added = run("key", "add", *at, "--key-file", one, "--new-key-file", two, "--name", "second")
    assert run("info", location, "--key-file", two)["keys"] == 2
    run("key", "remove", str(added["id"]), *at, "--key-file", two, code=4)
    run("key", "rotate", *at, "--key-file", one, "--new-key-command", "echo phrase")
    run("info", location, "--key-file", one, code=4)
    # The backup is of before: it is put back only on purpose, and then remembered.
    run("key", "import", str(tmp_path / "backup"), *at, "--key-file", one, code=4)
    run("key", "import", str(tmp_path / "backup"), *at, "--key-file", one, "--replace")
    assert run("check", location, "--key-file", one)["whole"]


def test_a_change_that_fails_at_its_last_step_leaves_the_only_copy(
    tmp_path: Path, new_key: NewKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that an older vmckpt made has one copy, and it alone has the wrapped secret."""
    path, key, other = tmp_path / "store", new_key("key"), new_key("other")
    with create_store(str(path), key) as store:
        manifest = save(store, RAM)
    for name in NAMES[1:]:
        (path / name).unlink()

    def failing(folder: Path) -> None:
        if folder == path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync_directory(folder)

    with monkeypatch.context() as broken:
        broken.setattr(local, "sync_directory", failing)
        with pytest.raises(StorageError):
            add_key(LocalBackend(path), key, other, "other")
    with open_store(str(path), key) as store:
        require_same(store, manifest, RAM)


def test_one_damaged_header_does_not_make_a_backup_another_stores(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with create_store(str(path)) as store:
        config = store.config
        for seed in range(3):
            save(store, memory(16, seed))
    for name in NAMES:
        (path / name).unlink()
    first = min((path / "checkpoints").glob("[0-9a-f]*"))
    data = bytearray(first.read_bytes())
    data[20] ^= 1
    first.write_bytes(data)
    restore_backup(LocalBackend(path), config, None, replace=False)
    assert read_config(LocalBackend(path)) == config


@pytest.mark.parametrize("added", [10**30, -1, 1.5, "1", 10**12])
def test_a_key_of_no_date_is_damage_and_ends_no_list(
    tmp_path: Path, new_key: NewKey, added: object
) -> None:
    with create_store(str(tmp_path / "store"), new_key("key")) as store:
        config = store.config
    hostile = Config(config.id, 1, {**config.key, "added_unix_s": added}, config.format)
    with pytest.raises(DamagedError):
        keys_of(hostile)


def test_a_new_keys_file_outlasts_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store is encrypted with it from then on: the name has to be on the disk, too."""
    synced: list[str] = []

    def noted(fd: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{fd}").readlink()))

    monkeypatch.setattr(os, "fsync", noted)
    make_key_file(tmp_path / "key")
    assert synced == [str(tmp_path / "key"), str(tmp_path)]


def test_directories_that_are_made_for_a_store_outlast_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = set[Path]()

    def noted(folder: Path) -> None:
        synced.add(folder)

    monkeypatch.setattr(local, "sync_directory", noted)
    LocalBackend(tmp_path / "a/b/store").folder("tmp/x")
    assert synced == {tmp_path, tmp_path / "a", tmp_path / "a/b", tmp_path / "a/b/store"}
