"""vmckpt observe-domain: as `observe`, for a libvirt domain, whose QEMU its host looks for."""

from typing import Annotated

import typer

from vmckpt.cli.hidden.observe import ForSeconds, LockFile, answer, until_taken

RamBlocks = Annotated[
    str, typer.Argument(help="Sizes of the blocks of the guest's memory, in bytes: N,N,...")
]


def observe_domain(
    uuid: Annotated[str, typer.Argument(help="UUID of the domain.")],
    blocks: RamBlocks,
    for_s: ForSeconds,
    lock: LockFile,
) -> None:
    """Track the pages that the QEMU of a domain of this machine dirties (internal)."""
    from vmckpt.forecast.measure.domains import track_domain

    sizes = [int(size) for size in blocks.split(",")]
    answer(track_domain(uuid, sizes, for_s, until_taken(lock)))
