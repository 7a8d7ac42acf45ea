"""start, stop and rm of a domain, by its libvirtd."""

from shlex import quote

from vmckpt.errors import RefusedError
from vmckpt.vm.domains.inventory import Domain, held_domain
from vmckpt.vm.domains.libvirtd import Libvirtd
from vmckpt.vm.power_off import power_off

# Where libvirt's swtpm keeps TPM state: keys, and so access to encrypted disks.
TPM_STATES = "/var/lib/libvirt/swtpm"


async def start_domain(domain: Domain) -> None:
    """Start a stopped domain where it is. Raises RefusedError if it runs."""
    async with held_domain(domain, "vm start") as (now, session):
        if now.is_active:
            raise RefusedError(
                f"'{now.name}' runs already",
                why=f"libvirt on {now.host.name} says that it is {now.state}",
                remedy="there is nothing to do",
            )
        await session.start(now.uuid)


async def stop_domain(domain: Domain, *, force: bool, timeout_s: float) -> None:
    """Press the power button and wait for the end; with `force` end it at once.

    A stopped domain is left alone. Raises TimedOutError if the guest does not power off within
    `timeout_s`: it continues to run.
    """
    async with held_domain(domain, "vm stop") as (now, session):
        if now.is_active and force:
            await session.destroy(now.uuid)
        elif now.is_active:
            await power_off(
                now.name,
                lambda: session.press_power_button(now.uuid),
                lambda: _runs(now, session),
                timeout_s,
            )


async def _runs(domain: Domain, session: Libvirtd) -> bool:
    seen = await session.find(domain.uuid)  # a transient domain disappears when it is off
    return seen is not None and Domain(domain.host, seen, domain.description).is_active


async def remove_domain(domain: Domain, *, with_tpm: bool = False) -> str | None:
    """Undefine a stopped domain; its files and its TPM's state stay.

    Returns where TPM state remains, if any: a new domain with the same UUID uses it. `with_tpm`:
    remove it too. Raises RefusedError while the domain runs.
    """
    async with held_domain(domain, "vm rm") as (now, session):
        if now.is_active:
            raise RefusedError(
                f"'{now.name}' runs",
                why="only a stopped VM can be removed",
                remedy=f"stop it first: vmckpt vm stop {quote(now.name)}",
            )
        if not now.description.has_tpm:
            await session.undefine(now.uuid)
            return None
        await session.undefine(now.uuid, keeps_tpm=not with_tpm)
        return None if with_tpm else f"{TPM_STATES}/{now.uuid}"
