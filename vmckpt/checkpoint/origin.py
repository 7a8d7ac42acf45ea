"""Tell this site's checkpoints from foreign ones, by a MAC with the site's key.

A checkpoint's facts become a QEMU command line, so they are trusted only if this site wrote them.
The operator keeps the key (`STATE/site.key`) and gives the service that takes a checkpoint a key
derived from it, for that run and VM. A checkpoint without this site's mark is foreign: imported,
taken by another site, or by a vmckpt that made no marks.
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
# Not covered by the mark: the mark itself, and the name, which a store may change.
_UNMARKED = ("origin", "name")
_KEY_BYTES, _NONCE_BYTES = 32, 16
# Prefix of nonces whose keys are bound to one VM.
_OF_VM = "vm-"


def run_key(state_dir: Path, vm: str) -> str:
    """A key with which a service marks checkpoints of this VM, and of no other.

    Blocking. Raises StorageError.
    """
    nonce = f"{_OF_VM}{secrets.token_hex(_NONCE_BYTES)}"
    return f"{nonce}:{_derived(_site_key(state_dir, make=True), nonce, vm)}"


def marked(facts: dict[str, Any], key: str, checkpoint_id: str, vm: str) -> dict[str, Any]:
    """The facts with their mark; unchanged without a key. Pure."""
    if not key:
        return facts
    nonce, _, secret = key.partition(":")
    words = json.loads(json.dumps(facts))
    return {**facts, "origin": {"nonce": nonce, "mark": _mark(secret, words, checkpoint_id, vm)}}


def is_own(state_dir: Path, manifest: Manifest) -> bool:
    """Whether this site took it. Blocking. Raises StorageError if the key cannot be read."""
    origin = manifest.facts.get("origin")
    key = _site_key(state_dir, make=False)
    if key is None or not isinstance(origin, dict):
        return False
    nonce, mark = origin.get("nonce"), origin.get("mark")
    if not isinstance(nonce, str) or not isinstance(mark, str):
        return False
    if not (nonce.isascii() and mark.isascii()):  # a lone surrogate cannot be encoded
        return False
    expected = _mark(_derived(key, nonce, manifest.vm), manifest.facts, manifest.id, manifest.vm)
    return hmac.compare_digest(expected.encode(), mark.encode())


def digest(manifest: Manifest) -> str:
    """Identifies what was inspected, so that nothing else is restored instead. Pure."""
    words = [manifest.id, manifest.vm, dict(manifest.facts)]
    return hashlib.sha256(_canonical(words)).hexdigest()


def _mark(secret: str, facts: Any, checkpoint_id: str, vm: str) -> str:
    words = {name: value for name, value in facts.items() if name not in _UNMARKED}
    text = _canonical([checkpoint_id, vm, words])
    return hmac.new(secret.encode(), text, hashlib.sha256).hexdigest()


def _derived(key: bytes | None, nonce: str, vm: str) -> str:
    # Older nonces gave keys that were valid for any VM.
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
            remedy="restore it from a backup, or remove it; checkpoints taken so far then become "
            "foreign, and need --trust for everything outside a VM's own directory",
        ) from exc


def _make(path: Path) -> None:
    """Create a key atomically; if two processes do so at once, the first one wins."""
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
