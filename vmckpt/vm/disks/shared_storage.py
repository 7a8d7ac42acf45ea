"""Test whether two hosts see the same file, by a marker file beside it.

Not beside a device, see `is_device`: a file there would be in the host's memory.
"""

import os
from pathlib import Path

from vmckpt.errors import StorageError
from vmckpt.hosts.host import Host
from vmckpt.sequence.steps import both


async def is_device(host: Host, path: Path) -> bool:
    """Whether `path` is a device, or would be if it existed, such as an inactive volume."""
    real, is_block = await both(host.resolve(path), host.is_block_device(path))
    return is_block or (real.is_relative_to("/dev") and not real.is_relative_to("/dev/shm"))


async def is_shared(
    source: Host, destination: Host, here: Path, there: Path
) -> tuple[bool | None, str]:
    """Whether a marker written beside a disk by one host is readable on the other.

    Returns None if that is unknown, and the reason.
    """
    real_here, real_there = await both(source.resolve(here), destination.resolve(there))
    marker, token = f".vmckpt-{os.urandom(8).hex()}", os.urandom(8).hex()
    written = real_here.parent / marker
    try:
        await source.write_text(written, token)
        return await destination.read_text(real_there.parent / marker) == token, ""
    except StorageError as exc:
        return None, f"no marker can be written beside it ({exc.why})"
    finally:
        await source.remove(written)
