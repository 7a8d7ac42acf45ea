"""start, pause, resume, reboot, stop and rm of a domain, by its libvirtd."""

from shlex import quote

from vmckpt.errors import RefusedError
from vmckpt.sequence.steps import to_the_end
from vmckpt.vm.domains.flags import DomainState
from vmckpt.vm.domains.inventory import Domain, held_domain
from vmckpt.vm.domains.libvirtd import Libvirtd
from vmckpt.vm.power_off import power_off

# Where libvirt's swtpm keeps TPM state: keys, and so access to encrypted disks.
TPM_STATES = "/var/lib/libvirt/swtpm"


async def start_domain(domain: Domain) -> None:
    """Start a stopped domain where it is. Raises RefusedError if it runs."""
    async with held_domain(domain, "vm start") as (now, session):
        if now.is_active:
            is_paused = now.seen.state is DomainState.PAUSED
            raise RefusedError(
                f"'{now.name}' runs already",
                why=f"libvirt on {now.host.name} says that it is {now.state}",
                remedy=f"resume it: vmckpt vm resume {quote(now.name)}"
                if is_paused
                else "there is nothing to do",
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


async def pause_domain(domain: Domain) -> None:
    """Have libvirt pause it; one that is paused is left alone.

    Raises RefusedError if it is off, or a migration has paused it.
    """
    async with held_domain(domain, "vm pause") as (now, session):
        _require_on(now)
        _require_here(now)
        if now.seen.state is not DomainState.PAUSED:
            await session.suspend(now.uuid)


async def resume_domain(domain: Domain) -> None:
    """Have libvirt resume it; one that runs is left alone. Raises as `pause_domain`."""
    async with held_domain(domain, "vm resume") as (now, session):
        _require_on(now)
        _require_here(now)
        if now.seen.state is DomainState.PAUSED:
            await session.resume(now.uuid)


async def reboot_domain(domain: Domain, *, force: bool, timeout_s: float) -> None:
    """Power the guest off by its button and start it again; with `force` reset it at once.

    Raises RefusedError if it does not run, or is transient (it would be gone when it is off);
    TimedOutError if the guest does not power off within `timeout_s`: it continues to run.
    """
    async with held_domain(domain, "vm reboot") as (now, session):
        _require_on(now)
        if now.seen.state is DomainState.PAUSED:
            raise RefusedError(
                f"'{now.name}' is paused",
                why="its guest cannot act on its power button",
                remedy=f"resume it first: vmckpt vm resume {quote(now.name)}",
            )
        if force:
            await session.reset(now.uuid)
            return
        if not now.seen.persistent:
            raise RefusedError(
                f"'{now.name}' is a transient domain",
                why="libvirt forgets it when it is off, so that it could not be started again",
                remedy="reboot it from inside the guest, or reset it: --force",
            )
        await power_off(
            now.name,
            lambda: session.press_power_button(now.uuid),
            lambda: _runs(now, session),
            timeout_s,
        )
        await to_the_end(session.start(now.uuid))


def _require_on(domain: Domain) -> None:
    if not domain.is_active:
        raise RefusedError(
            f"'{domain.name}' is off",
            why=f"libvirt on {domain.host.name} says that it is {domain.state}",
            remedy=f"start it: vmckpt vm start {quote(domain.name)}",
        )


def _require_here(domain: Domain) -> None:
    if domain.is_paused_to_move:
        raise RefusedError(
            f"'{domain.name}' is paused by a migration",
            why=f"libvirt on {domain.host.name} says so; its guest may run on another host",
            remedy="wait until the migration has ended (virsh domjobinfo); if it has, and no other "
            f"host runs the guest: virsh resume {quote(domain.name)}",
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
