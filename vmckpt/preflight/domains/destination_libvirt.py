"""What the destination's libvirt has to provide for an arriving domain."""

from collections.abc import Iterable
from pathlib import Path

from vmckpt.hosts.host import Host
from vmckpt.preflight.finding import OK, REFUSE, WARN, Finding
from vmckpt.sequence.steps import all_of, both
from vmckpt.units import format_size
from vmckpt.vm.domains.definition.description import DomainInterface, parse_xml
from vmckpt.vm.domains.faults import LibvirtRefusedError
from vmckpt.vm.domains.inventory import Domain
from vmckpt.vm.domains.libvirtd import Libvirtd
from vmckpt.vm.domains.replies import Named
from vmckpt.vm.inventory import read_vm

# Types of NICs that need a device of the host.
_ON_DEVICES = frozenset({"bridge", "direct"})


async def checks(domain: Domain, source: Libvirtd, destination: Libvirtd) -> list[Finding]:
    """It is another host, and has the machine type, the memory and the networks."""
    nics = dict.fromkeys(domain.description.interfaces)
    return await all_of(
        [
            _other_host(source, destination),
            _machine(domain, destination),
            _memory(domain, destination.host),
            *(_interface(nic, destination) for nic in nics),
        ]
    )


async def _other_host(source: Libvirtd, destination: Libvirtd) -> Finding:
    ours, theirs = map(host_uuid, await both(source.capabilities(), destination.capabilities()))
    if ours != theirs:
        return Finding("libvirt", OK, f"libvirtd on {destination.host.name} answers")
    reason = f"libvirt takes {source.host.name} and {destination.host.name} for one host, {ours}"
    remedy = "set another host_uuid in libvirtd.conf of one of them, and restart it"
    return Finding("same-host", REFUSE, reason, remedy)


def host_uuid(capabilities: str) -> str:
    """The host's UUID in its capabilities. Pure."""
    return parse_xml(capabilities, "a libvirtd's capabilities").findtext("host/uuid", "")


async def name(domain: Domain, names: Iterable[Named], destination: Host) -> Finding:
    """No other VM has this name; `names` are the destination's domains."""
    host = destination.name
    for other in names:
        if other.name == domain.name and other.uuid != domain.uuid:
            reason = f"{host} has another domain '{domain.name}', {other.uuid}"
            return Finding("name-free", REFUSE, reason, f"rename or remove the one on {host}")
        if other.uuid == domain.uuid and other.name != domain.name:
            reason = f"{host} has the domain's UUID already, called '{other.name}'"
            return Finding("name-free", REFUSE, reason, f"remove that definition on {host}")
        if other.uuid == domain.uuid and other.active:
            reason = f"the same domain runs on {host}: it may be damaged already"
            return Finding("name-free", REFUSE, reason, "end one of the two")
    if await read_vm(destination, domain.name):
        reason = f"{host} has a VM '{domain.name}' of vmckpt's own"
        return Finding("name-free", REFUSE, reason, f"remove or rename the one on {host}")
    return Finding("name-free", OK, f"{host} has no other VM of that name")


async def _machine(domain: Domain, destination: Libvirtd) -> Finding:
    what, host = domain.description, destination.host.name
    try:
        await destination.domain_capabilities(what.emulator, what.arch, what.machine, what.accel)
    except LibvirtRefusedError as exc:
        reason = f"{host} cannot run {what.machine} with {what.accel}: {exc.why}"
        remedy = "give the domain an emulator, machine type and type that both hosts have"
        return Finding("machine-type", REFUSE, reason, remedy)
    return Finding("machine-type", OK, f"{what.machine} on {what.accel} on both sides")


async def _memory(domain: Domain, destination: Host) -> Finding:
    need, free = domain.description.memory_bytes, await destination.available_memory_bytes()
    text = f"{format_size(need)} needed, {format_size(free)} free on {destination.name}"
    if free < need:
        remedy = f"free memory on {destination.name}, or choose another host"
        return Finding("memory", REFUSE, text, remedy)
    return Finding("memory", OK, text)


async def _interface(nic: DomainInterface, destination: Libvirtd) -> Finding:
    host = destination.host
    if nic.kind == "user":
        reason = "connections through user-mode NAT break: they end at the source's QEMU"
        return Finding("user-network", WARN, reason, "put what must stay open on a bridge")
    if nic.kind == "network" and not await destination.has_network(nic.source):
        reason = f"{host.name} has no active network '{nic.source}'"
        remedy = f"define and start it there: virsh net-start {nic.source}"
        return Finding("bridge", REFUSE, reason, remedy)
    if nic.kind in _ON_DEVICES:
        done = await host.run(["ip", "-oneline", "link", "show", "dev", nic.source])
        if done.returncode:
            reason = f"{host.name} has no device '{nic.source}': {done.stderr.strip()}"
            return Finding("bridge", REFUSE, reason, "create it there")
    return Finding("bridge", OK, f"{nic.kind} {nic.source} on {host.name}")


async def files(domain: Domain, destination: Host, shared: Iterable[Path]) -> list[Finding]:
    """Every file that the domain's QEMU opens by path exists."""
    wanted = [*shared, *domain.description.files]
    there = await all_of([destination.exists(path) for path in wanted])
    missing = [str(path) for path, is_there in zip(wanted, there, strict=True) if not is_there]
    if missing:
        reason = f"{destination.name} has not {', '.join(missing)}"
        remedy = "put the VM's files on storage that both hosts share"
        return [Finding("files", REFUSE, reason, remedy)]
    if not wanted:
        return []
    return [Finding("files", OK, f"{len(wanted)} files of the VM are on {destination.name}")]
