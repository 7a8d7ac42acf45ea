"""vmckpt drain."""

from dataclasses import replace
from typing import Annotated

import typer

from vmckpt.cli.commands.draining import Common, Link, carried_out, names
from vmckpt.cli.options.together import together


@together
def drain(
    host: Annotated[str, typer.Argument(help="Host to drain.")],
    to: Annotated[
        str | None, typer.Option(help="Use only these destinations.", metavar="HOST,HOST...")
    ] = None,
    apart: Annotated[
        list[str] | None,
        typer.Option(help="VMs to put on different hosts (repeatable).", metavar="VM,VM..."),
    ] = None,
    together: Annotated[
        list[str] | None,
        typer.Option(help="VMs to put on the same host (repeatable).", metavar="VM,VM..."),
    ] = None,
    *,
    common: Common,
    options: Link,
) -> None:
    """Move all running VMs off a host.

    Other VMs are kept off it until `undrain`. Exit code 1 if some VMs stay, each with its reason; 4
    if none could move. After a crash or Ctrl-C, repeat the command to continue.
    """
    from vmckpt.fleet.drain.drain import drain as drain_
    from vmckpt.hosts.inventory.inventory import find_host

    drain_options = replace(
        common.drain_options(options),
        to=names("--to", to) if to is not None else (),
        apart=tuple(names("--apart", text, 2) for text in apart or ()),
        together=tuple(names("--together", text, 2) for text in together or ()),
    )
    there = find_host(host)
    carried_out(
        lambda show: drain_(
            there, drain_options, show, reason=common.reason, dry_run=common.dry_run
        ),
        f"draining {host}",
        as_json=common.json,
    )
