"""Who keeps an encrypted store's key: a file, a command, ssh-agent."""

import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.guest_like import memory, require_same, save
from vmckpt.checkpoint.catalogue import location as location_module
from vmckpt.cli.nouns.store import key as store_key
from vmckpt.cli.nouns.store.store import init
from vmckpt.errors import NotFoundError, RefusedError, StorageError, UsageError
from vmckpt.store.check import check
from vmckpt.store.copying import copy_checkpoints
from vmckpt.store.open import create_store, new_archive, open_store
from vmckpt.store.sealing.agent import fingerprints
from vmckpt.store.sealing.keys import KeyHolder, KeySource, make_key_file

RAM = memory(64, 1)


@pytest.fixture
def key(tmp_path: Path) -> KeySource:
    make_key_file(tmp_path / "key")
    return KeySource(KeyHolder.FILE, str(tmp_path / "key"))


def test_nothing_of_the_guest_is_in_the_files(tmp_path: Path, key: KeySource) -> None:
    text = RAM[RAM.any(axis=1)][:, :60]
    with create_store(str(tmp_path / "store"), key) as store:
        manifest = save(store, RAM, vm="secret-name", name="secret-name")
        require_same(store, manifest, RAM)
    for path in (tmp_path / "store").rglob("*"):
        if path.is_file():
            assert b"secret-name" not in path.read_bytes()
            assert not any(row.tobytes() in path.read_bytes() for row in text)


def test_the_key_opens_it_and_no_other(tmp_path: Path, key: KeySource) -> None:
    location = str(tmp_path / "store")
    with create_store(location, key) as store:
        manifest = save(store, RAM)
    with open_store(location, key) as store:
        require_same(store, manifest, RAM)
    make_key_file(tmp_path / "other")
    with pytest.raises(RefusedError, match="does not open"):
        open_store(location, KeySource(KeyHolder.FILE, str(tmp_path / "other")))
    with pytest.raises(RefusedError, match="no key was given"):
        open_store(location)


def test_the_environment_names_the_key(
    tmp_path: Path, key: KeySource, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = str(tmp_path / "store")
    create_store(location, key).close()
    monkeypatch.setenv("VMCKPT_STORE_KEY_FILE", key.where)
    open_store(location).close()
    monkeypatch.delenv("VMCKPT_STORE_KEY_FILE")
    monkeypatch.setenv("VMCKPT_STORE_KEY_COMMAND", f"cat '{key.where}'")
    open_store(location).close()


def test_a_passphrase_will_do(tmp_path: Path) -> None:
    location, asked = str(tmp_path / "store"), KeySource(KeyHolder.COMMAND, "echo 'correct horse'")
    with create_store(location, asked) as store:
        assert store.config.key["kind"] == "passphrase"
    open_store(location, asked).close()
    with pytest.raises(RefusedError, match="does not open"):
        open_store(location, KeySource(KeyHolder.COMMAND, "echo 'wrong horse'"))


def test_a_key_file_is_its_owners_alone(tmp_path: Path, key: KeySource) -> None:
    path = Path(key.where)
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o640)
    with pytest.raises(RefusedError, match="others than its owner"):
        create_store(str(tmp_path / "store"), key)
    with pytest.raises(StorageError, match="exists"):
        make_key_file(path)


@pytest.mark.parametrize(
    ("source", "error", "why"),
    [
        (KeySource(KeyHolder.FILE, "/nowhere/key"), NotFoundError, "no key file"),
        (KeySource(KeyHolder.COMMAND, "ls /nowhere"), RefusedError, "No such file"),
        (KeySource(KeyHolder.COMMAND, "no-such-command"), RefusedError, "does not run"),
        (KeySource(KeyHolder.COMMAND, "'"), RefusedError, "quotation"),
        (KeySource(KeyHolder.COMMAND, "true"), UsageError, "is empty"),
    ],
)
def test_keys_that_are_not_had(
    source: KeySource, error: type[Exception], why: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=why):
        create_store(str(tmp_path / "store"), source)
    assert not (tmp_path / "store").exists()


