"""What a shut-off domain has besides its definition and disks: libvirt leaves it on the source.

VIR_MIGRATE_OFFLINE moves only the definition and ignores everything else.
"""

from pathlib import Path
from shlex import quote

from vmckpt.errors import StorageError
from vmckpt.hosts.host import Host
from vmckpt.preflight import destination_host
from vmckpt.preflight.finding import REFUSE, Finding, ask
from vmckpt.sequence.steps import both
from vmckpt.vm.domains.inventory import Domain
from vmckpt.vm.domains.libvirtd import Libvirtd


async def left_behind(
    domain: Domain, arrives: Domain, source: Libvirtd, destination: Host
) -> list[Finding]:
    """Saved memory, a TPM's state, firmware variables that the destination lacks."""
    saved, variables = await both(
        source.has_saved_memory(domain.uuid), _variables(domain, arrives, destination)
    )
    checks, start = (
        [],
        f"start it (vmckpt vm start {quote(domain.name)}), and move it while it runs",
    )
    if saved:
        reason = "its memory was saved (virsh managedsave), a file that libvirt would leave here"
        remedy = f"{start}; or give it up: virsh managedsave-remove {quote(domain.name)}"
        checks.append(Finding("saved-memory", REFUSE, reason, remedy))
    if domain.description.has_tpm:
        reason = "libvirt leaves what its TPM holds here: keys, and with them encrypted disks"
        checks.append(Finding("tpm", REFUSE, reason, start))
    return checks + variables


async def _variables(domain: Domain, arrives: Domain, destination: Host) -> list[Finding]:
    here, there = domain.description.variables, arrives.description.variables
    # Before its first start there is no file yet.
    if here is None or there is None or not await _may_exist(domain.host, here):
        return []
    return await ask(destination_host.variables(domain.host, destination, here, there))


async def _may_exist(host: Host, path: Path) -> bool:
    try:
        return await host.exists(path)
    except (OSError, StorageError):  # in a directory that this user may not read
        return True
