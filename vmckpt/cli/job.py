"""vmckpt job: what another vmckpt starts on a VM's host.

It imports no typer: a migration waits for it.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vmckpt.cli.loop import run

if TYPE_CHECKING:
    from vmckpt.jobs.kind import Kind

# Where the kinds of job are: importing that is most of what starting one costs.
MODULES = {
    "migrate": "vmckpt.migrate.job",
    "checkpoint": "vmckpt.checkpoint.jobs",
    "restore": "vmckpt.checkpoint.jobs",
    "restore-disks": "vmckpt.checkpoint.jobs",
    "fork": "vmckpt.checkpoint.jobs",
    "recover": "vmckpt.checkpoint.jobs",
}


def kind_of(name: str) -> "Kind[Any, Any]":
    """A kind of job. Raises UsageError: there is none of that name."""
    from vmckpt.errors import UsageError

    if name not in MODULES:
        raise UsageError(
            f"'{name}' is no kind of job", why=f"there are {', '.join(MODULES)}", remedy="-"
        )
    kinds: tuple[Kind[Any, Any], ...] = import_module(MODULES[name]).KINDS
    return next(one for one in kinds if one.name == name)


def job(name: str, directory: Path, recover: bool = False) -> None:
    """Do the job of a kind that is written down there; people have no use for it."""
    from vmckpt.hosts.inventory import local_host
    from vmckpt.hosts.scheduling import take_turns
    from vmckpt.jobs import serve

    kind = kind_of(name)
    if recover:
        take_turns()  # it was begun by a process that may have come last
        run(serve.recover(kind, directory))
    else:
        run(serve.serve(kind, directory, run(local_host().own_command())))
