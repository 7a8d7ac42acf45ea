"""Change the keys of a store without rewriting its data; copies and backups of its config.

Only the wrapped secret changes, so a change takes a second however large the store is. Concurrent
changes wait for each other (the lock "config").
"""

import base64
import dataclasses
import hashlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from vmckpt.errors import NotFoundError, RefusedError, UsageError, VmckptError
from vmckpt.store.backends.backend import Backend
from vmckpt.store.bundles.layout import BUNDLES
from vmckpt.store.errors import DamagedError
from vmckpt.store.files.checkpoint_file import CHECKPOINTS
from vmckpt.store.files.config import (
    CONFIG,
    MERGED,
    NAMES,
    Config,
    copies,
    parse_config,
    read_config,
    replace_config,
    write_copy,
)
from vmckpt.store.files.header import HEADER_BYTES, MAGIC
from vmckpt.store.files.pack import PACKS
from vmckpt.store.sealing.keys import KeySource
from vmckpt.store.sealing.wrapping import (
    MOST_KEYS,
    Opening,
    Wrapped,
    is_signed,
    keys_of,
    unwrap,
    with_keys,
    wrap,
)
from vmckpt.store.store import Store

PATIENCE_S = 10.0
_LONGEST_NAME = 40
_TITLE = "vmckpt store backup 1"
_LINE_BYTES = 20
_MOST_BYTES = 64 << 10
# The number of objects of each kind whose headers are checked.
_HEADERS = 16


class Changed(NamedTuple):
    """The key that was added or removed; copies of the config that could not be written, and why.

    Until `check` writes those copies, they have the previous keys.
    """

    key: Wrapped
    old_copies: Mapping[str, str]


def _any(config: Config) -> None:
    """Accept any store."""


def add_key(
    backend: Backend,
    source: KeySource | None,
    new: KeySource,
    name: str,
    require: Callable[[Config], object] = _any,
) -> Changed:
    """Add a key to the store. `source` opens it now. Raises RefusedError, UsageError.

    `require` raises unless it is the store that is meant.
    """
    _require_name(name)
    return _changed(backend, (source, require), lambda keys, _, made: [*keys, made], new, name)


def rotate_key(
    backend: Backend,
    source: KeySource | None,
    new: KeySource,
    name: str,
    require: Callable[[Config], object] = _any,
) -> Changed:
    """Replace the key that opens the store now by a new one."""
    _require_name(name)

    def replaced(keys: Sequence[Wrapped], by: Wrapped, made: Wrapped) -> list[Wrapped]:
        return [*(one for one in keys if one != by), made]

    return _changed(backend, (source, require), replaced, new, name)


def remove_key(
    backend: Backend,
    source: KeySource | None,
    key_id: str,
    require: Callable[[Config], object] = _any,
) -> Changed:
    """Remove any key except the one that opens the store now.

    Raises NotFoundError, RefusedError.
    """
    with backend.hold("config", shared=False, wait_s=PATIENCE_S):
        config, opening = _opened(backend, source, require)
        keys = keys_of(config)
        gone = [one for one in keys if one.id == key_id]
        if not gone:
            raise NotFoundError(
                f"the store {backend.location} has no key {key_id}",
                why=f"its keys are {', '.join(one.id for one in keys)}",
                remedy="see `vmckpt store key list`",
            )
        if gone[0] == opening.by:
            raise RefusedError(
                f"key {key_id} is not removed",
                why="it is the key that was given: without another that works the store could "
                "no longer be opened",
                remedy="give another of its keys, or replace this one: vmckpt store key rotate",
            )
        left = [one for one in keys if one != gone[0]]
        return Changed(gone[0], replace_config(backend, with_keys(config, left, opening.secret)))


