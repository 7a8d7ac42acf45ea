"""How the source's libvirtd reaches the destination's, which it controls during a migration."""

from pathlib import Path
from typing import NamedTuple

from vmckpt.hosts.host import Host
from vmckpt.hosts.pki.identity import LIBVIRT_FILES, libvirt_dir
from vmckpt.hosts.sockets.uri import in_uri
from vmckpt.options.migration import Tls
from vmckpt.preflight.finding import OK, REFUSE, WARN, Finding
from vmckpt.sequence.steps import all_of, both

TLS_PORT, TCP_PORT = 16514, 16509
# Where libvirt's client looks for certificates when its URI names no directory.
SYSTEM_CERTIFICATES = (
    Path("/etc/pki/CA/cacert.pem"),
    Path("/etc/pki/libvirt/clientcert.pem"),
    Path("/etc/pki/libvirt/private/clientkey.pem"),
)


class LibvirtLink(NamedTuple):
    """The URI by which the source's libvirtd reaches the destination's, and findings about it."""

    uri: str
    check: Finding


class Transports(NamedTuple):
    """Available transports: the ports of the destination's libvirtd, the source's certificates.

    `certificates` is a directory for the URI, "" for libvirt's own, None if there are none.
    """

    ports: frozenset[int]
    certificates: str | None
    one_machine: bool


async def find_link(tls: Tls, source: Host, destination: Host) -> LibvirtLink:
    """Inspect both hosts, and decide."""
    ports, certificates = await both(
        destination.listening_ports(destination.migration_address), _certificates(source)
    )
    transports = Transports(
        ports,
        certificates,
        source.is_this_machine and destination.is_this_machine,
    )
    return decide_link(tls, transports, source.name, destination)


def decide_link(tls: Tls, transports: Transports, source: str, destination: Host) -> LibvirtLink:
    """TLS if possible; unencrypted only on request, or within one machine. Pure."""
    host = in_uri(destination.migration_address)
    if TLS_PORT in transports.ports and transports.certificates is not None:
        path = f"?pkipath={transports.certificates}" if transports.certificates else ""
        found = Finding(
            "libvirt-link", OK, f"{source} reaches libvirtd on {destination.name} by TLS"
        )
        return LibvirtLink(f"qemu+tls://{host}/system{path}", found)
    if TCP_PORT in transports.ports and (
        tls is Tls.OFF or (tls is Tls.AUTO and transports.one_machine)
    ):
        reason = (
            f"libvirtd on {destination.name} accepts unencrypted connections from anyone (port "
            f"{TCP_PORT})"
        )
        found = Finding("libvirt-link", WARN, reason, "let it listen with TLS instead (listen_tls)")
        return LibvirtLink(f"qemu+tcp://{host}/system", found)
    return LibvirtLink(
        "", Finding("libvirt-link", REFUSE, *_obstacle(transports, source, destination))
    )


def _obstacle(transports: Transports, source: str, destination: Host) -> tuple[str, str]:
    if TLS_PORT not in transports.ports:
        reason = (
            f"libvirtd on {destination.name} does not listen on {destination.migration_address} "
            "port "
            f"{TLS_PORT}: that of {source} cannot reach it"
        )
        remedy = (
            f"vmckpt host check --fixes {source} {destination.name}  # prints the commands; or, "
            "in a "
            "network that you trust, listen_tcp with --tls off"
        )
        return reason, remedy
    reason = f"{source} has no client certificate to show to libvirtd on {destination.name}"
    return reason, f"vmckpt pki issue {source} {destination.name}"


async def _certificates(source: Host) -> str | None:
    ours = libvirt_dir(source)
    if all(await all_of([source.exists(ours / name) for name in LIBVIRT_FILES])):
        return str(ours)
    if all(await all_of([source.exists(path) for path in SYSTEM_CERTIFICATES])):
        return ""
    return None
