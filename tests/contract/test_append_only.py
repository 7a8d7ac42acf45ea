"""A client that may add checkpoints to a store, and remove or replace nothing there."""

import os
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.guest_like import dirtied, memory, require_same, save
from tests.lent_store import lent
from tests.sshd import SSHD, Sshd, sshd
from vmckpt.errors import (
    HostDownError,
    OutcomeUnknownError,
    RefusedError,
    StorageError,
    UsageError,
    VmckptError,
)
from vmckpt.store.backends.backend import Backend
from vmckpt.store.backends.lent import LentBackend, lend
from vmckpt.store.backends.local import LocalBackend
from vmckpt.store.backends.ssh import command
from vmckpt.store.check import check
from vmckpt.store.collect import collect, plan_gc
from vmckpt.store.files.config import NAMES
from vmckpt.store.files.pack import PackWriter
from vmckpt.store.keyring import rotate_key
from vmckpt.store.open import create_store, open_store
from vmckpt.store.sealing.keys import KeyHolder, KeySource, make_key_file
from vmckpt.store.store import Store
from vmckpt.store.transaction import Transaction

PAGES = 256


@pytest.fixture
def path(tmp_path: Path) -> Path:
    create_store(str(tmp_path / "store")).close()
    return tmp_path / "store"


def contents(path: Path) -> dict[str, bytes]:
    return {
        str(one.relative_to(path)): one.read_bytes() for one in path.rglob("*") if one.is_file()
    }


def put(backend: Backend, name: str, data: bytes) -> None:
    writer = backend.write(name)
    try:
        writer.write(data)
        writer.publish()
    finally:
        writer.discard()


def test_it_adds_checkpoints_and_reads_them(path: Path) -> None:
    with lent(path, append_only=True) as backend, open_store(backend) as store:
        ram = memory(PAGES, 1)
        first = save(store, ram)
        later, dirty = dirtied(ram, 40, 1)
        second = save(store, later, parent=first, dirty=dirty)
        require_same(store, first, ram)
        require_same(store, second, later)
        assert check(store).whole
    assert not LocalBackend(path).leftovers()


def test_nothing_that_is_there_is_removed_or_replaced(path: Path) -> None:
    with open_store(str(path)) as owner:
        manifest = save(owner, memory(PAGES, 1))
    before = contents(path)
    with lent(path, append_only=True) as backend:
        for name in before:
            if name == "lock":
                continue
            with pytest.raises(RefusedError, match="is not changed"):
                backend.remove(name)
            with pytest.raises(RefusedError, match="is not changed"):
                put(backend, name, b"another's")
        with open_store(backend) as store:
            attempts: list[Callable[[Store], object]] = [
                lambda store: store.remove([manifest.id]),
                lambda store: collect(store, plan_gc(store)),
            ]
            for attempt in attempts:
                try:
                    attempt(store)
                except RefusedError as exc:
                    assert "append-only" in exc.why
    assert contents(path) == before
    assert not LocalBackend(path).leftovers()


def test_keys_and_what_gc_says_are_not_added_to(path: Path) -> None:
    (path / NAMES[1]).unlink()
    with lent(path, append_only=True) as backend:
        for name in (NAMES[1], "config/9", "doomed/1-2"):
            with pytest.raises(RefusedError, match="is not changed"):
                put(backend, name, b"x")


def test_no_pack_is_added_in_the_place_of_another(path: Path) -> None:
    """A later generation of a pack would be read in its place, and gc would remove the older."""
    ram = memory(PAGES, 1)
    with open_store(str(path)) as owner:
        made = save(owner, ram)
    with lent(path, append_only=True) as backend, open_store(backend) as store:
        for pack_id in map(bytes.fromhex, made.packs):
            old = store.opened.packs.find(pack_id)
            size, slots = old.table.chunk_bytes, old.table.slot_count
            with pytest.raises(RefusedError, match="is not changed"):
                writer = PackWriter(store.opened.packs, pack_id, 1 << 40, size, store.opened.pool)
                another = os.urandom(size * slots)
                names = store.opened.sealer.hashes(memoryview(another), size)
                writer.add(another, names, np.arange(slots))
                writer.publish(slots)
    with open_store(str(path)) as owner:
        require_same(owner, made, ram)
        collect(owner, plan_gc(owner))
        require_same(owner, made, ram)


def test_a_damaged_copy_of_the_config_is_said_and_left_to_the_owner(path: Path) -> None:
    right = (path / NAMES[1]).read_bytes()
    (path / NAMES[1]).write_bytes(right[:-5])
    with lent(path, append_only=True) as backend, open_store(backend) as store:
        [finding] = check(store).findings
        assert finding.name == NAMES[1]
        assert "not rewritten" in finding.why
    with open_store(str(path)) as owner:
        assert len(check(owner).findings) == 1
    assert (path / NAMES[1]).read_bytes() == right


@pytest.mark.parametrize(
    "name",
    ["../outside", "/etc/passwd", "packs/../../outside", "packs/", "packs/.x", "tmp/x", "lock",
     "packs/a/b", "", "store/x", "other/x", "packs/x\n"],
)  # fmt: skip
def test_no_other_file_of_the_machine_is_reached(path: Path, name: str) -> None:
    (path.parent / "outside").write_text("secret")
    with lent(path, append_only=True) as backend:
        with pytest.raises(UsageError):
            backend.read(name)
        with pytest.raises(UsageError):
            backend.read_end(name, 10)
        with pytest.raises(UsageError):
            put(backend, name, b"x")
        with pytest.raises(UsageError):
            backend.names(name)
    assert (path.parent / "outside").read_text() == "secret"


