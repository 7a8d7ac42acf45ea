"""Shell commands that fix a host. What no command can fix is a comment (#)."""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from vmckpt.errors import HostDownError, OperationFailedError, RefusedError
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory.paste import Paste, in_double_quotes
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.pki.ca import ca_key, has_ca
from vmckpt.hosts.pki.identity import pki_dir
from vmckpt.hosts.ssh.entry import SshEntry
from vmckpt.installing import (
    OS_RELEASE,
    Family,
    Need,
    advice,
    family,
    install,
    qemu_program,
    settings,
)
from vmckpt.preflight import destination_host
from vmckpt.preflight.domains.certificates import QEMU_CERTIFICATES
from vmckpt.preflight.finding import WARN, Finding
from vmckpt.preflight.vm_users import SUGGESTED
from vmckpt.vm.probe import DEV_KVM, VIRTUALIZATION_FLAGS, abilities

SYSCTL = "/etc/sysctl.d/61-vmckpt-userfaultfd.conf"
UDEV_RULE = "/etc/udev/rules.d/61-vmckpt-userfaultfd.rules"
# Additional migration ports for a host whose range is used up.
MORE_PORTS = 16


def reached_anew(entry: LocalHost | SshEntry, advice: str) -> str:
    """Log in manually: ssh(1) says more, and asks whether to trust an unknown key."""
    if isinstance(entry, SshEntry):
        return f"{Paste(entry, root=True).there('true')}  # {advice}"
    return f"# {advice}"


async def state_dir(host: Host, paste: Paste) -> str:
    """Create the state directory, for this user."""
    made = f"install -d -m 700 -o {await host.user_id()} {shlex.quote(str(host.state_dir))}"
    return paste.as_root(made)


async def qemu(host: Host, paste: Paste) -> str:
    """Install QEMU, and name it in the host's entry."""
    line, program = await _install(Need.QEMU, host, paste), qemu_program(await _os_release(host))
    is_named = host.qemu == program or "/" not in host.qemu + program
    return line if is_named or line.startswith("#") else f"{line} && {paste.set('--qemu', program)}"


async def _install(need: Need, host: Host, paste: Paste, *, then: str = "") -> str:
    """Install packages, and do something `then`; a comment on an unknown distribution."""
    release = await _os_release(host)
    command = install(need, release)
    return f"# {advice(need, release)}" if command is None else paste.as_root(command + then)


async def _os_release(host: Host) -> str:
    return await host.read_text(OS_RELEASE) or ""


def vm_uids(check: Finding, paste: Paste) -> str:
    """Create users for VMs; no command can fix existing ones."""
    if check.verdict == WARN:
        return paste.set("--vm-uids", str(SUGGESTED))
    return f"# {check.remedy}"


async def kvm(host: Host, paste: Paste) -> str:
    """Depends on what prevents it."""
    if not VIRTUALIZATION_FLAGS & await host.cpu_flags():
        return (
            "# no command: switch virtualization on in the firmware (for a VM: nested, on its "
            "host); without it guests run under TCG, slowly"
        )
    if not await host.exists(DEV_KVM):
        return paste.as_root("modprobe kvm_intel || modprobe kvm_amd")
    if not await host.usable(DEV_KVM):
        return paste.as_root(f'usermod -a -G kvm "$(id -nu {await host.user_id()})"')
    return paste.as_root("dmesg | grep -i kvm | tail") + "  # says why"


async def kernel(host: Host, paste: Paste) -> str:
    """A newer kernel, if the distribution has one."""
    reply = settings(await _os_release(host))
    match reply.get("ID"):
        case "debian":
            suite = f"{reply.get('VERSION_CODENAME', 'stable')}-backports"
            command = f"apt-get install -y -t {suite} linux-image-amd64"
        case "ubuntu":
            command = f"apt-get install -y linux-generic-hwe-{reply.get('VERSION_ID', '24.04')}"
        case "fedora":
            command = "dnf upgrade -y kernel"
        case _:
            return f"# boot a kernel of 6.7 or newer on {host.name}"
    return f"{paste.as_root(command)}  # then move its VMs away, and reboot it"


async def userfaultfd(host: Host, paste: Paste) -> str:
    """Now and at every boot: its device for a group, or the system call for all (older QEMUs)."""
    if await _knows_device(host):
        device = destination_host.USERFAULTFD_DEVICE
        rule = r'"KERNEL==\"userfaultfd\", GROUP=\"$group\", MODE=\"0660\""'
        return paste.as_root(
            f"group=$(id -gn {await host.user_id()}) && echo {rule} >{UDEV_RULE} && "
            f'chgrp "$group" {device} && chmod 660 {device}'
        )
    setting = "vm.unprivileged_userfaultfd=1"
    line = paste.as_root(f"echo {setting} >{SYSCTL} && sysctl -p {SYSCTL}")
    return f"{line}  # lets every user use it; a QEMU of 8.0 or newer needs that for a group only"


async def _knows_device(host: Host) -> bool:
    try:
        return (await abilities(host)).version >= destination_host.BY_DEVICE
    except (RefusedError, HostDownError, OperationFailedError):
        return True  # a newer one may already be installed


def memory(host: Host) -> str:
    """Only the operator knows which VM can be removed."""
    return f"vmckpt vm list  # then move VMs away from {host.name}, or stop them"


