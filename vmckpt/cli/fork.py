"""vmckpt fork: many running VMs from one instant."""

import typer

from vmckpt.cli.checkpoint_options import (
    Count,
    ForksName,
    Overcommit,
    Plugged,
    Source,
    Trust,
    Where,
)
from vmckpt.cli.output import Json, run, show, warn
from vmckpt.cli.which_checkpoint import KeyCommand, KeyFile, StorePlace, home, key_source


def fork(
    what: Source,
    count: Count = 1,
    name: ForksName = None,
    host: Where = None,
    plugged: Plugged = False,
    trust: Trust = False,
    overcommit: Overcommit = False,
    store: StorePlace = None,
    key_file: KeyFile = None,
    key_command: KeyCommand = None,
    json: Json = False,
) -> None:
    """Make running VMs of one instant, which share memory and disks until they write."""
    from vmckpt.checkpoint.fork import Wish
    from vmckpt.checkpoint.operate import fork_on
    from vmckpt.cli.fork_source import instant
    from vmckpt.hosts.inventory import check_name
    from vmckpt.ui.tables import table

    key = key_source(key_file, key_command)
    entry = instant(what, store, key)
    where = run(home(entry, host, copy=True))
    called = check_name(name or f"{entry.manifest.vm}-fork", "VM")
    wish = Wish(entry.id, called, count, plugged, trust, overcommit)
    result = run(fork_on(where, entry, wish, lambda _: None, key))
    for one in result["forks"]:
        for text in one["warnings"]:
            warn(f"warning: {one['name']}: {text}")
    failed = [one for one in result["forks"] if one["error"]]
    rows = [
        (one["name"], f"{one['took_ms']:.0f} ms", one["error"] or "runs") for one in result["forks"]
    ]
    show({"checkpoint": entry.id, **result}, table(("fork", "took", "state"), rows), as_json=json)
    if failed:
        warn(f"{len(failed)} of {count} forks did not start")
        raise typer.Exit(7)
