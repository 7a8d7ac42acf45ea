"""vmckpt drain."""

from dataclasses import replace
from typing import Annotated

import typer

from vmckpt.cli.commands.draining import Common, Link, carried_out, names
from vmckpt.cli.options.together import together


@together
def drain(
    host: Annotated[str, typer.Argument(help="The host that is to be empty.")],
    to: Annotated[
        str | None, typer.Option(help="Only to these hosts.", metavar="HOST,HOST...")
    ] = None,
    apart: Annotated[
        list[str] | None, typer.Option(help="VMs that come to different hosts.", metavar="VM,VM...")
    ] = None,
    together: Annotated[
        list[str] | None, typer.Option(help="VMs that come to one host.", metavar="VM,VM...")
    ] = None,
    *,
    common: Common,
    options: Link,
) -> None:
    """Move all VMs that run on a host elsewhere, and have nothing put there until `undrain`.

    Exit code 1 when some stay, each with its reason; 4 when none could move. Killed or cancelled,
    the same command goes on.
    """
    from vmckpt.fleet.drain.drain import drain as drain_
    from vmckpt.hosts.inventory.inventory import find_host

    asked = replace(
        common.asked(options),
        to=names("--to", to) if to is not None else (),
        apart=tuple(names("--apart", text, 2) for text in apart or ()),
        together=tuple(names("--together", text, 2) for text in together or ()),
    )
    there = find_host(host)
    carried_out(
        lambda show: drain_(there, asked, show, dry_run=common.dry_run),
        f"draining {host}",
        as_json=common.json,
    )
