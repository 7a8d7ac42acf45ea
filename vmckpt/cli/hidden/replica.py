"""vmckpt replica: what another vmckpt starts on both hosts of a replication."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from vmckpt.cli.options.replicate_options import StandbyIsDead
from vmckpt.cli.output import run


class ServiceTask(StrEnum):
    """A service; or what is done when the primary's has died, twice, or the standby's."""

    primary = "primary"
    standby = "standby"
    recover = "recover"
    release = "release"
    abandon = "abandon"
    discard = "discard"
    undo = "undo"
    keep = "keep"
    commit_overlays = "fold"
    examine = "examine"
    anew = "anew"


def replica(
    task: Annotated[
        ServiceTask, typer.Argument(help="Which service, or what to do after its death.")
    ],
    directory: Annotated[
        Path, typer.Argument(help="Directory of the request; of `examine` also a claim's file.")
    ],
    standby_is_dead: StandbyIsDead = False,
) -> None:
    """Replicate as was written down there (internal).

    With --standby-is-dead, `release` takes the term from a standby.
    """
    from vmckpt.hosts.inventory.inventory import local_host

    if task is ServiceTask.standby:
        from vmckpt.replicate.standby.standby import serve_standby

        run(serve_standby(directory))
    elif task is ServiceTask.primary:
        from vmckpt.replicate.primary.primary import serve_primary

        run(serve_primary(directory, run(local_host().own_command())))
    elif task in (ServiceTask.discard, ServiceTask.undo, ServiceTask.keep):
        from vmckpt.replicate.operator.leftover_copies import CopiesFate, settle_here

        run(settle_here(directory, CopiesFate(task.value)))
    elif task is ServiceTask.commit_overlays:
        from vmckpt.replicate.disks.overlays import commit_overlays

        run(commit_overlays(directory))
    elif task is ServiceTask.abandon:
        from vmckpt.replicate.recovery import abandon

        run(abandon(directory))
    elif task is ServiceTask.anew:
        from vmckpt.replicate.primary.claim import take_anew

        run(take_anew(directory))
    elif task is ServiceTask.examine:
        from json import dumps

        from vmckpt.replicate.primary.claim import examine

        answer = run(examine(directory))
        print(dumps(answer._asdict() | {"right": answer.right.name}))
    else:
        from vmckpt.replicate.recovery import recover

        is_release = task is ServiceTask.release
        run(recover(directory, at_any_rate=is_release, standby_is_dead=standby_is_dead))
