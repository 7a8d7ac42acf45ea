"""The certificates of libvirt's QEMUs: where they are, and whether QEMU's user can read them."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from vmckpt.errors import HostDownError
from vmckpt.hosts.host import Host
from vmckpt.vm.domains.definition.description import parse_xml

QEMU_CONF = Path("/etc/libvirt/qemu.conf")
# Where libvirt looks for QEMU's certificates unless qemu.conf says otherwise.
QEMU_CERTIFICATES = Path("/etc/pki/qemu")
# The files that a QEMU needs as the source of a migration, and as its destination.
CLIENT_FILES = ("ca-cert.pem", "client-cert.pem", "client-key.pem")
SERVER_FILES = ("ca-cert.pem", "server-cert.pem", "server-key.pem")


async def certificate_dir_of(host: Host) -> Path:
    """The host's directory with QEMU's certificates for migrations, as its libvirt has it."""
    return certificate_dir(await host.read_text(QEMU_CONF) or "")


def certificate_dir(qemu_conf: str) -> Path:
    """The directory that qemu.conf sets. Pure."""
    pairs = re.findall(r'^[ \t]*(\w+)[ \t]*=[ \t]*"([^"\n]*)"', qemu_conf, re.MULTILINE)
    found = dict(reversed(pairs))  # libvirt uses the first of two lines
    for name in ("migrate_tls_x509_cert_dir", "default_tls_x509_cert_dir"):
        if directory := found.get(name):
            return Path(directory)
    return QEMU_CERTIFICATES


def qemu_users(capabilities: str) -> set[int]:
    """The user ids that libvirt runs QEMU as, by its capabilities. Pure."""
    labels: Iterable[str] = (
        label.text or ""
        for model in parse_xml(capabilities, "a libvirtd's capabilities").iterfind("host/secmodel")
        if model.findtext("model") == "dac"
        for label in model.iterfind("baselabel")
    )
    return {int(found[1]) for label in labels if (found := re.match(r"\+(\d+):", label))}


def qemu_user(capabilities: str) -> int | None:
    """The user that may lack rights on QEMU's certificates; None: QEMU runs as root. Pure."""
    users = qemu_users(capabilities)
    return None if 0 in users else min(users, default=None)


async def unreadable(
    host: Host, user: int | None, directory: Path, names: Sequence[str]
) -> list[str]:
    """Which of these files `user` cannot read; empty also if only root could find out."""
    if user is None or await host.user_id() != 0:
        return []
    as_user = ["setpriv", "--reuid", str(user), "--regid", str(user), "--clear-groups"]
    paths = {str(directory / name): name for name in names}
    script = 'for path; do test -r "$path" || echo "$path"; done'
    try:
        done = await host.run([*as_user, "sh", "-c", script, "sh", *paths])
    except HostDownError:  # it has no setpriv
        return []
    return [paths[line] for line in done.stdout.splitlines() if line in paths]
