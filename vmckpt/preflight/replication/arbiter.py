"""Whether the arbiter survives the loss of either host; otherwise it stops the VM permanently.

If the arbiter fails with the primary's host, the standby may not take over. If it fails with the
standby's host, the guest is paused when its lease expires. Neither shows before that day.
"""

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from urllib.parse import urlsplit

from vmckpt.hosts.host import Host
from vmckpt.options.replication import ETCD, ReplicationOptions
from vmckpt.preflight.finding import OK, WARN, Finding
from vmckpt.store.backends.file_systems import mounted_at

# File systems on a host's own disk, or in memory.
_OWN = frozenset(
    {
        *("bcachefs", "btrfs", "exfat", "ext2", "ext3", "ext4", "f2fs", "jfs"),
        *("overlay", "ramfs", "reiserfs", "tmpfs", "vfat", "xfs", "zfs"),
    }
)
_MOUNTS = Path("/proc/self/mountinfo")
# A host's addresses: for IPv4 those that a line names and the next one calls local; for IPv6 each.
_IPV4, _IPV6 = Path("/proc/net/fib_trie"), Path("/proc/net/if_inet6")


async def arbiter_check(
    primary: Host, standby: Host, options: ReplicationOptions
) -> AsyncIterator[Finding]:
    """Warn if the arbiter fails with one of the hosts. On one machine everything does."""
    location = options.arbiter
    if primary.is_this_machine and standby.is_this_machine:
        yield Finding("arbiter", OK, f"leases are at {location}, on this machine as all else")
        return
    here, there = await asyncio.gather(_lost_with(primary, location), _lost_with(standby, location))
    if not (here or there):
        reason = f"the arbiter at {location} is on neither host, as far as is seen"
        yield Finding("arbiter", OK, reason)
        return
    reason = "; ".join(how for how in (here, there) if how)
    if here:
        reason += f"; if {primary.name} fails, {standby.name} may not take over"
    if there:
        reason += f"; if {standby.name} fails, the guest is paused until `replicate stop`"
    remedy = (
        "keep leases where the loss of one host leaves a majority: an etcd cluster with members on "
        "three machines, or a directory of a third one"
    )
    yield Finding("arbiter", WARN, reason, remedy)


async def _lost_with(host: Host, location: str) -> str:
    """How the arbiter is lost with that host; "": it is not, as far as is known."""
    if location.startswith(ETCD):
        urls = location.removeprefix(ETCD).split(",")
        addresses = await _addresses(host)
        on_it = [url for url in urls if await _is_at(url, addresses)]
        has_majority = len(urls) - len(on_it) > len(urls) // 2
        if has_majority or not on_it:
            return ""
        return (
            f"{len(on_it)} of the {len(urls)} members of etcd that are named "
            f"({', '.join(on_it)}) {'is' if len(on_it) == 1 else 'are'} on {host.name}"
        )
    directory = str(await host.resolve(Path(location)))
    found = mounted_at(directory, await host.read_text(_MOUNTS) or "")
    if found is None or found.kind not in _OWN:
        return ""
    return f"{location} is on {host.name}'s own {found.kind}"


async def _addresses(host: Host) -> frozenset[str]:
    """All addresses of the host, including loopback ones: they mean each host itself."""
    named = {host.migration_address, host.second_address or host.migration_address}
    own = await asyncio.gather(*(_resolved(name) for name in named))
    tables = [await host.read_text(path) or "" for path in (_IPV4, _IPV6)]
    return frozenset().union(*own, local_ipv4(tables[0]), local_ipv6(tables[1]))


def local_ipv4(fib_trie: str) -> Iterable[str]:
    """A host's own addresses, from the kernel's routing table."""
    lines = fib_trie.splitlines()
    for line, after in pairwise(lines):
        if after.strip() == "/32 host LOCAL":
            yield line.replace("|--", "").strip()


def local_ipv6(if_inet6: str) -> Iterable[str]:
    """The same for IPv6, whose table has 32 hex digits each."""
    for line in if_inet6.splitlines():
        with suppress(ValueError):  # another kernel may have another format
            yield str(ipaddress.IPv6Address(bytes.fromhex(line.partition(" ")[0])))


async def _is_at(url: str, addresses: frozenset[str]) -> bool:
    try:
        host = urlsplit(url).hostname
    except ValueError:  # the service says so
        return False
    if host is None:
        return False
    found = await _resolved(host)
    return any(one in addresses or ipaddress.ip_address(one).is_loopback for one in found)


async def _resolved(name: str) -> Sequence[str]:
    """The addresses of a name, as this machine resolves it; empty if it cannot."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ()
    return [str(address[0]).partition("%")[0] for *_, address in found]
