"""vmckpt job: the hidden command that runs a job on a VM's host.

It does not import typer, to start fast.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vmckpt.cli.loop import run

if TYPE_CHECKING:
    from vmckpt.jobs.kind import JobKind

# Modules with kinds of job, imported on demand: importing dominates a job's start-up time.
MODULES = {
    "migrate": "vmckpt.migrate.elsewhere.job",
    "checkpoint": "vmckpt.checkpoint.jobs",
    "restore": "vmckpt.checkpoint.jobs",
    "restore-disks": "vmckpt.checkpoint.jobs",
    "fork": "vmckpt.checkpoint.jobs",
    "recover": "vmckpt.checkpoint.jobs",
}


def kind_of(name: str) -> "JobKind[Any, Any]":
    """Find a kind of job by name. Raises UsageError."""
    from vmckpt.errors import UsageError

    if name not in MODULES:
        raise UsageError(
            f"unknown kind of job '{name}'",
            why=f"the kinds are {', '.join(MODULES)}",
            remedy="update vmckpt on this host: another version may have asked for it",
        )
    kinds: tuple[JobKind[Any, Any], ...] = import_module(MODULES[name]).KINDS
    return next(one for one in kinds if one.name == name)


def job(name: str, directory: Path, recover: bool = False, detail: int = 0) -> None:
    """Run or recover the job in a directory; started by vmckpt itself."""
    from vmckpt.events.trace import Detail
    from vmckpt.hosts.inventory.inventory import local_host
    from vmckpt.hosts.processes.scheduling import share_processor
    from vmckpt.jobs import serve

    kind = kind_of(name)
    if recover:
        share_processor()  # its parent may run at low priority
        run(serve.recover(kind, directory))
    else:
        own = run(local_host().own_command())
        run(serve.serve(kind, directory, own, Detail(detail)))
