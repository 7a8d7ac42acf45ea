"""ssh-agent as keeper of a store's key: it derives the key from an Ed25519 signature.

The protocol is draft-ietf-sshm-ssh-agent. Only Ed25519 is usable: RFC 8032's signatures depend only
on key and message, so they are the same each time.
"""

import os
import socket
import struct
from base64 import b64encode
from hashlib import sha256

from vmckpt.errors import NotFoundError, RefusedError

_REQUEST_IDENTITIES, _IDENTITIES, _SIGN, _SIGNATURE = 11, 12, 13, 14
_ED25519 = b"ssh-ed25519"
_TIMEOUT_S = 60.0
_LENGTH = struct.Struct(">I")
# The format of ssh-add and sshd.
_MOST_BYTES = 256 << 10


def fingerprint(key: bytes) -> str:
    """A public key's fingerprint, as `ssh-add -l` shows it."""
    return "SHA256:" + b64encode(sha256(key).digest()).decode().rstrip("=")


def first_key() -> str:
    """The fingerprint of the agent's first Ed25519 key. Raises NotFoundError, RefusedError."""
    for key in _keys():
        return fingerprint(key)
    raise NotFoundError(
        "ssh-agent has no Ed25519 key",
        why="only such a key signs the same thing the same way each time",
        remedy="add one: ssh-add ~/.ssh/id_ed25519",
    )


def fingerprints() -> list[str]:
    """The fingerprints of all its Ed25519 keys. Raises RefusedError."""
    return [fingerprint(key) for key in _keys()]


def signature(wanted: str, message: bytes) -> bytes:
    """Sign a message with the key of that fingerprint. Raises NotFoundError, RefusedError."""
    for key in _keys():
        if fingerprint(key) == wanted:
            answer = _ask(_SIGN, _string(key) + _string(message) + _LENGTH.pack(0), _SIGNATURE)
            kind, rest = _split(_split(answer)[0])
            if kind == _ED25519:
                return _split(rest)[0]
    raise NotFoundError(
        f"ssh-agent does not have the key {wanted}",
        why="the store was made with it",
        remedy="add it with ssh-add, or forward the agent that has it",
    )


def _keys() -> list[bytes]:
    answer = _ask(_REQUEST_IDENTITIES, b"", _IDENTITIES)
    if len(answer) < _LENGTH.size:
        raise _nonsense()
    (count,) = _LENGTH.unpack_from(answer)
    rest, found = answer[_LENGTH.size :], []
    for _ in range(count):
        key, rest = _split(rest)
        _, rest = _split(rest)  # the comment
        if _split(key)[0] == _ED25519:
            found.append(key)
    return found


def _ask(request: int, body: bytes, answer: int) -> bytes:
    path = os.environ.get("SSH_AUTH_SOCK")
    if not path:
        raise RefusedError(
            "there is no ssh-agent",
            why="SSH_AUTH_SOCK is not set",
            remedy="start one (eval $(ssh-agent)) and add the key with ssh-add",
        )
    try:
        with socket.socket(socket.AF_UNIX) as agent:
            agent.settimeout(_TIMEOUT_S)
            agent.connect(path)
            message = bytes([request]) + body
            agent.sendall(_LENGTH.pack(len(message)) + message)
            with agent.makefile("rb") as replies:
                (length,) = _LENGTH.unpack(replies.read(_LENGTH.size))
                reply = replies.read(length) if length <= _MOST_BYTES else b""
    except (OSError, struct.error) as exc:
        raise RefusedError(
            "ssh-agent does not answer", why=str(exc) or "it hung up", remedy=f"check {path}"
        ) from exc
    if len(reply) != length:
        raise _nonsense()
    if reply[:1] != bytes([answer]):
        raise RefusedError(
            "ssh-agent refuses", why="locked, or the use of the key was denied", remedy="ssh-add -X"
        )
    return reply[1:]


def _string(data: bytes) -> bytes:
    return _LENGTH.pack(len(data)) + data


def _split(data: bytes) -> tuple[bytes, bytes]:
    """The first string, and the rest."""
    length = _LENGTH.unpack_from(data)[0] if len(data) >= _LENGTH.size else len(data)
    end = _LENGTH.size + length
    if end > len(data):
        raise _nonsense()
    return data[_LENGTH.size : end], data[end:]


def _nonsense() -> RefusedError:
    return RefusedError("ssh-agent answers nonsense", why="its answer is cut", remedy="restart it")
