"""The arbiter, which decides who may run a VM: a directory, or an etcd cluster."""

from pathlib import Path

from vmckpt.errors import RefusedError, UsageError
from vmckpt.hosts.inventory.directories import state_dir
from vmckpt.lease.credentials import read_credentials
from vmckpt.lease.etcd_store import EtcdStore
from vmckpt.lease.file_store import FileStore
from vmckpt.lease.gateway import Gateway
from vmckpt.lease.store import RecordStore
from vmckpt.options.replication import ETCD, ReplicationOptions

# How long to wait for a failing arbiter before continuing without it: it may be back soon.
ARBITER_S = 10.0


def open_arbiter(options: ReplicationOptions) -> RecordStore:
    """The store at an address: a directory, or `etcd:URL,URL...` with the cluster's members.

    Reads the credentials file on this host. Raises UsageError.
    """
    require_location(options)
    location = options.arbiter
    if not location.startswith(ETCD):
        return FileStore(Path(location))
    known = read_credentials(Path(options.credentials)) if options.credentials else None
    return EtcdStore([Gateway(url, known) for url in location.removeprefix(ETCD).split(",")])


def default_location(*, one_machine: bool) -> str:
    """The default location of leases. Raises RefusedError if the hosts are different machines."""
    if one_machine:
        return str(state_dir() / "leases")
    raise RefusedError(
        "there is no arbiter",
        why="both hosts must reach the record of who may run the VM",
        remedy="name a directory that both share, or an etcd cluster: --lease etcd:URL,URL...",
    )


def require_location(options: ReplicationOptions) -> None:
    """Raises UsageError unless a host could open it; does not read any of the host's files."""
    location, credentials = options.arbiter, options.credentials
    if location.startswith(ETCD):
        for url in location.removeprefix(ETCD).split(","):
            Gateway(url)
            if credentials and not url.startswith("https://"):
                raise UsageError(
                    f"credentials cannot be combined with {url}",
                    why="without TLS, anyone on the network could read them",
                    remedy="configure etcd with TLS, and use https:// for every member",
                )
        return
    if not Path(location).is_absolute():
        raise UsageError(
            f"'{location}' cannot hold leases",
            why="--lease takes the absolute path of a directory, or etcd:URL,URL...",
            remedy="name a directory that both hosts share, or etcd's client addresses",
        )
    if credentials:
        raise UsageError(
            f"credentials cannot be combined with {location}",
            why="a directory needs no credentials",
            remedy="leave out --lease-credentials",
        )
