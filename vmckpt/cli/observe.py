"""vmckpt observe: what another vmckpt runs on the host of a VM whose dirty rate it measures."""

from pathlib import Path
from typing import Annotated

import typer

from vmckpt.cli.output import run


def observe(
    pid: Annotated[int, typer.Argument(help="The process of QEMU.")],
    ram_file: Annotated[Path, typer.Argument(help="The guest's memory.")],
    for_s: Annotated[float, typer.Argument(help="Seconds.")],
    lock: Annotated[Path, typer.Argument(help="Given way to whoever holds it.")],
) -> None:
    """Track the pages that a QEMU of this machine dirties; people have no use for it."""
    from vmckpt.vm.observe_there import observe_here

    run(observe_here(pid, ram_file, for_s, lock))
