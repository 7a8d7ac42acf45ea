"""Whether a migration is encrypted, how both ends prove who they are, and telling both QEMUs so.

QEMU sends in clear whenever its parameter `tls-creds` is empty, also after a refused call that
should have set it: so every answer is read, and the parameters are asked for again at the end.
"""

import os
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from vmckpt.errors import (
    HostDownError,
    OperationFailedError,
    OutcomeUnknownError,
    RefusedError,
    UsageError,
)
from vmckpt.hosts.host import Host
from vmckpt.hosts.pki.dh_group import DH_PARAMS, DH_PARAMS_FILE
from vmckpt.hosts.pki.identity import Identity, Obstacle, obstacles, pki_dir, read_identity
from vmckpt.migrate.ends import End
from vmckpt.migrate.options import Tls
from vmckpt.qemu import commands
from vmckpt.qemu.monitor import CommandRefusedError, Monitor
from vmckpt.sequence.steps import both
from vmckpt.vm.users import let_read, user_of

PREFIX = "vmckpt-tls-"
AUTHZ_PREFIX = "vmckpt-peer-"
# Both kinds of credentials are 0600 files in this directory of each QEMU (PSK, or it has a user of
# its own), or in the host's.
PSK_DIR = "tls"
PSK_USER = "vmckpt"
_PARAMETERS = ("tls-creds", "tls-hostname", "tls-authz")


class Scheme(Enum):
    """How the ends prove themselves; the value is the word for it in reports."""

    CLEAR = "off"
    CERTIFICATES = "x509"
    ONE_TIME_KEY = "psk"


class Encryption(NamedTuple):
    """What was decided for one migration, and why.

    `peer` is the distinguished name that the source's certificate has to show to the target;
    `name` whom the target's has to be for, None: its address.
    """

    scheme: Scheme
    reason: str
    peer: str = ""
    name: str | None = None


IN_CLEAR = Encryption(Scheme.CLEAR, "not encrypted")


class Credentials(NamedTuple):
    """What both QEMUs call their credentials: for RAM, and for disk streams from source to target.

    The source connects with `source` (its peer has to be `hostname`), the target listens with
    `target` and lets in whom `authz` allows. The same values are NBD's `tls-creds`,
    `tls-hostname` and `tls-authz`; None: not checked, since only both ends have the key.
    """

    source: str
    target: str
    hostname: str | None
    authz: str | None


async def choose(
    tls: Tls,
    source: Host,
    target: Host,
    now_unix_s: float | None = None,
    *,
    directories: tuple[Path, Path] | None = None,
    name: str | None = None,
    own_users: bool = False,
) -> Encryption:
    """The way that `tls` comes to between these hosts. Raises RefusedError, with what mends it.

    `directories` have the certificates of both, where that is not vmckpt's own. The target's is for
    `name`, or None: for its address. `own_users`: a QEMU of these has a user of its own.

    AUTO: certificates where the hosts have any; in clear only between hosts that are one machine
    and have none. It never falls back to clear because certificates are bad. What a QEMU proves its
    host by it can keep, and a guest that has broken out of it pass as that host: where QEMUs have
    users of their own they get a key of this migration instead.
    """
    if tls is Tls.OFF:
        return Encryption(Scheme.CLEAR, "not encrypted, as asked for")
    if tls is Tls.PSK:
        return Encryption(Scheme.ONE_TIME_KEY, "encrypted, by a key made for this migration alone")
    here, there = directories or (None, None)
    ours, theirs = await _identity(source, here), await _identity(target, there)
    one_machine = source.is_this_machine and target.is_this_machine
    if tls is Tls.AUTO and own_users and name is None and (ours or theirs or not one_machine):
        reason = "encrypted, by a key made for this migration alone: no VM's user sees its host's"
        return Encryption(Scheme.ONE_TIME_KEY, reason)
    if ours and theirs:
        now = time.time() if now_unix_s is None else now_unix_s
        if found := obstacles((source, ours), (target, theirs), now, name):
            raise _refused(found)
        reason = f"encrypted; {source.name} and {target.name} prove themselves by certificates"
        return Encryption(Scheme.CERTIFICATES, reason, ours.client.subject, name)
    if tls is Tls.AUTO and one_machine and not (ours or theirs):
        return Encryption(
            Scheme.CLEAR, "not encrypted: both hosts are this machine and have no certificates"
        )
    without = [host.name for host, has in ((source, ours), (target, theirs)) if not has]
    reason = f"{' and '.join(without)} cannot encrypt: no certificates"
    raise _refused([Obstacle(reason, f"vmckpt pki issue {' '.join(without)}")])


