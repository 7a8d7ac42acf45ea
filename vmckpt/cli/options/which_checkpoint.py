"""Which checkpoint a command means, what opens its store, and where it is restored."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from vmckpt.cli.output import run, warn

if TYPE_CHECKING:
    from vmckpt.checkpoint.catalogue.catalogue import Catalogue, CatalogueEntry
    from vmckpt.hosts.host import Host
    from vmckpt.store.sealing.keys import KeySource

StorePlace = Annotated[
    str | None,
    typer.Option(
        "--store",
        help="Store: a directory, HOST:, HOST:/DIRECTORY, ssh://... or s3://... [default: all "
        "known stores; for a new checkpoint, the host's own]",
        metavar="LOCATION",
    ),
]
KeyFile = Annotated[
    str | None,
    typer.Option("--key-file", help="Encrypted store: file with its key.", metavar="FILE"),
]
KeyCommand = Annotated[
    str | None,
    typer.Option(
        "--key-command", help="Encrypted store: command that prints its key.", metavar="COMMAND"
    ),
]


class Stored(NamedTuple):
    """The store that is meant, and what opens it."""

    store: StorePlace = None
    key_file: KeyFile = None
    key_command: KeyCommand = None

    def key_source(self) -> "KeySource | None":
        """Where its key is had; see `key_source`."""
        return key_source(self.key_file, self.key_command)


def absolute_place(place: str | None) -> str | None:
    """A path of this directory's as it is from any other; places of hosts and buckets stay.

    For what a later command, in another directory, has to find again.
    """
    if not place or ":" in place:
        return place
    return str(Path(place).absolute())


def catalogue(store: str | None, key: "KeySource | None", vm: str | None = None) -> "Catalogue":
    """All checkpoints, or one VM's, in the store that was named, else wherever there are any."""
    from vmckpt.checkpoint.catalogue import catalogue as catalogues
    from vmckpt.fleet.guard.pinned import without_stale
    from vmckpt.hosts.inventory.inventory import all_hosts

    return run(without_stale(run(catalogues.catalogue(all_hosts(), store, key, vm)), key))


def find(point: str, store: str | None, key: "KeySource | None") -> "CatalogueEntry":
    """The checkpoint of that name, or whose id begins so. Raises NotFoundError, UsageError."""
    return catalogue(store, key).find(point)


def key_source(key_file: str | None, key_command: str | None) -> "KeySource | None":
    """Where an encrypted store's key is had, by options; None: the environment's, or the agent's.

    Raises UsageError.
    """
    if key_file is None and key_command is None:
        return None
    from vmckpt.cli.options.stores import key_of

    return key_of(key_file, key_command)


async def home(entry: "CatalogueEntry", given: str | None, *, copy: bool) -> "Host":
    """The host that was named, else see `drivers.find`. Raises NotFoundError too."""
    from vmckpt.drivers.find import restores_on
    from vmckpt.hosts.inventory.inventory import find_host

    return find_host(given) if given is not None else await restores_on(entry, warn, copy=copy)
