"""vmckpt domain-guard: what a checkpoint of a libvirt domain starts beside itself."""

import asyncio
from pathlib import Path


def domain_guard(uuid: str, libvirt: Path, mark: Path, pid: int) -> None:
    """Resume a domain whose checkpoint dies; not for users."""
    from vmckpt.checkpoint.domains.guard import watch

    asyncio.run(watch(uuid, libvirt, mark, pid))
