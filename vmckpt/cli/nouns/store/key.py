"""vmckpt store key: list, add, rm, rotate, export, import."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from vmckpt.cli.options.listing import ListOptions
from vmckpt.cli.options.stores import OneStore, StoreKey, key_of, location_of
from vmckpt.cli.options.together import together
from vmckpt.cli.output import Json, show

if TYPE_CHECKING:
    from vmckpt.store.files.config import Config
    from vmckpt.store.keyring import Changed
    from vmckpt.store.sealing.keys import KeySource
    from vmckpt.store.sealing.wrapping import Wrapped

app = typer.Typer(
    help="Keys of an encrypted store.\n\nThey can be changed without rewriting data, and "
    "backed up.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


class NewKey(NamedTuple):
    """A new key: one of them is given."""

    new_key_file: Annotated[
        str | None,
        typer.Option(
            "--new-key-file",
            help="File of the new key, created if it does not exist.",
            metavar="FILE",
        ),
    ] = None
    new_key_command: Annotated[
        str | None,
        typer.Option(
            "--new-key-command", help="Command that prints the new key.", metavar="COMMAND"
        ),
    ] = None
    new_key_agent: Annotated[
        bool,
        typer.Option("--new-key-agent", help="Use ssh-agent's first Ed25519 key as the new key."),
    ] = False


Name = Annotated[str, typer.Option("--name", help="Name of the new key.", metavar="NAME")]


@app.command("list")
@together
def list_(store: OneStore = None, *, listing: ListOptions) -> None:
    """List a store's keys. Needs no key."""
    from vmckpt.cli.nouns.store.opened import backend_of
    from vmckpt.store.files.config import read_config
    from vmckpt.store.sealing.wrapping import keys_of

    with backend_of(location_of(store)) as backend:
        config = read_config(backend)
    found = [_json(one) for one in keys_of(config)]
    rows = [[one["id"], one["kind"], one["name"] or "-", one["added"] or "-"] for one in found]
    facts = {"keys": found, "revision": config.revision}
    none = "the store is not encrypted: it has no keys"
    listing.layout().show(facts, ("id", "kind", "name", "added"), rows, none=none)


@app.command()
@together
def add(
    store: OneStore = None,
    *,
    key: StoreKey,
    new_key: NewKey,
    name: Name = "",
    json: Json = False,
) -> None:
    """Add a key to a store.

    Versions of vmckpt that support a single key refuse it afterwards.
    """
    from vmckpt.store.keyring import add_key

    new = _MadeKey(new_key)
    with new as source, _Location(store, key.source()) as at:
        done = add_key(at.backend, at.key, source, name, at.require)
        new.counts = True
        at.remember()
    _show(done, f"key {done.key.id} opens the store too{new.advice}", json)


@app.command()
@together
def rotate(
    store: OneStore = None,
    *,
    key: StoreKey,
    new_key: NewKey,
    name: Name = "",
    json: Json = False,
) -> None:
    """Replace the given key by a new one.

    Data is not rewritten. This does not revoke access from a person who could read the store's
    secret with the old key. To do so, create a new store (`store init`, `store copy`).
    """
    from vmckpt.store.keyring import rotate_key

    new = _MadeKey(new_key)
    with new as source, _Location(store, key.source()) as at:
        done = rotate_key(at.backend, at.key, source, name, at.require)
        new.counts = True
        at.remember()
    text = f"key {done.key.id} opens the store in place of the one that was given{new.advice}"
    _show(done, text, json)


@app.command()
@together
def rm(
    key_id: Annotated[str, typer.Argument(help="Id of the key (see `list`).", metavar="KEY")],
    store: OneStore = None,
    *,
    key: StoreKey,
    json: Json = False,
) -> None:
    """Remove a key other than the given one from a store.

    Does not revoke access from a person who could read the store's secret with it. To do so, create
    a new store (`store init`, `store copy`).
    """
    from vmckpt.store.keyring import remove_key

    with _Location(store, key.source()) as at:
        done = remove_key(at.backend, at.key, key_id, at.require)
        at.remember()
    _show(done, f"key {done.key.id} no longer opens the store", json)


@app.command()
def export(
    file: Annotated[Path, typer.Argument(help="File to create; - for stdout.")],
    store: OneStore = None,
    paper: Annotated[
        bool,
        typer.Option("--paper", help="Write short lines with checksums, for printing and typing."),
    ] = False,
    json: Json = False,
) -> None:
    """Back up the file without which no key opens a store.

    For an encrypted store the backup is useless without one of the keys: keep them apart.
    """
    from vmckpt.checkpoint.catalogue.known_stores import require_as_before
    from vmckpt.cli.nouns.store.opened import backend_of
    from vmckpt.store.files.config import read_config
    from vmckpt.store.keyring import backup_text

    location = location_of(store)
    with backend_of(location) as backend:
        config = read_config(backend)
    require_as_before(location.location, location.label, config)
    text = backup_text(config, on_paper=paper)
    if str(file) == "-":
        print(text, end="")
        return
    _write_new(file, text)
    result = {"file": str(file), "id": config.id, "encrypted": config.is_encrypted}
    note = f"wrote {file}"
    if not config.is_encrypted:
        note += ": the store is not encrypted, and this file alone reads a copy of it"
    show(result, note, as_json=json)


