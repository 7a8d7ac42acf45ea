"""vmckpt fork: many running VMs from one instant."""

from typing import TYPE_CHECKING

import typer

from vmckpt.cli.options.checkpoint_options import (
    Count,
    ForksName,
    Overcommit,
    Plugged,
    Source,
    Trust,
    Where,
)
from vmckpt.cli.options.stores import Stored
from vmckpt.cli.options.together import together
from vmckpt.cli.options.which_checkpoint import find, home
from vmckpt.cli.output import Json, run, show, warn

if TYPE_CHECKING:
    from vmckpt.checkpoint.catalogue.catalogue import CatalogueEntry
    from vmckpt.store.sealing.keys import KeySource


@together
def fork(
    what: Source,
    count: Count = 1,
    name: ForksName = None,
    host: Where = None,
    plugged: Plugged = False,
    trust: Trust = False,
    overcommit: Overcommit = False,
    *,
    stored: Stored,
    json: Json = False,
) -> None:
    """Start VMs from a checkpoint or VM that share memory and disks.

    A page or block is copied when one of them writes it.
    """
    from vmckpt.checkpoint.fork.fork import ForkOptions
    from vmckpt.checkpoint.operate import fork_on
    from vmckpt.hosts.inventory.inventory import check_name
    from vmckpt.ui.tables import table

    key = stored.key()
    entry = _instant(what, stored.store, key)
    where = run(home(entry, host, copy=True))
    called = check_name(name or f"{entry.manifest.vm}-fork", "VM")
    options = ForkOptions(entry.id, called, count, plugged, trust, overcommit)
    forks = run(fork_on(where, entry, options, lambda _: None, key)).forks
    for one in forks:
        for text in one.warnings:
            warn(f"warning: {one.name}: {text}")
    failed = [one for one in forks if one.error]
    rows = [(one.name, f"{one.took_ms:.0f} ms", one.error or "running") for one in forks]
    facts = {"checkpoint": entry.id, "forks": [one.to_json() for one in forks]}
    show(facts, table(("fork", "took", "state"), rows), as_json=json)
    if failed:
        warn(f"{len(failed)} of {count} forks did not start")
        raise typer.Exit(7)


def _instant(what: str, store: str | None, key: "KeySource | None") -> "CatalogueEntry":
    """The checkpoint of that name or id, else a new one of the VM of that name.

    Raises NotFoundError when there is neither.
    """
    from vmckpt.checkpoint.operate import to_fork
    from vmckpt.cli.found import find as find_vm
    from vmckpt.errors import NotFoundError

    try:
        return find(what, store, key)
    except NotFoundError as no_checkpoint:
        try:
            vm = run(find_vm(what))
        except NotFoundError:
            raise no_checkpoint from None
    taken = run(vm.checkpoint(store, to_fork(vm.name), lambda _: None, key))
    return find(taken.id, store, key)