def room(directory: Path, paste: Paste) -> str:
    """Show what uses the space."""
    shown = f"du -xh -d 2 {shlex.quote(str(directory))} | sort -h | tail"
    return f"{paste.there(shown)}  # says what can go"


def certificates(host: Host, operator: Host) -> str:
    """Issue new certificates with the operator's CA, which may not exist yet."""
    issue = f"vmckpt pki issue {host.name}"
    if has_ca(operator.state_dir):
        return issue
    # Another host's remedy may have created it before this one is pasted.
    key = shlex.quote(str(ca_key(operator.state_dir)))
    return f"test -e {key} || vmckpt pki init; {issue}"


def address(shown: str, paste: Paste) -> str:
    """Choose another of the host's addresses, from `ip -oneline address show`."""
    found = re.findall(r"inet6? (\S+?)/\d+ .*scope global", shown)
    if not found:
        return f"# give {paste.entry.name} an address that other hosts reach"
    others = f"  # or {', '.join(found[1:])}" if found[1:] else ""
    return paste.set("--migration-addr", found[0]) + others


async def name_bridge(host: Host, paste: Paste) -> str:
    """The first bridge that is up; one may have to be created."""
    shown = await host.run(["ip", "-oneline", "link", "show", "up", "type", "bridge"])
    if found := re.findall(r"^\d+: ([^:@\s]+)", shown.stdout, re.MULTILINE):
        others = f"  # or {', '.join(found[1:])}" if found[1:] else ""
        return paste.set("--bridge", found[0]) + others
    return f"{make_bridge('br0', paste)} && {paste.set('--bridge', 'br0')}"


def make_bridge(name: str, paste: Paste) -> str:
    """Lasts until the next boot; the role in ansible/ creates a permanent one."""
    name = shlex.quote(name)
    return paste.as_root(f"ip link add {name} type bridge && ip link set {name} up")


def taps(paste: Paste) -> str:
    """Only root can create taps."""
    if not isinstance(paste.entry, SshEntry):
        return "# run vmckpt as root, or let the VMs use user-mode NAT"
    as_root = str(paste.entry.address._replace(user="root"))
    return f"{paste.set('--address', as_root)}  # or let its VMs use user-mode NAT"


def ports(host: Host, paste: Paste) -> str:
    """A wider range."""
    first, last = host.migration_ports or (49152, 49152)
    return paste.set("--migration-ports", f"{first}-{min(last + MORE_PORTS, 65535)}")


async def libvirtd(host: Host, paste: Paste) -> str:
    """Install it, start it, or get access."""
    socket = host.libvirt
    if socket is not None and await host.exists(socket) and not await host.usable(socket):
        user = f'"$(id -nu {await host.user_id()})"'
        return paste.as_root(f'usermod -a -G "$(stat -c %G {shlex.quote(str(socket))})" {user}')
    if await host.find_executable("libvirtd"):
        return paste.as_root("systemctl restart libvirtd")
    return await _install(Need.LIBVIRTD, host, paste)


def libvirt_listens(host: Host, paste: Paste) -> str:
    """Listen with TLS, with new certificates of a CA that exists by then."""
    pki = pki_dir(host)
    settings = {
        "ca_file": f'"{pki}/ca-cert.pem"',
        "cert_file": f'"{pki}/server-cert.pem"',
        "key_file": f'"{pki}/server-key.pem"',
    }
    then = "systemctl stop libvirtd && systemctl enable --now libvirtd-tls.socket"
    configured = paste.as_root(f"{_put(settings, '/etc/libvirt/libvirtd.conf')} && {then}")
    return f"vmckpt pki issue {host.name} && {configured}"


def libvirt_encrypts(host: Host, paste: Paste, directory: Path, user: int | None = None) -> str:
    """Give its QEMUs vmckpt's certificates; `directory` is where they look for them.

    `user`: the one that they run as, who can enter no state directory, and gets copies; None: root.
    """
    issue, pki = f"vmckpt pki issue {host.name}", pki_dir(host)
    if user is None and directory == pki:
        return issue
    certificates_dir = pki if user is None else QEMU_CERTIFICATES
    settings = {
        "migrate_tls_x509_cert_dir": f'"{certificates_dir}"',
        "migrate_tls_x509_verify": "1",
    }
    parts = [f"{_put(settings, '/etc/libvirt/qemu.conf')} && systemctl restart libvirtd"]
    if user is not None:
        copied = f"install -o {user} -m 600 {shlex.quote(str(pki))}/*.pem {certificates_dir}"
        parts = [f"install -d {certificates_dir}", copied, *parts]
    return f"{issue} && {paste.as_root(' && '.join(parts))}"


async def clock(host: Host, paste: Paste) -> str:
    """Enable a time service, which Debian does when it is installed."""
    starts = " && systemctl enable --now chronyd"
    is_started = family(await _os_release(host)) is Family.DEBIAN
    then = f"{'' if is_started else starts} && chronyc makestep"
    return await _install(Need.TIME_SERVICE, host, paste, then=then)


def _put(settings: Mapping[str, str], path: str) -> str:
    """Set libvirt settings, replacing existing ones: libvirt uses the first in the file."""
    lines = " ".join(in_double_quotes(f"{key} = {value}") for key, value in settings.items())
    old = f"/^ *({'|'.join(settings)}) *=/d"
    return f'sed -i -E "{old}" {path} && printf "%s\\n" {lines} >>{path}'
