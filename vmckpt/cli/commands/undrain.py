"""vmckpt undrain."""

from typing import Annotated

import typer

from vmckpt.cli.commands.draining import Common, Link, carried_out
from vmckpt.cli.options.together import together
from vmckpt.cli.output import run, show


@together
def undrain(
    host: Annotated[str, typer.Argument(help="Host that was drained.")],
    *,
    common: Common,
    options: Link,
) -> None:
    """Bring VMs back to a drained host.

    Other VMs may use it again, too. Exit codes and interruptions: as for `drain`.
    """
    from vmckpt.fleet.drain.drain import is_drained_for
    from vmckpt.fleet.drain.drain import undrain as undrain_
    from vmckpt.hosts.inventory.inventory import find_host

    drain_options, there = common.drain_options(options), find_host(host)
    if common.reason and not run(is_drained_for(there, common.reason)):
        text = f"{host} was not drained for {common.reason}: nothing to undo"
        show(
            {"host": host, "action": "undrain", "moved": [], "stay": []}, text, as_json=common.json
        )
        return
    carried_out(
        lambda show: undrain_(there, drain_options, show, dry_run=common.dry_run),
        f"bringing VMs back to {host}",
        as_json=common.json,
    )
