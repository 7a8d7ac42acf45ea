"""Which store a command means, and the keys of stores."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

if TYPE_CHECKING:
    from vmckpt.checkpoint.catalogue.location import StoreLocation as Location
    from vmckpt.store.sealing.keys import KeySource

StoreArgument = Annotated[
    str | None, typer.Argument(help="Store. [default: this host's own]", metavar="LOCATION")
]
CheckedStores = Annotated[
    str | None,
    typer.Argument(
        help="Store. [default: all stores with checkpoints of known VMs]", metavar="LOCATION"
    ),
]


def _store(default: str) -> Any:
    """The option --store; a command that searches for checkpoints has another default."""
    return typer.Option(
        "--store",
        help="Store: a directory, HOST:, HOST:/DIRECTORY, ssh://... or s3://... "
        f"[default: {default}]",
        metavar="LOCATION",
    )


OneStore = Annotated[str | None, _store("this host's own")]
AnyStore = Annotated[str | None, _store("all known stores; for a new checkpoint, the host's own")]
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


class StoreKey(NamedTuple):
    """What opens a store."""

    key_file: KeyFile = None
    key_command: KeyCommand = None

    def source(self) -> "KeySource | None":
        """The source of the key; None: the environment, or the agent. Raises UsageError."""
        return key_of(*self)


class Stored(NamedTuple):
    """The store that is searched for checkpoints, or gets a new one, and what opens it."""

    store: AnyStore = None
    key_file: KeyFile = None
    key_command: KeyCommand = None

    def key(self) -> "KeySource | None":
        """The source of its key; None: the environment, or the agent. Raises UsageError."""
        return key_of(self.key_file, self.key_command)


class TargetKey(NamedTuple):
    """What opens the store that is written, where another one is read."""

    target_key_file: Annotated[
        str | None,
        typer.Option(
            "--target-key-file", help="File with the destination store's key.", metavar="FILE"
        ),
    ] = None
    target_key_command: Annotated[
        str | None,
        typer.Option(
            "--target-key-command",
            help="Command that prints the destination store's key.",
            metavar="COMMAND",
        ),
    ] = None

    def source(self) -> "KeySource | None":
        """The source of the key; None: the environment, or the agent. Raises UsageError."""
        return key_of(*self)


ReadDataSubset = Annotated[
    str | None,
    typer.Option(
        "--read-data-subset",
        help="Read only part of the packs' content: N% at random, or part n of t, e.g. 5% or "
        "1/7. Metadata is always read.",
        metavar="N%|n/t",
    ),
]
Points = Annotated[
    list[str] | None,
    typer.Argument(help="Checkpoints: names, ids, or prefixes of ids. [default: all]"),
]


def location_of(text: str | None) -> "Location":
    """The store that was named, else this host's own. Raises UsageError, NotFoundError."""
    from vmckpt.checkpoint.catalogue.location import own, parse_location
    from vmckpt.hosts.inventory.inventory import local_host

    return own(local_host()) if text is None else parse_location(text)


def key_of(
    file: str | None, command: str | None, *, from_agent: bool = False
) -> "KeySource | None":
    """The source of a store's key; None: not specified. Raises UsageError if it is given twice."""
    if (file is not None) + (command is not None) + from_agent == 0:
        return None
    from vmckpt.errors import UsageError
    from vmckpt.store.sealing.keys import KeyHolder, KeySource

    given = []
    if file is not None:
        given.append(KeySource(KeyHolder.FILE, file))
    if command is not None:
        given.append(KeySource(KeyHolder.COMMAND, command))
    if from_agent:
        given.append(KeySource(KeyHolder.AGENT))
    if len(given) > 1:
        raise UsageError(
            "the key is given twice",
            why="a store has one key",
            remedy="give only one of --key-file, --key-command and --key-agent",
        )
    return given[0]


def absolute_location(location: str | None) -> str | None:
    """A path of this directory's as it is from any other; places of hosts and buckets stay.

    For what a later command, in another directory, has to find again.
    """
    if not location or ":" in location:
        return location
    return str(Path(location).absolute())
