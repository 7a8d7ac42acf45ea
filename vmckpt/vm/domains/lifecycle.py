"""start, stop, rm of a domain, as its libvirtd does them."""

import asyncio
import time

from vmckpt.errors import RefusedError, TimedOutError
from vmckpt.vm.domains.inventory import Domain, held_domain
from vmckpt.vm.domains.libvirtd import Libvirtd

STOP_POLL_S, PRESS_AGAIN_S = 0.1, 5.0


async def start_domain(domain: Domain) -> None:
    """Start a stopped domain where it is. Raises RefusedError when it runs."""
    async with held_domain(domain, "vm start") as (now, session):
        if now.is_active:
            raise RefusedError(
                f"'{now.name}' runs already",
                why=f"libvirt on {now.host.name} says that it is {now.state}",
                remedy="nothing is to be done",
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
            await _power_off(now, session, timeout_s)


async def _power_off(domain: Domain, session: Libvirtd, timeout_s: float) -> None:
    began_s, pressed_s = time.monotonic(), 0.0
    while await _runs(domain, session):
        now_s = time.monotonic()
        if now_s > began_s + timeout_s:
            raise TimedOutError(
                f"'{domain.name}' did not power off within {timeout_s:g} s",
                why="the guest did not act on its power button",
                remedy="wait longer (--timeout), or end it at once with --force",
            )
        if now_s > pressed_s + PRESS_AGAIN_S:
            # A guest that is just booting does not see the first one.
            pressed_s = now_s
            await session.press_power_button(domain.uuid)
        await asyncio.sleep(STOP_POLL_S)


async def _runs(domain: Domain, session: Libvirtd) -> bool:
    seen = await session.find(domain.uuid)  # a transient domain is gone when it is off
    return seen is not None and Domain(domain.host, seen, domain.description).is_active


async def remove_domain(domain: Domain) -> None:
    """Forget a stopped domain; its files stay. Raises RefusedError while it runs."""
    async with held_domain(domain, "vm rm") as (now, session):
        if now.is_active:
            raise RefusedError(
                f"'{now.name}' runs",
                why="only a stopped VM can be removed",
                remedy=f"stop it first: vmckpt vm stop {now.name}",
            )
        await session.undefine(now.uuid)