def test_hostile_messages_end_their_connection_alone(path: Path) -> None:
    for words in (
        b"\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\x02\0\0\0\0\0\0\0{}",
        b"\x03\0\0\0\0\0\0\0nul",
        b"\x04\0\0\0\0\0\0\0null",
        b"\x02\0\0\0\0\0\0\0[]",
    ):
        near, far = socket.socketpair()
        near.sendall(words)
        near.shutdown(socket.SHUT_WR)
        lend(LocalBackend(path, append_only=True), far, append_only=True)
        near.close()
        far.close()
    with lent(path, append_only=True) as backend:
        for question in (
            ("read", "store", "x", None),
            ("read", "store", -1, 5),
            ("append", 99),
            ("publish", "x"),
            ("hold", "gc", "yes"),
            ("let_go", 7),
            ("names", 7),
            ("nonsense",),
        ):
            with pytest.raises(VmckptError):
                backend._ask(*question)
        # Memory is not taken for what is asked for.
        assert backend.read("store", 0, 1 << 60) == (path / "store").read_bytes()


@pytest.mark.parametrize(
    ("answer", "question"),
    [
        (b"null", "names"),
        (b"[]", "names"),
        (b"{}", "names"),
        (b'{"is": {"x": -1}}', "names"),
        (b'{"is": [1]}', "names"),
        (b'{"is": "x"}', "read_end"),
        (b'{"error": ["ClassVar", "a", "b", "c"]}', "names"),
        (b'{"error": ["__name__", "a", "b", "c"]}', "names"),
        (b'{"error": [1, 2, 3, 4]}', "names"),
        (b'{"missing": 7}', "names"),
        (b"{", "names"),
        (b"\xff", "names"),
    ],
)
def test_a_hostile_server_gives_a_typed_error(answer: bytes, question: str) -> None:
    near, far = socket.socketpair()
    far.sendall(struct.pack("<II", len(answer), 0) + answer)
    backend = LentBackend(near, "there:store")
    with far, pytest.raises(StorageError):
        backend.names("packs") if question == "names" else backend.read_end("packs/x", 1)
    near.close()


def test_a_checkpoint_that_fails_leaves_only_what_gc_of_the_owner_removes(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RefusedError("it fails", why="a test", remedy="-")

    with lent(path, append_only=True) as backend, open_store(backend) as store:
        first = save(store, memory(PAGES, 1))
        with monkeypatch.context() as patch:
            patch.setattr(Transaction, "_maps", fails)
            with pytest.raises(RefusedError, match="it fails"):
                save(store, memory(PAGES, 2))
        assert [one.id for one in store.manifests()] == [first.id]
        with monkeypatch.context() as patch:
            patch.setattr(Transaction, "_require_complete", fails)
            with pytest.raises(OutcomeUnknownError, match="may be in the store"):
                save(store, memory(PAGES, 3))
    with open_store(str(path)) as owner:
        assert plan_gc(owner).dead
        collect(owner, plan_gc(owner))
        assert not plan_gc(owner).dead
        assert check(owner).whole
        require_same(owner, first, memory(PAGES, 1))


@pytest.fixture
def server(short_path: Path) -> Iterator[Sshd]:
    if not Path(SSHD).exists():
        pytest.skip("there is no sshd")
    with sshd(short_path / "sshd") as made:
        yield made


def test_a_key_of_authorized_keys_adds_checkpoints_over_ssh_and_does_nothing_else(
    server: Sshd, short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_key_file(short_path / "key")
    key = KeySource(KeyHolder.FILE, str(short_path / "key"))
    create_store(str(short_path / "store"), key).close()
    public = server.key.with_suffix(".pub").read_text()
    # The directory that is asked for is not the client's choice.
    (server.directory / "authorized_keys").write_text(
        f'restrict,command="{server.vmckpt} lend --append-only {short_path}/store" {public}'
    )
    monkeypatch.setenv("VMCKPT_STORE_SSH", f"ssh -F {server.config}")
    location = f"ssh://127.0.0.1:{server.port}/elsewhere"
    ram = memory(PAGES, 1)
    with open_store(location, key) as store:
        manifest = save(store, ram)
        require_same(store, manifest, ram)
        assert check(store).whole
        with pytest.raises(RefusedError, match="is not changed"):
            store.remove([manifest.id])
        with pytest.raises(RefusedError, match="is not changed"):
            rotate_key(store.opened.backend, key, key, "")
    with open_store(str(short_path / "store"), key) as owner:
        require_same(owner, manifest, ram)
    assert not (short_path / "elsewhere").exists()
    (server.directory / "authorized_keys").write_text("")
    with pytest.raises(HostDownError, match="is not reached") as refused:
        open_store(location, key)
    assert "Permission denied" in refused.value.why


def test_what_ssh_is_told_is_a_host_and_no_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VMCKPT_STORE_SSH", raising=False)
    words = command("ssh://backup@vault.example:2222/srv/it's here")
    assert words[0] == "ssh"
    assert words[-5:] == [
        *("-p", "2222", "--", "backup@vault.example"),
        "vmckpt lend '/srv/it'\"'\"'s here'",
    ]
    for bad in ("ssh://-oProxyCommand=x/y", "ssh://h", "ssh://h o/y", "ssh://h:x/y", "ssh:///y"):
        with pytest.raises(UsageError):
            command(bad)
    assert os.environ.get("VMCKPT_STORE_SSH") is None
