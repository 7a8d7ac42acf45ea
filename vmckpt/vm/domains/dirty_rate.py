"""How fast a domain dirties its memory: QEMU's own page sampling, which its libvirtd asks for."""

import asyncio

from vmckpt.errors import BusyError, HostDownError, RefusedError
from vmckpt.memory.ram_file import PAGE_BYTES
from vmckpt.vm.dirty_rate import DirtyRate, sampled
from vmckpt.vm.domains.flags import State
from vmckpt.vm.domains.inventory import Domain, seen_again
from vmckpt.vm.domains.libvirtd import Libvirtd
from vmckpt.vm.domains.sessions import libvirtd
from vmckpt.vm.paths import lock_path

WHY = "its QEMU is libvirt's"
POLL_S, LATE_S = 0.1, 10.0
_RUNNING = frozenset({State.RUNNING, State.BLOCKED})


async def measure(domain: Domain, for_s: float) -> DirtyRate:
    """Watch the running domain for `for_s` seconds, 1 s at least.

    Raises BusyError when it is migrated or saved, or that begins meanwhile, RefusedError when it
    does not run.
    """
    async with libvirtd(domain.host) as session:
        now = await seen_again(domain, session)
        if now.seen.state not in _RUNNING:
            raise RefusedError(
                f"'{now.name}' does not run",
                why=f"its state is '{now.state}': it dirties nothing",
                remedy="let it run, and measure then",
            )

        async def rate_bytes_per_s(length_s: int) -> float:
            return await _rate(now, session, length_s)

        total_pages = now.description.memory_bytes // PAGE_BYTES
        return await sampled(total_pages, for_s, WHY, rate_bytes_per_s)


async def _rate(domain: Domain, session: Libvirtd, length_s: int) -> float:
    await _require_free(domain, session)
    await session.start_dirty_rate(domain.uuid, length_s)
    await asyncio.sleep(length_s)
    for _ in range(round(LATE_S / POLL_S)):
        await _require_free(domain, session)
        if (rate := await session.dirty_rate_bytes_per_s(domain.uuid)) is not None:
            return rate
        await asyncio.sleep(POLL_S)
    raise HostDownError(
        f"libvirt on {domain.host.name} gives no dirty rate of '{domain.name}'",
        why=f"it was asked for {length_s} s, and {LATE_S:g} s later there was none",
        remedy=f"see virsh domstats --dirtyrate {domain.name} there",
    )


async def _require_free(domain: Domain, session: Libvirtd) -> None:
    held = await domain.host.lock_owner(lock_path(domain.host.state_dir, domain.name))
    if held is None and not (await session.job(domain.uuid)).active:
        return
    who = f"{held.action} (run {held.run}, pid {held.pid})" if held else "a job of libvirt's"
    raise BusyError(
        f"'{domain.name}' is busy",
        why=f"held by {who}: the dirty rate is not measured meanwhile",
        remedy="wait for it to end",
    )
