"""What is everywhere at one moment: hosts, VMs, replications. For `top` and `metrics`."""

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from vmckpt.drivers.driver import VmInfo
    from vmckpt.errors import VmckptError


class HostNow(NamedTuple):
    """A host; `free_bytes` is memory that new guests could take, None of one that is silent."""

    name: str
    free_bytes: int | None


class Overview(NamedTuple):
    """`replications` are the statuses of all their sides; `silent` says why not all is there."""

    hosts: "list[HostNow]"
    vms: "list[VmInfo]"
    replications: list[dict[str, Any]]
    silent: "list[VmckptError]"


async def look() -> Overview:
    """Ask all hosts; those that do not answer keep nobody back."""
    from vmckpt.drivers.find import look_at_all
    from vmckpt.hosts.every import ask_every
    from vmckpt.hosts.host import Host
    from vmckpt.hosts.inventory import all_hosts
    from vmckpt.replicate.sides import all_sides

    async def now(host: Host) -> HostNow:
        return HostNow(host.name, await host.available_memory_bytes())

    everywhere = all_hosts()
    up = {host.name: host for host in (await ask_every(everywhere, now)).given}
    found = await look_at_all()
    sides = [side for some in (await all_sides(everywhere)).given for side in some]
    return Overview(
        [up.get(host.name, HostNow(host.name, None)) for host in everywhere],
        found.given,
        [side.status | {"host": side.host.name, "answers": side.answers} for side in sides],
        found.silent,
    )
