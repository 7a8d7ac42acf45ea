"""What the commands of `vmckpt store` take: which store, and its key."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from vmckpt.checkpoint.catalogue.place import StoreLocation as Location
    from vmckpt.store.sealing.keys import KeySource

Place = Annotated[
    str | None, typer.Argument(help="Store. [default: this host's own]", metavar="LOCATION")
]
CheckedPlace = Annotated[
    str | None,
    typer.Argument(
        help="Store. [default: all stores with checkpoints of known VMs]", metavar="LOCATION"
    ),
]
StoreOption = Annotated[
    str | None,
    typer.Option("--store", help="Store. [default: this host's own]", metavar="LOCATION"),
]
KeyFile = Annotated[
    str | None, typer.Option("--key-file", help="File with the store's key.", metavar="FILE")
]
KeyCommand = Annotated[
    str | None,
    typer.Option("--key-command", help="Command that prints the store's key.", metavar="COMMAND"),
]
TargetKeyFile = Annotated[
    str | None,
    typer.Option(
        "--target-key-file", help="File with the destination store's key.", metavar="FILE"
    ),
]
TargetKeyCommand = Annotated[
    str | None,
    typer.Option(
        "--target-key-command",
        help="Command that prints the destination store's key.",
        metavar="COMMAND",
    ),
]
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
    from vmckpt.checkpoint.catalogue.place import own, parse_place
    from vmckpt.hosts.inventory.inventory import local_host

    return own(local_host()) if text is None else parse_place(text)


def key_of(key_file: str | None, key_command: str | None) -> "KeySource | None":
    """Where a store's key is had, by options. Raises UsageError: by two."""
    from vmckpt.store.sealing.keys import KeyHolder, KeySource

    found = KeySource(KeyHolder.FILE, key_file) if key_file is not None else None
    if key_command is not None:
        found = one_key(found, KeySource(KeyHolder.COMMAND, key_command))
    return found


def one_key(first: "KeySource | None", second: "KeySource") -> "KeySource":
    """The second, when there is no first. Raises UsageError: two are given."""
    from vmckpt.errors import UsageError

    if first is not None:
        raise UsageError(
            "the key is given twice",
            why="a store has one key",
            remedy="leave all but one of --key-file, --key-command and --key-agent out",
        )
    return second
