"""vmckpt observe: what another vmckpt runs on the host of a VM whose dirty rate it measures."""

from pathlib import Path
from typing import Annotated

import typer

from vmckpt.cli.output import run


def observe(
    pid: Annotated[int, typer.Argument(help="Process id of QEMU.")],
    ram_file: Annotated[Path, typer.Argument(help="File of the guest's memory.")],
    ram_bytes: Annotated[int, typer.Argument(help="Size of the guest's memory, in bytes.")],
    for_s: Annotated[float, typer.Argument(help="Duration of the measurement, in seconds.")],
    lock: Annotated[Path, typer.Argument(help="Lock file; tracking ends once it is taken.")],
) -> None:
    """Track the pages that a QEMU of this machine dirties (internal)."""
    import json

    from vmckpt.forecast.measure.dirty_rate import track
    from vmckpt.hosts.lock import read_owner

    async def is_free() -> bool:
        return read_owner(lock) is None

    try:
        found = run(track(pid, ram_file, ram_bytes, for_s, is_free))
        print(json.dumps({"found": found.to_json() if found else None}))
    except OSError as exc:
        print(json.dumps({"errno": exc.errno, "why": exc.strerror or str(exc)}))
