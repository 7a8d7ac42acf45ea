"""vmckpt domain-guard: what works on a libvirt domain's running guest starts beside itself."""

import asyncio
from pathlib import Path


def domain_guard(uuid: str, libvirt: Path, mark: Path, pid: int) -> None:
    """Resume a domain whose checkpoint or replication dies (internal)."""
    from vmckpt.vm.domains.guard import watch

    asyncio.run(watch(uuid, libvirt, mark, pid))
