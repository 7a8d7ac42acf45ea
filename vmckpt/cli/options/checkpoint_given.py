"""What was given on the command line of `vmckpt checkpoint`, checked."""

import re
from collections.abc import Callable

from vmckpt.cli.output import note


def plugged(network: str | None, *, default: bool) -> bool:
    """Whether the network is. Raises UsageError."""
    from vmckpt.errors import UsageError

    if network not in (None, "plugged", "isolated"):
        raise UsageError(
            f"--network {network} is unknown",
            why="it is plugged or isolated",
            remedy="write one of them",
        )
    return default if network is None else network == "plugged"


def given_name(name: str | None, of: str) -> str:
    """A checkpoint's, or a group's, name. Raises UsageError."""
    from vmckpt.hosts.inventory.inventory import check_name
    from vmckpt.store.files.naming import dated

    return check_name(name, "checkpoint") if name is not None else dated(of)


def given_tags(given: list[str]) -> dict[str, str]:
    """By key. Raises UsageError."""
    from vmckpt.errors import UsageError

    for text in given:
        if not re.fullmatch(r"[^=\s]+=\S*", text):
            raise UsageError(
                f"'{text}' is not a tag", why="it must be key=value", remedy="write e.g. by=ci"
            )
    pairs = [text.partition("=") for text in given]
    return {key: value for key, _, value in pairs}


def one_of(given: str | None, group: str | None, what: str) -> str | None:
    """The single one; None: a group is meant. Raises UsageError unless exactly one is given."""
    from vmckpt.errors import UsageError

    if (given is None) == (group is None):
        both = "both are given" if given is not None else "neither is given"
        raise UsageError(
            f"it takes {what} or --group",
            why=both,
            remedy=f"name {what}, or use --group for several",
        )
    return given


def teller(as_json: bool) -> Callable[[str], None]:
    """Receives progress; silent with --json."""
    return (lambda _: None) if as_json else (lambda step: note(f"  {step}"))