def restore_copies(store: Store) -> list[tuple[str, str]]:
    """Rewrite copies of the config that are wrong; returns what was wrong, by name.

    A store of an older version, with one copy, is not wrong. Raises StorageError.
    """
    backend = store.opened.backend
    try:
        with backend.hold("config", shared=False, wait_s=PATIENCE_S):
            return _compared(store, write=True)
    except VmckptError as exc:
        # Read-only: an exported file, or a read-only file system.
        wrong = _compared(store, write=False)
        return [(name, f"{why}; not rewritten: {exc.why}") for name, why in wrong]


def backup_text(config: Config, *, on_paper: bool) -> str:
    """The text from which `restore_backup` restores the config; `on_paper`: lines that you can
    type.
    """
    head = f"# {_TITLE}: store {config.id}\n"
    head += (
        "# One of the store's keys is needed beside this.\n"
        if config.is_encrypted
        else "# The store is not encrypted: this alone opens it.\n"
    )
    data = config.encode()
    if not on_paper:
        return head + data.decode()
    packed = zlib.compress(data, 9)
    lines = [
        _paper_line(number, packed[at : at + _LINE_BYTES])
        for number, at in enumerate(range(0, len(packed), _LINE_BYTES), start=1)
    ]
    return head + "\n".join(lines) + "\n"


def parse_backup(text: str) -> Config:
    """The config in a backup of either kind. Raises UsageError, DamagedError, RefusedError."""
    lines = [line.strip() for line in text[:_MOST_BYTES].splitlines()]
    lines = [line for line in lines if line and not line.startswith("#")]
    if lines and lines[0].startswith("{"):
        return parse_config("".join(f"{line}\n" for line in lines).encode(), "backup")
    packed = b"".join(_from_paper(number, line) for number, line in enumerate(lines, start=1))
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(packed, _MOST_BYTES)
    except zlib.error as exc:
        raise _bad_backup("lines are missing, or it is something else") from exc
    if not unpacker.eof:
        raise _bad_backup("its last lines are missing")
    return parse_config(data, "backup")


def restore_backup(
    backend: Backend, config: Config, source: KeySource | None, *, replace: bool
) -> None:
    """Restore a store's config from a backup.

    It must fit the objects in the store, and the key must open it. Raises RefusedError: it does
    not, or another intact config exists and `replace` is not given.
    """
    unwrap(config, source)
    with backend.hold("config", shared=False, wait_s=PATIENCE_S):
        _require_fits(backend, config)
        there = [one for one in copies(backend).values() if isinstance(one, Config)]
        if backend.names(BUNDLES) or any(one.format >= MERGED for one in there):
            # The backup may be older than the store's first bundle, which stays.
            config = dataclasses.replace(config, format=MERGED)
        other = next((one for one in there if one != config), None)
        if other is not None and not replace:
            raise RefusedError(
                f"the store {backend.location} has an intact file `{CONFIG}`",
                why="it differs from the backup: keys were changed since, or it was replaced",
                remedy="see `vmckpt store key list`; to overwrite it with the backup: --replace; "
                "then the keys of that time open the store",
            )
        # The copy that is read comes last: otherwise `check` would prefer a later one.
        for name in reversed(NAMES):
            write_copy(backend, name, config)


def _changed(
    backend: Backend,
    opens: tuple[KeySource | None, Callable[[Config], object]],
    change: Callable[[Sequence[Wrapped], Wrapped, Wrapped], list[Wrapped]],
    new: KeySource,
    name: str,
) -> Changed:
    with backend.hold("config", shared=False, wait_s=PATIENCE_S):
        config, opening = _opened(backend, *opens)
        keys = keys_of(config)
        made = wrap(opening.secret, new, name)
        changed = change(keys, opening.by or made, made)
        if len(changed) > MOST_KEYS:
            raise RefusedError(
                f"the store {backend.location} has {len(keys)} keys",
                why=f"{MOST_KEYS} are the most",
                remedy="remove one: vmckpt store key rm",
            )
        after = with_keys(config, changed, opening.secret)
        # Detects a key command with varying output before the change takes effect.
        unwrap(after, new)
        return Changed(made, replace_config(backend, after))


