"""The hosts: one JSON file each under STATE/hosts, and always `local`, this machine."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from vmckpt.errors import NotFoundError, RefusedError, UsageError
from vmckpt.foreign import MalformedError, parse
from vmckpt.hosts.host import Host, entry_fields
from vmckpt.hosts.inventory.directories import state_dir
from vmckpt.hosts.inventory.entries import LOCAL, entry_to_json, parse_entry
from vmckpt.hosts.local import LocalHost
from vmckpt.state.documents import names_in
from vmckpt.state.durable import write_durably

if TYPE_CHECKING:
    from vmckpt.hosts.remote.host import RemoteHost
    from vmckpt.hosts.remote.session import Greeting, Session
    from vmckpt.hosts.ssh.address import Address
    from vmckpt.hosts.ssh.entry import SshEntry

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def check_name(name: str, what: str) -> str:
    """Validate and return `name`.

    Raises UsageError unless it is [A-Za-z0-9][A-Za-z0-9._-]* of at most 40 characters.
    """
    if not _NAME.fullmatch(name) or len(name) > 40:
        raise UsageError(
            f"'{name}' is not a name for a {what}",
            why="names match [A-Za-z0-9][A-Za-z0-9._-]* and have at most 40 characters",
            remedy="choose another name",
        )
    return name


def all_entries() -> "list[LocalHost | SshEntry]":
    """All inventory entries, `local` first, then by name.

    Raises UsageError on a malformed file, StorageError if the inventory cannot be read: it is not
    empty then.
    """
    entries = {}
    directory = state_dir() / "hosts"
    for name in names_in(directory):
        path = directory / f"{name}.json"
        try:
            entries[name] = _read(path)
        except FileNotFoundError:
            if path.is_symlink():
                raise
            # Another process has just removed that host.
    return [entries.pop(LOCAL, local_host()), *entries.values()]


def all_hosts() -> list[Host]:
    """All hosts in the same order; connections are made on first use.

    A remote host is the same object each time, so that all users share one connection. Raises as
    `all_entries`.
    """
    return [host_of(entry) for entry in all_entries()]


def find_host(name: str) -> Host:
    """The host of that name. Raises NotFoundError, which names the known hosts."""
    return host_of(find_entry(name))


def find_entry(name: str) -> "LocalHost | SshEntry":
    """The inventory entry of that name. Raises as `find_host`."""
    entries = {entry.name: entry for entry in all_entries()}
    if name not in entries:
        raise NotFoundError(
            f"there is no host '{name}'",
            why=f"the inventory has: {', '.join(entries)}",
            remedy="see `vmckpt host list`",
        )
    return entries[name]


def local_host() -> LocalHost:
    """This machine."""
    return LocalHost(LOCAL, state_dir(), "127.0.0.1")


def require_new_name(name: str) -> None:
    """Raises RefusedError if the name is in use, UsageError if it is not valid."""
    path = _entry_path(name)
    if name == LOCAL or path.exists():
        raise RefusedError(
            f"there is a host '{name}' already",
            why="it is this machine" if name == LOCAL else f"{path} describes it",
            remedy=f"choose another name, or forget that one: vmckpt host rm {name}",
        )


def add_host(entry: "SshEntry") -> None:
    """Add an entry to the inventory. Raises RefusedError, UsageError, StorageError."""
    require_new_name(entry.name)
    change_host(entry)


def change_host(entry: "LocalHost | SshEntry") -> None:
    """Replace an inventory entry. Raises UsageError, also if it could not be read; StorageError."""
    data = entry_to_json(entry)
    with describing(entry.name):
        parse_entry(entry.name, data)
    write_durably(_entry_path(entry.name), f"{json.dumps(data, indent=1)}\n")


@contextmanager
def describing(name: str) -> Iterator[None]:
    """For a block that builds an entry from options. Raises UsageError if they are not valid."""
    try:
        yield
    except ValueError as exc:
        raise UsageError(
            f"'{name}' cannot have these settings", why=str(exc), remedy="fix the option"
        ) from exc


def remove_host(name: str) -> None:
    """Remove a host from the inventory; the host itself is unchanged. NotFoundError,
    RefusedError.
    """
    path = _entry_path(name)
    if not path.exists():
        find_host(name)
        raise RefusedError(
            f"'{name}' cannot be removed", why="this machine is always there", remedy="-"
        )
    path.unlink()


async def close_connections() -> None:
    """Close the connections to all remote hosts; they are reopened on use."""
    while _elsewhere:
        _, (_, host) = _elsewhere.popitem()
        await host.close()


def reach(entry: "SshEntry") -> "RemoteHost":
    """The host of an entry; the connection is made on first use."""
    from vmckpt.hosts.remote import host

    session = _session(entry.name, entry.address, entry.vmckpt, entry.state_dir)
    return host.RemoteHost(**entry_fields(entry), session=session)


async def greet(name: str, address: "Address", vmckpt: str, state_dir: Path | None) -> "Greeting":
    """Contact a host that is to be added. Raises UsageError, HostDownError."""
    with describing(name):
        if state_dir is not None and not state_dir.is_absolute():
            raise ValueError(f"'{state_dir}' must be an absolute path")
    session = _session(name, address, vmckpt, state_dir)
    try:
        return await session.greeting()
    finally:
        await session.close()


def _session(name: str, address: "Address", vmckpt: str, state_dir: Path | None) -> "Session":
    from vmckpt.hosts.remote import session

    async def open_wire() -> session.ServeConnection:
        # The SSH modules are imported when a host is first contacted.
        from vmckpt.hosts.ssh import wire

        return await wire.open_wire(name, address, vmckpt)

    return session.Session(name, state_dir, open_wire)


# By name, with the entry from which it was made.
_elsewhere: "dict[str, tuple[SshEntry, RemoteHost]]" = {}


def _read(path: Path) -> "LocalHost | SshEntry":
    try:
        data = parse(path.read_bytes(), any_text=True)
        if not isinstance(data, dict):
            raise MalformedError("it must be an object")
        return parse_entry(check_name(path.stem, "host"), data)
    except ValueError as exc:
        raise UsageError(
            f"the inventory file {path} is malformed",
            why=str(exc),
            remedy="fix or remove it",
        ) from exc


def host_of(entry: "LocalHost | SshEntry") -> Host:
    """The host that an entry describes, whether or not it is in the inventory."""
    if isinstance(entry, LocalHost):
        return entry
    made_from, host = _elsewhere.get(entry.name, (None, None))
    if host is None or made_from != entry:
        host = reach(entry)
        _elsewhere[entry.name] = entry, host
    return host


def _entry_path(name: str) -> Path:
    return state_dir() / "hosts" / f"{check_name(name, 'host')}.json"
