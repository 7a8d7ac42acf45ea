"""What a host has, and lacks, to run VMs and to take part in migrations."""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any

from vmckpt.errors import HostDownError, RefusedError, UsageError
from vmckpt.hosts.host import Host
from vmckpt.hosts.pki.identity import read_identity
from vmckpt.migrate.domains import host_checks as domain_checks
from vmckpt.units import format_size
from vmckpt.vm import target_checks
from vmckpt.vm.check import OK, REFUSE, WARN, Check
from vmckpt.vm.probe import abilities, kvm_obstacle

# Less is not refused, but few guests fit.
LITTLE_MEMORY_BYTES = 512 << 20
LITTLE_ROOM_BYTES = 1 << 30
# linux/capability.h
CAP_NET_ADMIN = 1 << 12
# A certificate that ends sooner is to be replaced now.
SOON_DAYS = 30


@dataclass(frozen=True, slots=True)
class HostReport:
    """What was found: `facts` for programs, `checks` with what mends each."""

    facts: dict[str, Any]
    checks: tuple[Check, ...]

    @property
    def fit(self) -> bool:
        """Whether nothing is against it."""
        return all(check.verdict != REFUSE for check in self.checks)


async def check_host(host: Host, operator: Host) -> HostReport:
    """Ask a host for all of it; its clock is compared with the operator's.

    Raises HostDownError when it does not answer.
    """
    await host.require_up()
    facts: dict[str, Any] = {}
    checks = [check async for check in _all(host, operator, facts)]
    return HostReport(facts, tuple(checks))


async def _all(host: Host, operator: Host, facts: dict[str, Any]) -> AsyncIterator[Check]:
    yield await _state_dir(host)
    async for check in _qemu(host, facts):
        yield check
    yield await _kvm(host, facts)
    yield await _page_tracking(host, facts)
    # Only post-copy needs it.
    faults = await target_checks.userfaults(host)
    yield faults._replace(verdict=WARN) if faults.verdict == REFUSE else faults
    yield await _memory(host, facts)
    yield await _room(host, facts)
    yield await _certificates(host)
    yield await _address(host)
    for check in await target_checks.ports(host, needed=1):
        yield check
    for check in await _network(host):
        yield check
    for check in await domain_checks.checks(host, facts):
        yield check
    yield await target_checks.clock(operator, host)


async def _state_dir(host: Host) -> Check:
    if await host.may_write_below(host.state_dir):
        await host.make_dir(host.state_dir)
        return Check("state-dir", OK, f"{host.state_dir} can be written to")
    reason = f"this user may not write to {host.state_dir} on {host.name}"
    remedy = f"as root on {host.name}: install -d -m 700 -o USER {host.state_dir}"
    return Check("state-dir", REFUSE, reason, remedy)


async def _qemu(host: Host, facts: dict[str, Any]) -> AsyncIterator[Check]:
    try:
        found = await abilities(host)
    except (RefusedError, HostDownError) as exc:
        yield Check("qemu", REFUSE, f"{exc.what}: {exc.why}", f"on {host.name}: {exc.remedy}")
        return
    facts |= {
        "qemu_version": str(found.version),
        "newest_q35": found.machines.get("q35"),
        "postcopy": "postcopy-ram" in found.capabilities,
        "parallel": "multifd" in found.capabilities,
        "compressions": sorted(found.compressions),
    }
    yield Check("qemu", OK, f"QEMU {found.version}, newest machine type {facts['newest_q35']}")
    if "/" not in host.qemu and await host.find_executable("qemu-img") is None:
        reason = f"{host.name} has no qemu-img, which makes disk images"
        yield Check("qemu-img", REFUSE, reason, f"on {host.name}: apt-get install qemu-utils")


async def _kvm(host: Host, facts: dict[str, Any]) -> Check:
    obstacle = await kvm_obstacle(host)
    facts |= {"accelerator": "tcg" if obstacle else "kvm", "why_not_kvm": obstacle}
    if obstacle is None:
        return Check("kvm", OK, "it runs guests")
    remedy = "load it (modprobe kvm_intel or kvm_amd), switch virtualization on in the firmware, "
    remedy += "or add the user to the group kvm; without it guests run under TCG, slowly"
    return Check("kvm", WARN, f"not usable on {host.name}: {obstacle}", remedy)


