"""Start the VMs of this machine that start with it; for a unit, when it has booted."""

from collections.abc import Callable
from typing import NamedTuple

from vmckpt.drivers.direct import DirectVm
from vmckpt.drivers.find import find_own
from vmckpt.errors import VmckptError
from vmckpt.hosts.inventory.inventory import local_host
from vmckpt.vm.inventory import inspect_all


class Autostarted(NamedTuple):
    """A VM that starts with its host. `error` is why it did not."""

    vm: str
    error: VmckptError | None


async def autostart(tell: Callable[[str], None]) -> list[Autostarted]:
    """Start those that are off, one after another; an error of one does not affect the others.

    A VM whose files cannot be read counts as one. One that turns out to be on another host, which
    took it over or got it by a migration, is that host's to start. `tell` receives a sentence about
    each interrupted operation that was ended first.
    """
    inspected = await inspect_all([local_host()])
    off = [one.vm for one in inspected.given if one.state == "stopped"]
    wanted = sorted(vm.name for vm in off if vm.spec.autostart)
    unread = [Autostarted(one.vm, one.error) for one in inspected.unread]
    done = [await _started(name, tell) for name in wanted]
    return [*unread, *[one for one in done if one is not None]]


async def _started(name: str, tell: Callable[[str], None]) -> Autostarted | None:
    """None: it is not this machine's."""
    try:
        vm = await find_own(name, tell)
        if vm.host.name != local_host().name:
            return None
        await DirectVm(vm).start()
    except VmckptError as exc:
        return Autostarted(name, exc)
    return Autostarted(name, None)
