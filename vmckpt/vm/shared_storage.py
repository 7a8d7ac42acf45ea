"""Whether two hosts see the same file: nobody's path is believed, a marker is written and read."""

import os
from pathlib import Path

from vmckpt.errors import StorageError
from vmckpt.hosts.host import Host
from vmckpt.sequence.steps import both


async def is_shared(source: Host, target: Host, here: Path, there: Path) -> tuple[bool | None, str]:
    """Whether what is written beside a disk through one host is read through the other.

    None when that could not be found out, and why.
    """
    real_here, real_there = await both(source.resolve(here), target.resolve(there))
    if real_here.is_relative_to("/dev"):
        return None, "it is a device, and nothing can be written beside it"
    marker, token = f".vmckpt-{os.urandom(8).hex()}", os.urandom(8).hex()
    written = real_here.parent / marker
    try:
        await source.write_text(written, token)
        return await target.read_text(real_there.parent / marker) == token, ""
    except StorageError as exc:
        return None, f"no marker can be written beside it ({exc.why})"
    finally:
        await source.remove(written)