async def _page_tracking(host: Host, facts: dict[str, Any]) -> Check:
    facts["pagemap_scan"] = await host.scans_pagemaps()
    if facts["pagemap_scan"]:
        return Check("page-tracking", OK, "the kernel has PAGEMAP_SCAN")
    reason = f"the kernel of {host.name} has no PAGEMAP_SCAN; migrations do without"
    return Check("page-tracking", WARN, reason, "boot a kernel of 6.7 or newer there")


async def _memory(host: Host, facts: dict[str, Any]) -> Check:
    free = facts["memory_available_bytes"] = await host.available_memory_bytes()
    text = f"{format_size(free)} free on {host.name}"
    if free < LITTLE_MEMORY_BYTES:
        return Check("memory", WARN, text, "end or move VMs")
    return Check("memory", OK, text)


async def _room(host: Host, facts: dict[str, Any]) -> Check:
    place = host.state_dir
    while not await host.exists(place):
        place = place.parent
    free = facts["state_free_bytes"] = await host.free_bytes(place)
    text = f"{format_size(free)} free for {host.state_dir}"
    if free < LITTLE_ROOM_BYTES:
        return Check("room", WARN, text, f"free space on {host.name}")
    return Check("room", OK, text)


async def _certificates(host: Host) -> Check:
    again = f"vmckpt pki issue {host.name}"
    try:
        identity = await read_identity(host)
    except UsageError as exc:
        return Check("certificates", REFUSE, f"{exc.what}: {exc.why}", exc.remedy)
    if identity is None and host.is_this_machine:
        return Check("certificates", OK, "none, and none are needed between hosts of one machine")
    if identity is None:
        remedy = f"{again} (once before: vmckpt pki init); or migrate with --tls psk"
        return Check("certificates", WARN, f"{host.name} has none to encrypt with", remedy)
    now = time.time()
    for certificate in identity:
        if fault := certificate.fault(now):
            return Check("certificates", REFUSE, f"{certificate.subject}: {fault}", again)
    if not identity.server.is_for(host.migration_address):
        reason = f"the certificate does not name its address {host.migration_address}"
        return Check("certificates", REFUSE, reason, again)
    days = min(certificate.days_left(now) for certificate in identity)
    verdict, remedy = (WARN, again) if days < SOON_DAYS else (OK, "")
    return Check("certificates", verdict, f"they hold for {days} days", remedy)


async def _address(host: Host) -> Check:
    address = host.migration_address
    try:
        loopback = ip_address(address).is_loopback
    except ValueError:
        return Check("address", OK, f"migrations come in at {address}")
    remedy = f"vmckpt host remove {host.name}, then host add with the right --migration-addr"
    shown = await host.run(["ip", "-oneline", "address", "show"])
    words = {word.partition("/")[0] for word in shown.stdout.split()}
    if shown.returncode == 0 and address not in words:
        return Check("address", REFUSE, f"{address} is no address of {host.name}", remedy)
    if loopback and not host.is_this_machine:
        reason = f"no other machine reaches {host.name} at {address}"
        return Check("address", WARN, reason, remedy)
    return Check("address", OK, f"migrations come in at {address}")


async def _network(host: Host) -> list[Check]:
    if host.bridge is not None:
        return [await target_checks.bridge(host, host.bridge), await _taps(host)]
    reason = f"none is named for {host.name}: only VMs with user-mode NAT run there"
    remedy = f"name one: vmckpt host remove {host.name}, then host add with --bridge"
    return [Check("bridge", WARN, reason, remedy)]


async def _taps(host: Host) -> Check:
    """The right to make the taps by which QEMU puts guests on a bridge: CAP_NET_ADMIN."""
    shown = await host.run(["grep", "^CapEff:", "/proc/self/status"])
    if shown.returncode == 0 and int(shown.stdout.split()[1], 16) & CAP_NET_ADMIN:
        return Check("taps", OK, "this user may put guests on the bridge")
    reason = f"this user may make no taps on {host.name}: VMs with a NIC on a bridge do not start"
    remedy = (
        "log in there as root (vmckpt_user: root of the role in ansible/), or use user-mode NAT"
    )
    return Check("taps", WARN, reason, remedy)
