"""What a host's libvirtd lacks for migrating its domains from and to it."""

import time
from typing import Any

from vmckpt.errors import HostDownError, RefusedError, UsageError
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory.paste import Paste
from vmckpt.hosts.pki.identity import FILES, fault_of, read_identity
from vmckpt.preflight.domains.certificates import certificate_dir_of, qemu_user, unreadable
from vmckpt.preflight.domains.link import TLS_PORT
from vmckpt.preflight.finding import OK, REFUSE, WARN, Finding
from vmckpt.preflight.host import remedies
from vmckpt.sequence.steps import both
from vmckpt.vm.domains.sessions import libvirtd


async def checks(host: Host, paste: Paste, facts: dict[str, Any]) -> list[Finding]:
    """It answers, and meets what two of them need from each other; no checks without one."""
    if host.libvirt is None:
        return []
    try:
        async with libvirtd(host) as session:
            version, qemu = await both(session.version(), session.qemu_version())
            user = qemu_user(await session.capabilities())
    except RefusedError as exc:
        return [Finding("libvirtd", REFUSE, f"{exc.what}: {exc.why}", exc.remedy)]
    except HostDownError as exc:
        remedy = await remedies.libvirtd(host, paste)
        return [Finding("libvirtd", REFUSE, f"{exc.what}: {exc.why}", remedy)]
    facts["libvirt_version"] = ".".join(map(str, version))
    text = f"libvirt {facts['libvirt_version']} with QEMU {'.'.join(map(str, qemu))} answers"
    return [
        Finding("libvirtd", OK, text),
        *await both(_listens(host, paste), _encrypts(host, paste, user)),
    ]


async def _listens(host: Host, paste: Paste) -> Finding:
    if TLS_PORT in await host.listening_ports(host.migration_address):
        return Finding(
            "libvirt-tls", OK, f"it accepts requests of other libvirtds on port {TLS_PORT}"
        )
    reason = (
        f"it does not listen on {host.migration_address} port {TLS_PORT}: no domain can come "
        "here from another host, encrypted"
    )
    return Finding("libvirt-tls", WARN, reason, remedies.libvirt_listens(host, paste))


async def _encrypts(host: Host, paste: Paste, user: int | None) -> Finding:
    directory = await certificate_dir_of(host)
    remedy = remedies.libvirt_encrypts(host, paste, directory, user)
    try:
        found = await read_identity(host, directory)
    except UsageError as exc:
        return Finding("libvirt-certificates", WARN, f"{exc.what}: {exc.why}", remedy)
    if found is None:
        reason = f"its QEMUs cannot encrypt: qemu.conf has them look in {directory}, which is empty"
        return Finding("libvirt-certificates", WARN, reason, remedy)
    if missing := await unreadable(host, user, directory, FILES):
        reason = (
            f"its QEMUs cannot encrypt: their user (uid {user}) cannot read {', '.join(missing)} "
            f"in {directory}"
        )
        return Finding("libvirt-certificates", WARN, reason, remedy)
    if fault := fault_of(found, host.migration_address, time.time()):
        # Copies, of before `vmckpt pki issue` made others.
        return Finding("libvirt-certificates", WARN, f"in {directory}: {fault}", remedy)
    return Finding("libvirt-certificates", OK, f"its QEMUs encrypt by those in {directory}")
