"""Memory that is reserved for a replication's service, and that it stays within."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from vmckpt.errors import RefusedError
from vmckpt.hosts.host import Host, Promise
from vmckpt.preflight.replication.memory import figures, remedy
from vmckpt.vm.paths import IN_MEMORY, QemuDir
from vmckpt.vm.spec.spec import Spec


@asynccontextmanager
async def promised(
    host: Host, files: QemuDir, spec: Spec, role: str, need_bytes: int
) -> AsyncIterator[None]:
    """Reserve this much memory for the process, for the block. Raises RefusedError: not free."""
    directory = files.memory(IN_MEMORY)
    await host.make_private_dir(directory)
    record = directory / f"promised-{role}"
    promise = Promise(record, need_bytes, None, is_private=True, holder="")
    found = await host.promise_memory(promise, overcommit=spec.overcommit)
    if not found.is_given:
        what = f"for the {role}'s service"
        raise RefusedError(
            f"{host.name} has no memory for the replication of '{spec.name}'",
            why=figures(host, need_bytes, what, found.free_bytes, found.promised_bytes),
            remedy=remedy(host),
        )
    try:
        yield
    finally:
        await host.remove(record)
