"""Switch encryption of migrations on and off in both QEMUs.

QEMU sends unencrypted whenever its parameter `tls-creds` is empty, also after a refused call that
should have set it. So every answer is checked, and the parameters are queried again at the end.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from vmckpt.errors import (
    HostDownError,
    OperationFailedError,
    OutcomeUnknownError,
)
from vmckpt.hosts.pki.dh_group import DH_PARAMS, DH_PARAMS_FILE
from vmckpt.hosts.pki.identity import pki_dir
from vmckpt.migrate.outcome.ends import End
from vmckpt.preflight.migration.encryption import Encryption, Scheme
from vmckpt.qemu import commands
from vmckpt.qemu.monitor import CommandRefusedError, Monitor
from vmckpt.sequence.steps import both
from vmckpt.vm.users.users import let_read, user_of

PREFIX = "vmckpt-tls-"
AUTHZ_PREFIX = "vmckpt-peer-"
# Both kinds of credentials are files with mode 0600: in this directory of each QEMU (PSK, or a QEMU
# with its own user), or in the host's.
PSK_DIR = "tls"
PSK_USER = "vmckpt"
_PARAMETERS = ("tls-creds", "tls-hostname", "tls-authz")


class TlsCredentials(NamedTuple):
    """The names of both QEMUs' credentials: for RAM, and for disk streams to the destination.

    The source connects with `source` (its peer must be `hostname`), the destination listens with
    `destination` and admits the peers in `authz`. The same values are NBD's `tls-creds`,
    `tls-hostname` and `tls-authz`; None: not checked, since only both ends have the key.
    """

    source: str
    destination: str
    hostname: str | None
    authz: str | None


async def arm(source: End, destination: End, encryption: Encryption, run: str) -> TlsCredentials:
    """Have both QEMUs encrypt the next migration between them, by a Scheme other than CLEAR.

    Neither may have credentials yet: see `disarm`, to be called after an error on whichever end
    continues. Raises OperationFailedError (a QEMU refused, or did not apply it), HostDownError,
    StorageError, OutcomeUnknownError.
    """
    name = PREFIX + run
    by_certificate = encryption.scheme is Scheme.CERTIFICATES
    credentials = TlsCredentials(
        source=name,
        destination=name,
        hostname=(encryption.name or destination.host.migration_address)
        if by_certificate
        else None,
        authz=AUTHZ_PREFIX + run if by_certificate else None,
    )
    try:
        if by_certificate:
            await _load_certificates(source, destination, credentials, encryption.peer)
        else:
            await _load_key(source, destination, name)
        await _use(
            await source.monitor(), {"tls-creds": name, "tls-hostname": credentials.hostname}
        )
        await _use(await destination.monitor(), {"tls-creds": name, "tls-authz": credentials.authz})
    except CommandRefusedError as exc:
        raise OperationFailedError(
            "the migration cannot be encrypted",
            why=str(exc.why),
            remedy=f"vmckpt pki issue {source.host.name} {destination.host.name}"
            if by_certificate
            else "use --tls auto",
        ) from exc
    return credentials


async def disarm(end: End) -> None:
    """Remove this QEMU's credentials, of whichever migration.

    Not to be called during a migration. A QEMU that has ended has none. Raises what the commands
    raise.
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
    """The same where a failure does no harm: it is reported, and the next `arm` removes the
    rest.
    """
    try:
        await disarm(end)
    except (CommandRefusedError, HostDownError, OutcomeUnknownError, OperationFailedError) as exc:
        note(f"{end.label} keeps credentials that are no longer used: {exc}")


async def _load_certificates(
    source: End, destination: End, credentials: TlsCredentials, peer: str
) -> None:
    monitor = await destination.monitor()
    # Otherwise any certificate of the CA would be accepted, and no other host should connect.
    await commands.object_add(monitor, "authz-simple", str(credentials.authz), {"identity": peer})
    for end, endpoint in ((destination, "server"), (source, "client")):
        directory = await _certificates_for(end, endpoint)
        values = {"dir": str(directory), "endpoint": endpoint, "verify-peer": True}
        name = credentials.destination if end is destination else credentials.source
        await commands.object_add(await end.monitor(), "tls-creds-x509", name, values)


async def _certificates_for(end: End, endpoint: str) -> Path:
    """A directory where its QEMU can read its host's certificates: if root owns them, a QEMU with
    its own user gets a copy.
    """
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


async def _load_key(source: End, destination: End, name: str) -> None:
    line = f"{PSK_USER}:{os.urandom(32).hex()}\n"
    for end, role in (
        (destination, {"endpoint": "server"}),
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
            f"{monitor.label} did not apply {', '.join(different)}",
            why="it reported no error, but still has another value",
            remedy="report this; the migration would not be encrypted as requested",
        )
