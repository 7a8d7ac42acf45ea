"""Reasons to refuse a host's entry before it is added to the inventory."""

from collections.abc import Container

from vmckpt.errors import HostDownError, RefusedError, StorageError, UsageError
from vmckpt.hosts.every import ask_every
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory.entries import LOCAL
from vmckpt.hosts.inventory.identity import host_identity, identity_path, read_host_identity
from vmckpt.hosts.inventory.inventory import all_hosts, host_of
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.ssh.entry import SshEntry
from vmckpt.preflight.vm_users import obstacle


async def require_usable(entry: LocalHost | SshEntry, changed: Container[str]) -> None:
    """Raises UsageError: two of its addresses are the same; RefusedError: no libvirtd listens at
    the given address, its VMs cannot have the uids, or the inventory has the host under another
    name; HostDownError. The host is asked only about what is `changed`.
    """
    if entry.second_address == entry.migration_address:
        raise UsageError(
            f"'{entry.name}' has no second address",
            why=f"{entry.second_address} receives migrations too",
            remedy="name an address on another network, or say --second-addr none",
        )
    if entry.libvirt and "libvirt" in changed:
        await _require_socket(entry)
    if entry.vm_uids and "vm_uids" in changed:
        await _require_free(entry)
    if "address" in changed:
        await _require_another(entry)


async def _require_socket(entry: LocalHost | SshEntry) -> None:
    host, socket = host_of(entry), entry.libvirt
    await host.require_up()
    if socket is None:
        return
    try:
        (await host.connect(socket)).close()
    except HostDownError as exc:
        raise RefusedError(
            f"no libvirtd listens at {socket} on {entry.name}",
            why=exc.why,
            remedy=f"start it (systemctl start libvirtd), or leave it out: vmckpt host set "
            f"{entry.name} --libvirt none",
        ) from exc


async def _require_free(entry: LocalHost | SshEntry) -> None:
    host, uids = host_of(entry), entry.vm_uids
    await host.require_up()
    if uids is not None and (why := await obstacle(host, uids)):
        raise RefusedError(
            f"the VMs of {host.name} cannot have users of their own",
            why=why,
            remedy="run vmckpt as root there, and name uids that no account uses",
        )


async def _require_another(entry: LocalHost | SshEntry) -> None:
    """Otherwise two hosts would have its VMs, and every command would refuse to work on them."""
    try:
        identity = await host_identity(host_of(entry))
    except StorageError:  # its disk is full: that makes no difference here
        return

    async def known_as(host: Host) -> str | None:
        return host.name if await read_host_identity(host) == identity else None

    others = [host for host in all_hosts() if host.name != entry.name]
    if found := next(filter(None, (await ask_every(others, known_as)).given), None):
        raise RefusedError(
            f"'{entry.name}' is the same host as '{found}'",
            why=f"the identity of both is {identity}, in {identity_path(host_of(entry))}: they are "
            "one state directory of one machine, or one is a copy",
            remedy=(
                f"use '{found}', or forget that name first: vmckpt host rm {found}"
                if found != LOCAL
                else "it is this machine, which is 'local': vmckpt host set local --libvirt SOCKET "
                "--migration-addr ADDRESS"
            )
            + f"; if '{entry.name}' is another machine, cloned from it: remove that file there",
        )