@app.command("import")
@together
def import_(
    file: Annotated[
        Path,
        typer.Argument(help="File written by `export`, or typed from paper; - for stdin."),
    ],
    store: OneStore = None,
    *,
    key: StoreKey,
    replace: Annotated[
        bool, typer.Option("--replace", help="Also replace an intact file `store` that differs.")
    ] = False,
    json: Json = False,
) -> None:
    """Restore the file that a key needs, from a backup.

    The given key must be able to open it.
    """
    from vmckpt.store.keyring import parse_backup, restore_backup

    config = parse_backup(_read(file))
    with _Location(store, key.source()) as at:
        restore_backup(at.backend, config, at.key, replace=replace)
        at.remember()
    result = {"place": at.location.label, "id": config.id, "revision": config.revision}
    show(result, f"restored the file `store` of {at.location.label}", as_json=json)


class _Location:
    """A store's location for the block, and the key that was given for it."""

    def __init__(self, store: str | None, key: "KeySource | None") -> None:
        from vmckpt.cli.nouns.store.opened import backend_of

        self.location, self.key = location_of(store), key
        self._backend = backend_of(self.location)

    def __enter__(self) -> "_Location":
        self.backend = self._backend.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._backend.__exit__(*error)

    def require(self, config: "Config") -> None:
        """Raises RefusedError: not the store that was there before, or an older list of keys."""
        from vmckpt.checkpoint.catalogue.location import require_as_known

        require_as_known(self.location, config)

    def remember(self) -> None:
        """What the operator's side knows of the store is what this command has made it."""
        from vmckpt.checkpoint.catalogue.known_stores import known, remember
        from vmckpt.store.files.config import read_config

        before, config = known(self.location.location), read_config(self.backend)
        remember(self.location.location, config, accepted=bool(before and before.accepted))


class _MadeKey:
    """A new key for the block; its file, if it was made, goes when the block was refused.

    After any other failure it stays, and once it `counts`: the store may have been changed.
    """

    def __init__(self, given: NewKey) -> None:
        from vmckpt.errors import UsageError

        file = given.new_key_file
        if (file is not None) + (given.new_key_command is not None) + given.new_key_agent != 1:
            raise UsageError(
                "one new key is needed",
                why="one of --new-key-file, --new-key-command and --new-key-agent names it",
                remedy="give one of them",
            )
        self._given, self._file = given, file
        self._made = file is not None and not Path(file).exists()
        self.counts = False

    @property
    def advice(self) -> str:
        """What to do with a file that was made."""
        return f"; it is in {self._file}: keep a copy elsewhere" if self._made else ""

    def __enter__(self) -> "KeySource":
        from vmckpt.store.sealing.keys import KeyHolder, KeySource, make_key_file

        if self._file is not None and self._made:
            make_key_file(Path(self._file))
        return key_of(self._file, self._given.new_key_command) or KeySource(KeyHolder.AGENT)

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        from vmckpt.errors import BusyError, NotFoundError, RefusedError, UsageError

        refused = (BusyError, NotFoundError, RefusedError, UsageError)
        was_refused = kind is not None and issubclass(kind, refused) and not self.counts
        if was_refused and self._made and self._file is not None:
            Path(self._file).unlink()


def _show(done: "Changed", text: str, json: bool) -> None:
    from vmckpt.cli.output import warn

    for name, why in done.old_copies.items():
        warn(f"{name} still has the earlier keys: {why}; `vmckpt store check` writes it")
    show(_json(done.key) | {"old_copies": dict(done.old_copies)}, text, as_json=json)


def _json(key: "Wrapped") -> dict[str, Any]:
    import time

    added = time.strftime("%Y-%m-%d", time.gmtime(key.added_unix_s)) if key.added_unix_s else None
    return {
        "id": key.id,
        "kind": key.kind,
        "name": key.name or key.agent_key or None,
        "added": added,
    }


def _write_new(file: Path, text: str) -> None:
    import os

    from vmckpt.errors import StorageError
    from vmckpt.state.durable import sync_directory

    try:
        fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        sync_directory(file.absolute().parent)
    except OSError as exc:
        raise StorageError(
            f"cannot make {file}",
            why=exc.strerror or str(exc),
            remedy="choose a writable file that does not exist yet",
        ) from exc


def _read(file: Path) -> str:
    import sys

    from vmckpt.errors import StorageError

    try:
        if str(file) == "-":
            return sys.stdin.read()
        return file.read_text(errors="replace")
    except OSError as exc:
        raise StorageError(
            f"cannot read {file}", why=exc.strerror or str(exc), remedy="check the path"
        ) from exc
