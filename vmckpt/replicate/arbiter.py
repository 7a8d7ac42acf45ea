"""Who says who may run a VM: a directory, or an etcd cluster."""

from pathlib import Path

from vmckpt.errors import UsageError
from vmckpt.lease.etcd_store import EtcdStore
from vmckpt.lease.file_store import FileStore
from vmckpt.lease.gateway import Gateway
from vmckpt.lease.store import Store

ETCD = "etcd:"


def open_arbiter(place: str) -> Store:
    """The store at `place`: the path of a directory, or `etcd:URL,URL...` of a cluster's members.

    Raises UsageError.
    """
    if place.startswith(ETCD):
        return EtcdStore([Gateway(url) for url in place.removeprefix(ETCD).split(",")])
    if not Path(place).is_absolute():
        raise UsageError(
            f"'{place}' is no place for leases",
            why="it is the absolute path of a directory, or etcd:URL,URL...",
            remedy="name a directory that both hosts share, or etcd's client addresses",
        )
    return FileStore(Path(place))
