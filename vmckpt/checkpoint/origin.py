"""Whether a checkpoint was taken for this site: by a mark that only the site's key makes.

What a checkpoint says of itself becomes a command line of QEMU, so it counts only where this site
wrote it. The operator keeps the key (`STATE/site.key`) and gives the service that takes a
checkpoint one made from it, for that run and VM. A checkpoint without a mark of this site's is
foreign: imported, taken by another site, or by a vmckpt that made no marks.
"""

import hashlib
import hmac
import json
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

from vmckpt.errors import StorageError
from vmckpt.store.files.manifest import Manifest

KEY_FILE = "site.key"
# What is not marked: the mark, and the name, which a store may settle otherwise.
_UNMARKED = ("origin", "name")
_KEY_BYTES, _NONCE_BYTES = 32, 16
# Nonces whose keys mark one VM's checkpoints alone begin so.
_OF_VM = "vm-"


def run_key(state_dir: Path, vm: str) -> str:
    """What a service is given to mark a checkpoint of the VM with: others' it cannot mark.

    Blocking. Raises StorageError.
    """
    nonce = f"{_OF_VM}{secrets.token_hex(_NONCE_BYTES)}"
    return f"{nonce}:{_derived(_site_key(state_dir, make=True), nonce, vm)}"


def marked(facts: dict[str, Any], key: str, checkpoint_id: str, vm: str) -> dict[str, Any]:
    """The facts with their mark; without a key as they are. Pure."""
    if not key:
        return facts
    nonce, _, secret = key.partition(":")
    words = json.loads(json.dumps(facts))
    return {**facts, "origin": {"nonce": nonce, "mark": _mark(secret, words, checkpoint_id, vm)}}


def is_own(state_dir: Path, manifest: Manifest) -> bool:
    """Whether this site took it. Blocking. Raises StorageError: the key cannot be read."""
    origin = manifest.facts.get("origin")
    key = _site_key(state_dir, make=False)
    if key is None or not isinstance(origin, dict):
        return False
    nonce, mark = origin.get("nonce"), origin.get("mark")
    if not isinstance(nonce, str) or not isinstance(mark, str):
        return False
    if not (nonce.isascii() and mark.isascii()):  # half a surrogate pair has no bytes
        return False
    expected = _mark(_derived(key, nonce, manifest.vm), manifest.facts, manifest.id, manifest.vm)
    return hmac.compare_digest(expected.encode(), mark.encode())


def digest(manifest: Manifest) -> str:
    """What was looked at, so that nothing else is restored in its place. Pure."""
    words = [manifest.id, manifest.vm, dict(manifest.facts)]
    return hashlib.sha256(_canonical(words)).hexdigest()


def _mark(secret: str, facts: Any, checkpoint_id: str, vm: str) -> str:
    words = {name: value for name, value in facts.items() if name not in _UNMARKED}
    text = _canonical([checkpoint_id, vm, words])
    return hmac.new(secret.encode(), text, hashlib.sha256).hexdigest()


def _derived(key: bytes | None, nonce: str, vm: str) -> str:
    # Of an older vmckpt's nonces the keys were for any VM's.
    words = _canonical([nonce, vm]) if nonce.startswith(_OF_VM) else nonce.encode()
    return hmac.new(key or b"", words, hashlib.sha256).hexdigest()


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _site_key(state_dir: Path, *, make: bool) -> bytes | None:
    path = state_dir / KEY_FILE
    try:
        if make and not path.exists():
            _make(path)
        return bytes.fromhex(path.read_text().strip())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as exc:
        raise StorageError(
            f"cannot read {path}",
            why=str(exc),
            remedy="restore it from a backup, or remove it: then checkpoints taken so far are "
            "foreign, and need --trust for all that is not in a VM's own directory",
        ) from exc


def _make(path: Path) -> None:
    """A new key, whole or not at all, and the first one where two make it at once."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "w") as file:
            file.write(secrets.token_hex(_KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):
            os.link(part, path)
    finally:
        part.unlink()