def _opened(
    backend: Backend, source: KeySource | None, require: Callable[[Config], object]
) -> tuple[Config, Opening]:
    config = read_config(backend)
    if not config.is_encrypted:
        raise RefusedError(
            f"the store {backend.location} has no keys",
            why="it is not encrypted, and what is in it would stay so",
            remedy="make an encrypted one and copy to it: vmckpt store init OTHER --key-file FILE, "
            "vmckpt store copy OTHER",
        )
    opening = unwrap(config, source)
    require(config)
    return config, opening


def _compared(store: Store, *, write: bool) -> list[tuple[str, str]]:
    backend, wrong = store.opened.backend, list[tuple[str, str]]()
    found = copies(backend)
    # Its keys may have been changed since it was opened.
    later = [
        one
        for one in found.values()
        if isinstance(one, Config)
        and one.age > store.config.age
        and one.id == store.config.id
        and is_signed(one, store.opened.secret)
    ]
    right = max([store.config, *later], key=lambda config: config.age)
    for name, one in found.items():
        if one == right:
            continue
        if one is None:
            why = "it is missing"
        else:
            why = (
                one.why if isinstance(one, DamagedError) else "it is not what the other copies are"
            )
        if write:
            write_copy(backend, name, right)
            why += "; rewritten from a whole copy"
        if one is not None or name == CONFIG:
            wrong.append((name, why))
    return wrong


def _require_fits(backend: Backend, config: Config) -> None:
    """An object's header says which store it belongs to, and whether it is encrypted.

    One that agrees is enough: another's header may be damaged.
    """
    wrong = ""
    for folder in (CHECKPOINTS, PACKS, BUNDLES):
        for name in sorted(backend.names(folder))[:_HEADERS]:
            head = backend.read(f"{folder}/{name}", 0, HEADER_BYTES)
            if len(head) < HEADER_BYTES or not head.startswith(MAGIC):
                continue
            if head[16:32] == bytes.fromhex(config.id) and bool(head[11]) == config.is_encrypted:
                return
            wrong = wrong or f"{folder}/{name} is of store {head[16:32].hex()}"
    if wrong:
        raise RefusedError(
            f"the backup is not of the store {backend.location}",
            why=f"{wrong}, the backup of store {config.id}",
            remedy="use the backup of that store",
        )


def _require_name(name: str) -> None:
    if len(name) > _LONGEST_NAME or not name.isprintable():
        raise UsageError(
            f"a key cannot be called {name!r}",
            why=f"a name has up to {_LONGEST_NAME} printable characters",
            remedy="choose another one",
        )


def _paper_line(number: int, data: bytes) -> str:
    words = base64.b32encode(data).decode().rstrip("=")
    groups = " ".join(words[at : at + 4] for at in range(0, len(words), 4))
    return f"{number:2d}: {groups} - {_line_sum(number, data)}"


def _from_paper(number: int, line: str) -> bytes:
    reply, _, rest = line.partition(":")
    words, _, checksum = rest.rpartition("-")
    text = "".join(words.split()).upper()
    try:
        data = base64.b32decode(text + "=" * (-len(text) % 8))
        right = int(reply) == number and _line_sum(number, data) == checksum.strip().lower()
    except ValueError as exc:
        raise _bad_backup(f"line {number} is not as it was printed") from exc
    if not right:
        raise _bad_backup(f"line {number} is not as it was printed")
    return data


def _line_sum(number: int, data: bytes) -> str:
    return hashlib.blake2b(bytes([number & 0xFF]) + data, digest_size=2).hexdigest()


def _bad_backup(why: str) -> UsageError:
    return UsageError(
        "the backup cannot be read",
        why=why,
        remedy="give what `vmckpt store key export` wrote, all lines of it",
    )
