"""What a host provides and lacks for running VMs and taking part in migrations."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

from vmckpt.errors import (
    HostDownError,
    OperationFailedError,
    OutcomeUnknownError,
    RefusedError,
    StorageError,
    UsageError,
)
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory.inventory import all_hosts, find_entry, local_host
from vmckpt.hosts.inventory.paste import Paste
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.pki.identity import fault_of, read_identity
from vmckpt.hosts.processes.kernel import PageTracking
from vmckpt.hosts.ssh.entry import SshEntry
from vmckpt.preflight import destination_host, vm_users
from vmckpt.preflight.finding import OK, REFUSE, WARN, Finding, ask
from vmckpt.preflight.host import libvirtd as domain_checks
from vmckpt.preflight.host import remedies
from vmckpt.units import format_size
from vmckpt.vm.probe import abilities, kvm_obstacle

# Less is not refused, but few guests fit.
LITTLE_MEMORY_BYTES = 512 << 20
LITTLE_ROOM_BYTES = 1 << 30
# linux/capability.h
CAP_NET_ADMIN = 1 << 12
# A certificate that expires sooner should be replaced now.
SOON_DAYS = 30


@dataclass(frozen=True, slots=True)
class HostReport:
    """Results: `facts` for programs, `checks` with their fixes."""

    facts: dict[str, Any]
    checks: tuple[Finding, ...]

    @property
    def fit(self) -> bool:
        """Whether no check refuses."""
        return all(check.verdict != REFUSE for check in self.checks)


async def check_host(host: Host, operator: Host, entry: LocalHost | SshEntry) -> HostReport:
    """Run all checks on a host; `entry` is its entry in the inventory.

    Each remedy is a command for the operator's shell; the host's clock is compared with the
    operator's. The checks end where the host cannot write. Raises HostDownError,
    OutcomeUnknownError: the host does not answer.
    """
    await host.require_up()
    facts: dict[str, Any] = {}
    paste = Paste(entry, root=await host.user_id() == 0)
    checks = list[Finding]()
    try:
        async for check in _all(host, operator, paste, facts):
            checks.append(check)
    except StorageError as exc:
        reason = f"{exc.what}: {exc.why}; the checks that follow were not made"
        checks.append(Finding("storage", REFUSE, reason, f"# {exc.remedy}"))
    return HostReport(facts, tuple(checks))


async def check_hosts(hosts: Iterable[Host]) -> list[HostReport]:
    """Check each host from this machine; for one that does not answer, that is the finding."""

    async def check(host: Host) -> HostReport:
        entry = find_entry(host.name)
        try:
            return await check_host(host, local_host(), entry)
        except (HostDownError, OutcomeUnknownError) as exc:
            remedy = remedies.reached_anew(entry, exc.remedy)
            silent = Finding("reachable", REFUSE, f"{exc.what}: {exc.why}", remedy)
            return HostReport({}, (silent,))

    return await asyncio.gather(*(check(host) for host in hosts))


async def _all(
    host: Host, operator: Host, paste: Paste, facts: dict[str, Any]
) -> AsyncIterator[Finding]:
    yield await _state_dir(host, paste)
    yield await _room(host, paste, facts)
    async for check in _qemu(host, paste, facts):
        yield check
    yield await _kvm(host, paste, facts)
    yield await _page_tracking(host, paste, facts)
    async for check in _userfaults(host, paste):
        yield check
    async for check in vm_users.host_checks(host):
        yield _with_fix(remedies.vm_uids(check, paste), check)
    yield await _memory(host, facts)
    yield await _certificates(host, operator)
    yield await _address(host, paste)
    async for check in destination_host.ports(host, needed=1):
        yield _with_fix(remedies.ports(host, paste), check)
    async for check in _network(host, paste):
        yield check
    for check in await domain_checks.checks(host, paste, facts):
        yield check
    async for check in destination_host.clock(operator, host):
        yield _with_fix(await remedies.clock(host, paste), check)


async def _userfaults(host: Host, paste: Paste) -> AsyncIterator[Finding]:
    try:
        found = await ask(destination_host.userfaults(host))
    except (RefusedError, HostDownError, OperationFailedError) as exc:
        yield Finding("userfaultfd", WARN, f"unknown: {exc.what}", await remedies.qemu(host, paste))
        return
    for one in found:
        faults = _with_fix(await remedies.userfaultfd(host, paste), one)
        # Only post-copy needs it.
        yield faults._replace(verdict=WARN) if faults.verdict == REFUSE else faults


def _with_fix(line: str, check: Finding) -> Finding:
    """Replace the remedy, unless all is well."""
    return check if check.verdict == OK else check._replace(remedy=line)


async def _state_dir(host: Host, paste: Paste) -> Finding:
    if await host.may_write_below(host.state_dir):
        await host.make_dir(host.state_dir)
        return Finding("state-dir", OK, f"{host.state_dir} can be written to")
    reason = f"this user may not write to {host.state_dir} on {host.name}"
    return Finding("state-dir", REFUSE, reason, await remedies.state_dir(host, paste))


async def _qemu(host: Host, paste: Paste, facts: dict[str, Any]) -> AsyncIterator[Finding]:
    try:
        found = await abilities(host)
    except (RefusedError, HostDownError, OperationFailedError) as exc:
        yield Finding("qemu", REFUSE, f"{exc.what}: {exc.why}", await remedies.qemu(host, paste))
        return
    facts |= {
        "qemu_version": str(found.version),
        "newest_q35": found.machines.get("q35"),
        "postcopy": "postcopy-ram" in found.capabilities,
        "parallel": "multifd" in found.capabilities,
        "compressions": sorted(found.compressions),
    }
    yield Finding("qemu", OK, f"QEMU {found.version}, newest machine type {facts['newest_q35']}")
    if "/" not in host.qemu and await host.find_executable("qemu-img") is None:
        reason = f"{host.name} has no qemu-img, which makes disk images"
        yield Finding("qemu-img", REFUSE, reason, await remedies.qemu(host, paste))


async def _kvm(host: Host, paste: Paste, facts: dict[str, Any]) -> Finding:
    obstacle = await kvm_obstacle(host)
    facts |= {"accelerator": "tcg" if obstacle else "kvm", "why_not_kvm": obstacle}
    if obstacle is None:
        return Finding("kvm", OK, "it runs guests")
    reason = f"not usable on {host.name}: {obstacle}"
    return Finding("kvm", WARN, reason, await remedies.kvm(host, paste))


async def _page_tracking(host: Host, paste: Paste, facts: dict[str, Any]) -> Finding:
    how = facts["page_tracking"] = await host.page_tracking()
    if how == PageTracking.PROTECTION:
        return Finding("page-tracking", OK, "the kernel has PAGEMAP_SCAN")
    reason = f"the kernel of {host.name} has no PAGEMAP_SCAN; epochs go by {how}"
    return Finding("page-tracking", WARN, reason, await remedies.kernel(host, paste))


async def _memory(host: Host, facts: dict[str, Any]) -> Finding:
    free = facts["memory_available_bytes"] = await host.available_memory_bytes()
    text = f"{format_size(free)} free on {host.name}"
    if free < LITTLE_MEMORY_BYTES:
        return Finding("memory", WARN, text, remedies.memory(host))
    return Finding("memory", OK, text)


async def _room(host: Host, paste: Paste, facts: dict[str, Any]) -> Finding:
    directory = host.state_dir
    while not await host.exists(directory):
        directory = directory.parent
    free = facts["state_free_bytes"] = await host.free_bytes(directory)
    text = f"{format_size(free)} free for {host.state_dir}"
    if free < LITTLE_ROOM_BYTES:
        return Finding("room", WARN, text, remedies.room(directory, paste))
    return Finding("room", OK, text)


async def _certificates(host: Host, operator: Host) -> Finding:
    again = remedies.certificates(host, operator)
    try:
        identity = await read_identity(host)
    except UsageError as exc:
        return Finding("certificates", REFUSE, f"{exc.what}: {exc.why}", again)
    if identity is None and _is_alone(host):
        return Finding("certificates", OK, "none, and none are needed between hosts of one machine")
    if identity is None:
        remedy = f"{again}  # or migrate with --tls psk"
        return Finding("certificates", WARN, f"{host.name} has none to encrypt with", remedy)
    now = time.time()
    if fault := fault_of(identity, host.migration_address, now):
        return Finding("certificates", REFUSE, fault, again)
    days = min(certificate.days_left(now) for certificate in identity)
    verdict, remedy = (WARN, again) if days < SOON_DAYS else (OK, "")
    return Finding("certificates", verdict, f"they hold for {days} days", remedy)


def _is_alone(host: Host) -> bool:
    """Whether it is this machine, and so are all other hosts."""
    return host.is_this_machine and all(other.is_this_machine for other in all_hosts())


async def _address(host: Host, paste: Paste) -> Finding:
    address = host.migration_address
    try:
        loopback = ip_address(address).is_loopback
    except ValueError:
        return Finding("address", OK, f"migrations come in at {address}")
    shown = await host.run(["ip", "-oneline", "address", "show"])
    remedy = remedies.address(shown.stdout, paste)
    words = {word.partition("/")[0] for word in shown.stdout.split()}
    if shown.returncode == 0 and address not in words:
        return Finding("address", REFUSE, f"{address} is not an address of {host.name}", remedy)
    if loopback and not _is_alone(host):
        reason = f"no other machine reaches {host.name} at {address}"
        return Finding("address", WARN, reason, remedy)
    return Finding("address", OK, f"migrations come in at {address}")


async def _network(host: Host, paste: Paste) -> AsyncIterator[Finding]:
    if host.bridge is None:
        reason = f"none is named for {host.name}: only VMs with user-mode NAT run there"
        yield Finding("bridge", WARN, reason, await remedies.name_bridge(host, paste))
        return
    async for found in destination_host.bridge(host, host.bridge):
        yield _with_fix(remedies.make_bridge(host.bridge, paste), found)
    yield await _taps(host, paste)


async def _taps(host: Host, paste: Paste) -> Finding:
    """Permission to create the taps by which QEMU attaches guests to a bridge: CAP_NET_ADMIN."""
    shown = await host.run(["grep", "^CapEff:", "/proc/self/status"])
    rights = re.match(r"CapEff:\s*([0-9a-f]{1,16})$", shown.stdout.strip())
    if rights and int(rights[1], 16) & CAP_NET_ADMIN:
        return Finding("taps", OK, "this user may put guests on the bridge")
    reason = f"this user may make no taps on {host.name}: VMs with a NIC on a bridge do not start"
    return Finding("taps", WARN, reason, remedies.taps(paste))
