"""A store's secret: unencrypted in its config, or wrapped by each of the store's keys.

What a key wraps (`Wrapped`) is the secret with which all data of the store is encrypted, so keys
can be added and removed without rewriting data. It also means that a former key's holder may still
have the secret: removing a key only withholds what the holder does not have yet (docs/store.md).

A config with the original keys from `init` has `Wrapped.to_json` as its `key`. After a change it
has {"kind": "several", "keys": [...], "revision": number, "mac": hex}. The mac, by a key from the
secret, covers the store's id, all its keys and the revision, so that only a holder of a key can
change the list.
"""

import hashlib
import json
import os
import time
from dataclasses import dataclass
from hmac import compare_digest
from typing import Any, NamedTuple, Self

from vmckpt.errors import RefusedError
from vmckpt.store.errors import DamagedError, damaged
from vmckpt.store.files.config import CLEAR, KEYS, ONE_KEY, SECRET_BYTES, SEVERAL, Config
from vmckpt.store.files.decoding import count
from vmckpt.store.files.manifest import LATEST_UNIX_S
from vmckpt.store.sealing import agent
from vmckpt.store.sealing.keys import (
    KEY_COMMAND,
    KEY_FILE,
    KeyHolder,
    KeySource,
    from_environment,
    is_made_by_us,
    material_of,
)
from vmckpt.store.sealing.seal import keyed_tag

MOST_KEYS = 16
_KEY, _PASSPHRASE, _AGENT = "key", "passphrase", "agent"
# 64 MiB and a quarter of a second: RFC 7914's numbers for interactive use, doubled twice.
_SCRYPT = {"n": 1 << 16, "r": 8, "p": 1}
_SCRYPT_MOST_BYTES = 256 << 20
_SALT_BYTES = 16
_NONCE_BYTES = 12
_TAG_BYTES = 16
_WHAT = b"vmckpt store secret"
_MAC_OF = b"vmckpt store keys"


@dataclass(frozen=True, slots=True)
class Wrapped:
    """The secret, encrypted by one of the store's keys. `agent_key`: a fingerprint, or empty."""

    kind: str
    salt: bytes
    nonce: bytes
    box: bytes
    scrypt: tuple[int, int, int] | None = None
    agent_key: str = ""
    name: str = ""
    added_unix_s: int = 0

    @property
    def id(self) -> str:
        """Its id in commands."""
        return hashlib.blake2b(self.box, digest_size=4).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """The config's representation."""
        words: dict[str, Any] = {
            "kind": self.kind,
            "salt": self.salt.hex(),
            "nonce": self.nonce.hex(),
            "secret": self.box.hex(),
        }
        if self.scrypt:
            words["scrypt"] = dict(zip("nrp", self.scrypt, strict=True))
        if self.agent_key:
            words["key"] = self.agent_key
        if self.name:
            words["name"] = self.name
        if self.added_unix_s:
            words["added_unix_s"] = self.added_unix_s
        return words

    @classmethod
    def from_json(cls, words: Any) -> Self:
        """Raises DamagedError."""
        try:
            scrypt = words.get("scrypt")
            made = cls(
                str(words["kind"]),
                bytes.fromhex(words["salt"]),
                bytes.fromhex(words["nonce"]),
                bytes.fromhex(words["secret"]),
                None if scrypt is None else (scrypt["n"], scrypt["r"], scrypt["p"]),
                str(words.get("key", "")),
                str(words.get("name", "")),
                _date(words.get("added_unix_s", 0)),
            )
        except (KeyError, ValueError, TypeError, AttributeError) as exc:
            raise damaged("the store's config is damaged", f"one of its keys: {exc!r}") from exc
        sizes = len(made.salt), len(made.nonce), len(made.box)
        if (
            made.kind not in (_KEY, _PASSPHRASE, _AGENT)
            or sizes != (_SALT_BYTES, _NONCE_BYTES, SECRET_BYTES + _TAG_BYTES)
            or (made.kind == _PASSPHRASE) != (made.scrypt is not None)
            or (made.scrypt and not _is_affordable(made.scrypt))
        ):
            raise damaged("the store's config is damaged", "one of its keys is malformed")
        return made


