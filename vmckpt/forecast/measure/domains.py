"""How fast a domain dirties its memory, measured by QEMU through its libvirtd."""

from dataclasses import replace
from functools import partial

from vmckpt.errors import BusyError, HostDownError, RefusedError
from vmckpt.forecast.measure.dirty_rate import DirtyRate, sampled, while_free
from vmckpt.vm.domains.faults import LibvirtRefusedError
from vmckpt.vm.domains.flags import DomainState
from vmckpt.vm.domains.inventory import Domain
from vmckpt.vm.domains.libvirtd import Libvirtd
from vmckpt.vm.domains.sessions import libvirtd
from vmckpt.vm.paths import lock_path

SOURCE = "libvirt-page-sampling"
# libvirt cannot set the number of pages to sample; QEMU's default is 512 per GiB.
WHY = "libvirt manages the domain; QEMU samples 512 pages of each GiB: accurate to about 40 %"
POLL_S, PATIENCE = 0.2, 50


async def measure_domain(domain: Domain, for_s: float) -> DirtyRate:
    """Measure a running domain for up to `for_s` seconds; migrations take precedence.

    Raises BusyError when an operation has the domain or begins meanwhile, RefusedError when it does
    not run, or its libvirt or QEMU measures none.
    """
    if domain.seen.state is not DomainState.RUNNING:
        raise RefusedError(
            f"'{domain.name}' does not run",
            why=f"it is {domain.state}: it dirties nothing",
            remedy="start it, and measure then",
        )
    async with libvirtd(domain.host) as session:
        rate = partial(_rate, domain, session)
        found = await sampled(rate, for_s, domain.description.memory_bytes)
    return replace(found, source=SOURCE, why=WHY)


async def _rate(domain: Domain, session: Libvirtd, seconds: int) -> float:
    await _require_free(domain, session)
    try:
        await session.begin_dirty_rate(domain.uuid, seconds)
    except LibvirtRefusedError as exc:
        raise RefusedError(
            f"the dirty rate of '{domain.name}' cannot be measured",
            why=exc.why,
            remedy="if another measurement is under way, wait for its end",
        ) from exc
    require_free = partial(_require_free, domain, session)
    await while_free(seconds, require_free)
    for _ in range(PATIENCE):
        if (rate := await session.dirty_rate(domain.uuid)) is not None:
            return rate
        await while_free(POLL_S, require_free)
    raise HostDownError(
        f"libvirt reports no dirty rate of '{domain.name}'",
        why=f"it was asked for {seconds} s, and {PATIENCE * POLL_S:g} s later there was none",
        remedy="look at the domain's QEMU",
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
