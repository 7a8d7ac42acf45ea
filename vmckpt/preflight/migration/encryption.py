"""Whether a migration is encrypted, and how both ends authenticate."""

import time
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from vmckpt.errors import RefusedError, UsageError
from vmckpt.hosts.host import Host
from vmckpt.hosts.pki.identity import Identity, TlsObstacle, obstacles, read_identity
from vmckpt.options.migration import Tls


class Scheme(Enum):
    """How the ends authenticate; the value is the term in reports."""

    UNENCRYPTED = "off"
    CERTIFICATES = "x509"
    ONE_TIME_KEY = "psk"


class Encryption(NamedTuple):
    """The decision for one migration, and the reason.

    `peer` is the distinguished name that the source's certificate must show to the destination;
    `name` the one that the destination's must be for; None: its address.
    """

    scheme: Scheme
    reason: str
    peer: str = ""
    name: str | None = None


UNENCRYPTED = Encryption(Scheme.UNENCRYPTED, "not encrypted")


async def choose(
    tls: Tls,
    source: Host,
    destination: Host,
    now_unix_s: float | None = None,
    *,
    directories: tuple[Path, Path] | None = None,
    name: str | None = None,
    own_users: bool = False,
) -> Encryption:
    """Choose the encryption that `tls` selects between these hosts.

    Raises RefusedError, with a remedy.

    `directories` have both hosts' certificates, if not vmckpt's own. The destination's is for
    `name`, or None: for its address. `own_users`: these hosts' QEMUs each have a separate user.

    AUTO: certificates if the hosts have any; unencrypted only within one machine that has none.
    Invalid certificates never cause that fallback. A QEMU can keep what it authenticates its host
    with, and a guest that has escaped from it could impersonate that host: if QEMUs have separate
    users they get a key for this migration instead.
    """
    if tls is Tls.OFF:
        return Encryption(Scheme.UNENCRYPTED, "not encrypted, as asked for")
    if tls is Tls.PSK:
        return Encryption(
            Scheme.ONE_TIME_KEY, "encrypted, with a key made for this migration alone"
        )
    here, there = directories or (None, None)
    ours, theirs = await _identity(source, here), await _identity(destination, there)
    one_machine = source.is_this_machine and destination.is_this_machine
    if tls is Tls.AUTO and own_users and name is None and (ours or theirs or not one_machine):
        reason = "encrypted, with a key made for this migration alone: no VM's user sees its host's"
        return Encryption(Scheme.ONE_TIME_KEY, reason)
    if ours and theirs:
        now = time.time() if now_unix_s is None else now_unix_s
        if found := obstacles((source, ours), (destination, theirs), now, name):
            raise _refused(found)
        reason = f"encrypted; {source.name} and {destination.name} authenticate by certificates"
        return Encryption(Scheme.CERTIFICATES, reason, ours.client.subject, name)
    if tls is Tls.AUTO and one_machine and not (ours or theirs):
        return Encryption(
            Scheme.UNENCRYPTED,
            "not encrypted: both hosts are this machine and have no certificates",
        )
    without = [host.name for host, has in ((source, ours), (destination, theirs)) if not has]
    reason = f"{' and '.join(without)} cannot encrypt: no certificates"
    raise _refused([TlsObstacle(reason, f"vmckpt pki issue {' '.join(without)}")])


async def _identity(host: Host, directory: Path | None) -> Identity | None:
    try:
        return await read_identity(host, directory)
    except UsageError as exc:
        raise RefusedError(exc.what, why=exc.why, remedy=exc.remedy) from exc


def _refused(found: list[TlsObstacle]) -> RefusedError:
    return RefusedError(
        "the migration cannot be encrypted",
        why="; ".join(obstacle.reason for obstacle in found),
        remedy="; ".join(dict.fromkeys(obstacle.remedy for obstacle in found))
        + "; or use --tls psk, or in a network that you trust --tls off",
    )
