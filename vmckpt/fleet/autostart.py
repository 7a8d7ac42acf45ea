"""Start the VMs of this machine that start with it; for a unit, when it has booted."""

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

from vmckpt.drivers.direct import DirectVm
from vmckpt.drivers.find import find_own
from vmckpt.errors import VmckptError
from vmckpt.hosts.inventory.drained import is_closed
from vmckpt.hosts.inventory.inventory import local_host
from vmckpt.vm.inventory import inspect_all

RETRY_S = 10.0


class Autostarted(NamedTuple):
    """A VM that starts with its host. `error` is why it did not."""

    vm: str
    error: VmckptError | None


async def autostart(tell: Callable[[str], None], *, retry_s: float = 0.0) -> list[Autostarted]:
    """Start those that are off, one after another; an error of one does not affect the others.

    Those that cannot be started yet are tried again for `retry_s`: when several hosts boot, an
    arbiter may not answer yet, or storage is missing. A VM whose files cannot be read counts as
    one. One that turns out to be on another host, which took it over or got it by a migration, is
    that host's to start; a host that is drained meanwhile starts no more. `tell` receives a
    sentence about each interrupted operation that was ended first. Raises what keeps this machine's
    VMs from being listed.
    """
    until_s = time.monotonic() + retry_s
    inspected = await inspect_all([local_host()])
    if inspected.unanswered:
        raise inspected.silent[0]
    off = [one.vm for one in inspected.given if one.state == "stopped"]
    wanted = sorted(vm.name for vm in off if vm.spec.autostart)
    done = {name: await _started(name, tell) for name in wanted}
    while time.monotonic() < until_s and (failed := _failed(done)):
        await asyncio.sleep(RETRY_S)
        if await is_closed(local_host()):
            continue  # it was drained meanwhile
        done |= {name: await _started(name, tell) for name in failed}
    unread = [Autostarted(one.vm, one.error) for one in inspected.unread]
    return [*unread, *[one for one in done.values() if one is not None]]


def _failed(done: dict[str, Autostarted | None]) -> list[str]:
    return [name for name, one in done.items() if one is not None and one.error is not None]


async def _started(name: str, tell: Callable[[str], None]) -> Autostarted | None:
    """None: it is not this machine's, or an operator has started it meanwhile, or will."""
    try:
        vm = await find_own(name, tell)
        if vm.host.name != local_host().name or not vm.spec.autostart or await vm.is_alive():
            return None
        await DirectVm(vm).start()
    except VmckptError as exc:
        return Autostarted(name, exc)
    return Autostarted(name, None)