def test_an_exported_file_is_encrypted_too_and_the_same_key_opens_it(
    tmp_path: Path, key: KeySource
) -> None:
    path = tmp_path / "exported"
    with create_store(str(tmp_path / "store"), key) as store:
        manifest = save(store, RAM, vm="secret-name")
        with new_archive(path, store) as archive:
            copy_checkpoints(store, archive, [manifest])
    assert b"secret-name" not in path.read_bytes()
    with pytest.raises(RefusedError, match="no key"):
        open_store(str(path))
    with open_store(str(path), key) as archive:
        require_same(archive, manifest, RAM)
        assert check(archive).whole


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A real ssh-agent without keys; a folder for them."""
    if shutil.which("ssh-agent") is None:
        pytest.skip("there is no ssh-agent")
    address = tmp_path / "agent"
    process = subprocess.Popen(
        ["ssh-agent", "-D", "-a", str(address)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    monkeypatch.setenv("SSH_AUTH_SOCK", str(address))
    try:
        yield tmp_path
    finally:
        process.kill()
        process.communicate()


def add(folder: Path, name: str, kind: str) -> None:
    path = folder / name
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-N", "", "-f", str(path)], check=True)
    subprocess.run(["ssh-add", "-q", str(path)], check=True)


@pytest.mark.parametrize(
    "answer",
    [b"", b"\0", b"\0\0\0\x01\x0c", b"\0\0\0\x05\x0c\0\0\0\x01", b"\0\0\1\0\x0c\0\0",
     b"\xff\xff\xff\xff\x0c", b"\0\0\0\x0d\x0c\0\0\0\x01\0\0\0\xffkeyx"],
)  # fmt: skip
def test_an_agent_that_answers_nonsense_is_said_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes
) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "agent"))
        listening.listen()

        def serve() -> None:
            connected, _ = listening.accept()
            with connected:
                connected.recv(64)
                connected.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        monkeypatch.setenv("SSH_AUTH_SOCK", str(tmp_path / "agent"))
        with pytest.raises(RefusedError, match="ssh-agent"):
            fingerprints()
        thread.join()


def test_ssh_agent_opens_it(agent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    location, source = str(agent / "store"), KeySource(KeyHolder.AGENT)
    with pytest.raises(NotFoundError, match="no Ed25519 key"):
        create_store(location, source)
    add(agent, "ecdsa", "ecdsa")
    with pytest.raises(NotFoundError, match="no Ed25519 key"):
        create_store(location, source)
    add(agent, "one", "ed25519")
    add(agent, "two", "ed25519")
    with create_store(location, source) as store:
        manifest = save(store, RAM)
    # No one has to say that it is the agent, nor which key.
    with open_store(location) as store:
        require_same(store, manifest, RAM)
    subprocess.run(["ssh-add", "-q", "-d", str(agent / "one")], check=True)
    with pytest.raises(NotFoundError, match="does not have the key"):
        open_store(location)
    monkeypatch.setenv("SSH_AUTH_SOCK", str(agent / "nobody"))
    with pytest.raises(RefusedError, match="does not answer"):
        open_store(location)
    monkeypatch.delenv("SSH_AUTH_SOCK")
    with pytest.raises(RefusedError, match="no ssh-agent"):
        open_store(location)


def test_the_key_of_a_store_that_is_there_stays_whatever_comes_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a full disk where the operator's side remembers it."""

    def full(*_: object) -> None:
        raise StorageError("cannot write stores/x.json", why="No space left", remedy="make room")

    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setattr(location_module, "require_as_known", full)
    with pytest.raises(StorageError):
        init(location=str(tmp_path / "store"), key_file=str(tmp_path / "new.key"))
    open_store(
        str(tmp_path / "store"), KeySource(KeyHolder.FILE, str(tmp_path / "new.key"))
    ).close()


def _as_an_older_vmckpt_has_made_it(at: Path) -> None:
    """With one copy of its config; where others are to be, a link leads nowhere."""
    shutil.rmtree(at / "config")
    (at / "config").symlink_to(at / "not-mounted")


def _goes_after_the_change(patch: pytest.MonkeyPatch) -> None:
    def gone(*_: object) -> None:
        raise NotFoundError("there is no store", why="it was unmounted", remedy="mount it")

    patch.setattr(store_key._Location, "remember", gone)


@pytest.mark.parametrize("is_link", [True, False])
@pytest.mark.parametrize("change", [store_key.rotate, store_key.add])
def test_a_key_that_opens_the_store_stays_whatever_comes_after(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[..., None],
    *,
    is_link: bool,
) -> None:
    """Its file was removed, as that of a refused key is, and nothing opened the store again."""
    at, old, new = tmp_path / "store", str(tmp_path / "old.key"), str(tmp_path / "new.key")
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path / "state"))
    init(location=str(at), key_file=old)
    if is_link:
        _as_an_older_vmckpt_has_made_it(at)
    else:
        _goes_after_the_change(monkeypatch)
    with nullcontext() if is_link else pytest.raises(NotFoundError):
        change(store=str(at), key_file=old, new_key_file=new)
    open_store(str(at), KeySource(KeyHolder.FILE, new)).close()
