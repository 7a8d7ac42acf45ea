"""vmckpt observe-domain: as `observe`, for a libvirt domain, whose QEMU its host looks for."""

from typing import Annotated

import typer

from vmckpt.cli.hidden.observe import ForSeconds, LockFile, RamBytes, answer, until_taken


def observe_domain(
    uuid: Annotated[str, typer.Argument(help="UUID of the domain.")],
    ram_bytes: RamBytes,
    for_s: ForSeconds,
    lock: LockFile,
) -> None:
    """Track the pages that the QEMU of a domain of this machine dirties (internal)."""
    from vmckpt.forecast.measure.domains import track_domain

    answer(track_domain(uuid, ram_bytes, for_s, until_taken(lock)))
