"""start, stop, rm of a domain, as its libvirtd does them."""

from shlex import quote

from vmckpt.errors import RefusedError
from vmckpt.vm.domains.inventory import Domain, held_domain
from vmckpt.vm.domains.libvirtd import Libvirtd
from vmckpt.vm.power_off import power_off

# Where libvirt has swtpm keep what a domain's TPM holds: keys, and with them encrypted disks.
TPM_STATES = "/var/lib/libvirt/swtpm"


async def start_domain(domain: Domain) -> None:
    """Start a stopped domain where it is. Raises RefusedError when it runs."""
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

    A stopped domain stays as it is. Raises TimedOutError when the guest does not power off in
    `timeout_s`: it goes on running.
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
    seen = await session.find(domain.uuid)  # a transient domain is gone when it is off
    return seen is not None and Domain(domain.host, seen, domain.description).is_active


async def remove_domain(domain: Domain, *, with_tpm: bool = False) -> str | None:
    """Forget a stopped domain; its files stay, and where it has a TPM what that holds.

    Where that is, if anything stays of it: a domain of the same UUID has it again. `with_tpm`: it
    goes too. Raises RefusedError while the domain runs.
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
