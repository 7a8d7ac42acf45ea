"""The network back ends through which a VM sends."""

import re
from collections.abc import Sequence

from vmckpt.epoch.output import try_hold
from vmckpt.errors import RefusedError
from vmckpt.qemu.inside import query_networks
from vmckpt.qemu.monitor import CommandRefusedError, Monitor
from vmckpt.vm.inventory import Vm

# The guest's own ends of its networks, and ports between them.
_INWARD = re.compile(r"(nic|hubport)\b")


async def senders(vm: Vm, monitor: Monitor) -> list[str]:
    """Their names in QEMU, in order: vmckpt's own, of others those that their QEMU has.

    Raises as `Monitor.ask` does.
    """
    if vm.spec.adopted is None and not vm.qemu.domain:
        return [f"net{number}" for number in range(len(vm.spec.nics))]
    found = await query_networks(monitor)
    return [name for name, words in found.items() if not _INWARD.match(words)]


async def require_holdable(vm: Vm, monitor: Monitor, netdevs: Sequence[str]) -> None:
    """Raises RefusedError if QEMU cannot hold what they send; QEMU itself is asked."""
    try:
        await try_hold(monitor, netdevs)
    except CommandRefusedError as exc:
        raise RefusedError(
            f"the network output of '{vm.name}' cannot be held",
            why=f"QEMU has no filter for its networks ({', '.join(netdevs)}): {exc.description}",
            remedy="take a checkpoint of this VM alone; or migrate it first: vmckpt then sets up "
            "its networks, without vhost",
        ) from exc