class Opening(NamedTuple):
    """A store's secret, and the key that unwrapped it; None: unencrypted."""

    secret: bytes
    by: Wrapped | None


def clear(secret: bytes) -> dict[str, Any]:
    """The config's `key` entry for an unencrypted store."""
    return {"kind": CLEAR, "secret": secret.hex()}


def wrap(secret: bytes, source: KeySource, name: str = "") -> Wrapped:
    """Wrap the secret with one more key. Raises VmckptError if that is not available."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    salt, nonce = os.urandom(_SALT_BYTES), os.urandom(_NONCE_BYTES)
    scrypt, agent_key = None, ""
    if source.keeper is KeyHolder.AGENT:
        kind, agent_key = _AGENT, source.where or agent.first_key()
        wrapping = _agent_key(agent_key, salt)
    else:
        material = material_of(source)
        kind = _KEY if is_made_by_us(material) else _PASSPHRASE
        scrypt = None if kind == _KEY else (_SCRYPT["n"], _SCRYPT["r"], _SCRYPT["p"])
        wrapping = _wrapping_key(material, salt, scrypt)
    box = AESGCM(wrapping).encrypt(nonce, secret, _WHAT)
    return Wrapped(kind, salt, nonce, box, scrypt, agent_key, name, int(time.time()))


def keys_of(config: Config) -> list[Wrapped]:
    """The keys of an encrypted store; empty for an unencrypted one. Raises DamagedError."""
    if not config.is_encrypted:
        return []
    if not config.has_several_keys:
        return [Wrapped.from_json(config.key)]
    words = config.key.get("keys")
    if not isinstance(words, list) or not 0 < len(words) <= MOST_KEYS:
        raise damaged("the store's config is damaged", "it has no keys, or too many")
    return [Wrapped.from_json(one) for one in words]


def with_keys(config: Config, keys: list[Wrapped], secret: bytes) -> Config:
    """The next revision of the config, with these keys."""
    words = {
        "kind": SEVERAL,
        "keys": [one.to_json() for one in keys],
        "revision": config.revision + 1,
    }
    format_ = max(config.format, KEYS)
    return _signed(Config(config.id, config.created_unix_s, words, format_), secret)


def renamed(config: Config, store_id: str, created_unix_s: int, secret: bytes) -> Config:
    """The same keys, for another store with the same secret and no bundles yet."""
    format_ = KEYS if config.has_several_keys else ONE_KEY
    made = Config(store_id, created_unix_s, dict(config.key), format_)
    return _signed(made, secret) if made.has_several_keys else made


def unwrap(config: Config, source: KeySource | None) -> Opening:
    """Unwrap the store's secret.

    Raises RefusedError (no key, or a wrong one), NotFoundError, StorageError, DamagedError.
    """
    if not config.is_encrypted:
        try:
            secret = bytes.fromhex(config.key["secret"])
        except (KeyError, ValueError, TypeError) as exc:
            raise damaged("the store's config is damaged", f"its secret: {exc!r}") from exc
        if len(secret) != SECRET_BYTES:
            raise damaged("the store's config is damaged", "its secret has another size")
        return Opening(secret, None)
    keys = keys_of(config)
    found = _by_agent(keys) if all(one.kind == _AGENT for one in keys) else _tried(keys, source)
    if not is_signed(config, found.secret):
        raise DamagedError(
            "the store's config is damaged",
            why="its list of keys is not what a holder of a key wrote",
            remedy="restore it: vmckpt store key import FILE",
        )
    return found


def is_signed(config: Config, secret: bytes) -> bool:
    """Whether a holder of the secret wrote its list of keys. Raises DamagedError."""
    return not config.has_several_keys or compare_digest(_mac(config, secret), _said_mac(config))


def _tried(keys: list[Wrapped], source: KeySource | None) -> Opening:
    source = source or from_environment()
    if source is None or source.keeper is KeyHolder.AGENT:
        if any(one.kind == _AGENT for one in keys):
            return _by_agent(keys)
        raise RefusedError(
            "the store is encrypted",
            why="no key was given",
            remedy="add --key-file or --key-command (--target-key-... for a destination), or set "
            f"{KEY_FILE} or {KEY_COMMAND}",
        )
    material = material_of(source)
    kind = _KEY if is_made_by_us(material) else _PASSPHRASE
    for one in keys:
        if one.kind == kind:
            secret = _opened(one, _wrapping_key(material, one.salt, one.scrypt))
            if secret is not None:
                return Opening(secret, one)
    raise RefusedError(
        "the key does not open the store",
        why=f"it is none of the store's keys ({source.keeper})",
        remedy="give the right one; without it nothing in the store can be read",
    )


def _by_agent(keys: list[Wrapped]) -> Opening:
    """Unwrap with the first key that ssh-agent has."""
    tried = [one for one in keys if one.kind == _AGENT]
    there = set(agent.fingerprints())
    for one in [key for key in tried if key.agent_key in there]:
        secret = _opened(one, _agent_key(one.agent_key, one.salt))
        if secret is not None:
            return Opening(secret, one)
    # Raises the error that names the key missing in the agent.
    agent.signature(tried[0].agent_key, _WHAT + tried[0].salt)
    raise RefusedError(
        "the key does not open the store",
        why=f"it is none of the store's keys ({KeyHolder.AGENT})",
        remedy="add the right one with ssh-add; without it nothing in the store can be read",
    )


def _opened(wrapped: Wrapped, key: bytes) -> bytes | None:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    try:
        return AESGCM(key).decrypt(wrapped.nonce, wrapped.box, _WHAT)
    except InvalidTag:
        return None


def _agent_key(fingerprint: str, salt: bytes) -> bytes:
    return _hkdf(agent.signature(fingerprint, _WHAT + salt), salt)


def _wrapping_key(material: bytes, salt: bytes, scrypt: tuple[int, int, int] | None) -> bytes:
    if scrypt is None:
        return _hkdf(material, salt)
    n, r, p = scrypt
    return hashlib.scrypt(material, salt=salt, n=n, r=r, p=p, maxmem=_SCRYPT_MOST_BYTES, dklen=32)


def _date(unix_s: Any) -> int:
    """Validate a date from an untrusted config. Raises ValueError."""
    return count(unix_s, int(LATEST_UNIX_S))


def _is_affordable(scrypt: tuple[int, int, int]) -> bool:
    """A config is data: it must not choose how long this takes."""
    n, r, p = scrypt
    if not all(type(number) is int and number > 0 for number in scrypt):
        return False
    return n > 1 and n & (n - 1) == 0 and 128 * n * r < _SCRYPT_MOST_BYTES // 2 and p <= 16


def _hkdf(material: bytes, salt: bytes) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(algorithm=SHA256(), length=32, salt=salt, info=_WHAT).derive(material)


def _signed(config: Config, secret: bytes) -> Config:
    words = {name: word for name, word in config.key.items() if name != "mac"}
    unsigned = Config(config.id, config.created_unix_s, words, config.format)
    words = words | {"mac": _mac(unsigned, secret).hex()}
    return Config(config.id, config.created_unix_s, words, config.format)


def _mac(config: Config, secret: bytes) -> bytes:
    words = {name: word for name, word in config.key.items() if name != "mac"}
    covered = json.dumps([config.id, config.created_unix_s, words], sort_keys=True).encode()
    return keyed_tag(secret, _MAC_OF, covered)


def _said_mac(config: Config) -> bytes:
    try:
        return bytes.fromhex(config.key["mac"])
    except (KeyError, ValueError, TypeError) as exc:
        raise damaged("the store's config is damaged", f"its mac: {exc!r}") from exc