async def arm(source: End, target: End, encryption: Encryption, run: str) -> Credentials:
    """Both QEMUs encrypt what migrates next between them, in a way that is not Scheme.CLEAR.

    Neither has credentials yet: see `disarm`, to be called after an error on whichever end goes on.
    Raises OperationFailedError (a QEMU refused, or has not taken it over), HostDownError,
    StorageError, OutcomeUnknownError.
    """
    name = PREFIX + run
    by_certificate = encryption.scheme is Scheme.CERTIFICATES
    credentials = Credentials(
        source=name,
        target=name,
        hostname=(encryption.name or target.host.migration_address) if by_certificate else None,
        authz=AUTHZ_PREFIX + run if by_certificate else None,
    )
    try:
        if by_certificate:
            await _load_certificates(source, target, credentials, encryption.peer)
        else:
            await _load_key(source, target, name)
        await _use(
            await source.monitor(), {"tls-creds": name, "tls-hostname": credentials.hostname}
        )
        await _use(await target.monitor(), {"tls-creds": name, "tls-authz": credentials.authz})
    except CommandRefusedError as exc:
        raise OperationFailedError(
            "the migration cannot be encrypted",
            why=str(exc.why),
            remedy=f"vmckpt pki issue {source.host.name} {target.host.name}"
            if by_certificate
            else "use --tls auto",
        ) from exc
    return credentials


async def disarm(end: End) -> None:
    """This QEMU has no credentials any more, of whichever migration.

    Not to be called while one is under way. A QEMU that has ended has none. Raises what the
    commands raise.
    """
    try:
        monitor = await end.monitor()
    except HostDownError:
        if await end.alive():
            raise
        return
    _, objects = await both(
        _use(monitor, dict.fromkeys(_PARAMETERS)), commands.query_objects(monitor)
    )
    for name in objects:
        if name.startswith((PREFIX, AUTHZ_PREFIX)):
            await commands.object_del(monitor, name)
    await end.host.remove(end.files.path / PSK_DIR)


async def disarm_if_possible(end: End, note: Callable[[str], None]) -> None:
    """The same where nothing hangs on it: what stays is said, and swept away by the next `arm`."""
    try:
        await disarm(end)
    except (CommandRefusedError, HostDownError, OutcomeUnknownError, OperationFailedError) as exc:
        note(f"{end.label} keeps credentials that nothing uses any more: {exc}")


async def _load_certificates(source: End, target: End, credentials: Credentials, peer: str) -> None:
    monitor = await target.monitor()
    # Any certificate of the authority would do otherwise, and no other host has business here.
    await commands.object_add(monitor, "authz-simple", str(credentials.authz), {"identity": peer})
    for end, endpoint in ((target, "server"), (source, "client")):
        directory = await _certificates_for(end, endpoint)
        values = {"dir": str(directory), "endpoint": endpoint, "verify-peer": True}
        name = credentials.target if end is target else credentials.source
        await commands.object_add(await end.monitor(), "tls-creds-x509", name, values)


async def _certificates_for(end: End, endpoint: str) -> Path:
    """Where its QEMU can read its host's: what is root's there a QEMU's own user gets a copy of."""
    host, files = end.host, end.files
    if await user_of(host, files) is None:
        return pki_dir(host)
    directory = files.path / PSK_DIR
    await host.make_dir(directory)
    names = []
    for name in ("ca-cert.pem", DH_PARAMS_FILE, f"{endpoint}-cert.pem", f"{endpoint}-key.pem"):
        if (text := await host.read_text(pki_dir(host) / name)) is not None:
            await host.write_text(directory / name, text)
            names.append(name)
    await let_read(host, files, directory, names)
    return directory


async def _load_key(source: End, target: End, name: str) -> None:
    line = f"{PSK_USER}:{os.urandom(32).hex()}\n"
    for end, role in (
        (target, {"endpoint": "server"}),
        (source, {"endpoint": "client", "username": PSK_USER}),
    ):
        directory = end.files.path / PSK_DIR
        await end.host.make_dir(directory)
        await end.host.write_text(directory / DH_PARAMS_FILE, DH_PARAMS)
        # The server reads the file at every handshake: it stays until `disarm`.
        await end.host.write_text(directory / "keys.psk", line)
        await let_read(end.host, end.files, directory, (DH_PARAMS_FILE, "keys.psk"))
        values = {"dir": str(directory), **role}
        await commands.object_add(await end.monitor(), "tls-creds-psk", name, values)


async def _use(monitor: Monitor, wanted: dict[str, str | None]) -> None:
    values = {name: value or "" for name, value in wanted.items()}
    found: dict[str, Any]
    _, found = await both(
        commands.migrate_set_parameters(monitor, values), commands.query_migrate_parameters(monitor)
    )
    different = [name for name, value in values.items() if found.get(name, "") != value]
    if different:
        raise OperationFailedError(
            f"{monitor.label} has not taken over {', '.join(different)}",
            why="it answered without an error, and keeps another value",
            remedy="report this; the migration would not be encrypted as it should",
        )


async def _identity(host: Host, directory: Path | None) -> Identity | None:
    try:
        return await read_identity(host, directory)
    except UsageError as exc:
        raise RefusedError(exc.what, why=exc.why, remedy=exc.remedy) from exc


def _refused(found: list[Obstacle]) -> RefusedError:
    return RefusedError(
        "the migration cannot be encrypted",
        why="; ".join(obstacle.reason for obstacle in found),
        remedy="; ".join(dict.fromkeys(obstacle.remedy for obstacle in found))
        + "; or use --tls psk, or in a network that you trust --tls off",
    )
