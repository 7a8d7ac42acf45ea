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


def open_arbiter(options: ReplicationOptions) -> RecordStore:
    """The store at an address: a directory, or `etcd:URL,URL...` with the cluster's members.

    Reads the credentials file on this host. Raises UsageError.
    """
    require_place(options)
    place = options.arbiter
    if not place.startswith(ETCD):
        return FileStore(Path(place))
    known = read_credentials(Path(options.credentials)) if options.credentials else None
    return EtcdStore([Gateway(url, known) for url in place.removeprefix(ETCD).split(",")])


def usual_place(*, one_machine: bool) -> str:
    """The default location of leases. Raises RefusedError if the hosts are different machines."""
    if one_machine:
        return str(state_dir() / "leases")
    raise RefusedError(
        "there is no arbiter",
        why="both hosts must reach the record of who may run the VM",
        remedy="name a directory that both share, or an etcd cluster: --lease etcd:URL,URL...",
    )


def require_place(options: ReplicationOptions) -> None:
    """Raises UsageError unless a host could open it; does not read any of the host's files."""
    place, credentials = options.arbiter, options.credentials
    if place.startswith(ETCD):
        for url in place.removeprefix(ETCD).split(","):
            Gateway(url)
            if credentials and not url.startswith("https://"):
                raise UsageError(
                    f"credentials cannot be combined with {url}",
                    why="without TLS, anyone on the network could read them",
                    remedy="configure etcd with TLS, and use https:// for every member",
                )
        return
    if not Path(place).is_absolute():
        raise UsageError(
            f"'{place}' cannot hold leases",
            why="--lease takes the absolute path of a directory, or etcd:URL,URL...",
            remedy="name a directory that both hosts share, or etcd's client addresses",
        )
    if credentials:
        raise UsageError(
            f"credentials cannot be combined with {place}",
            why="a directory needs no credentials",
            remedy="leave out --lease-credentials",
        )
