"""The services of a host that looks like a machine: sshd, and libvirtd unless it is bare."""

import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from vmckpt.lab.real.machine import HOST_KEY, SSH_PORT, STATE_DIR, LabMachine
from vmckpt.lab.real.tree import AUTHORIZED_KEYS, PACKAGES

LIBVIRT_SOCKET = Path("/run/libvirt/libvirt-sock")
_ENVIRONMENT = {
    "HOME": "/root",
    "LC_ALL": "C.UTF-8",
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
}
_START_TIMEOUT_S = 50.0

_SSHD = f"""\
Port {SSH_PORT}
HostKey /etc/ssh/{HOST_KEY}
AuthorizedKeysFile .ssh/authorized_keys {AUTHORIZED_KEYS}/%u
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
UsePAM no
UseDNS no
PidFile /run/sshd.pid
Subsystem sftp internal-sftp
"""
# Peer-to-peer migrations connect one libvirtd to the other over TCP, on the lab's own network.
_LIBVIRTD = """\
host_uuid = "{uuid}"
listen_tls = 0
listen_tcp = 1
listen_addr = "{migration_address}"
auth_tcp = "none"
unix_sock_group = "root"
unix_sock_rw_perms = "0770"
auth_unix_rw = "none"
log_outputs = "2:file:/var/log/libvirt/libvirtd.log"
"""
_QEMU = """\
user = "root"
group = "root"
swtpm_user = "root"
swtpm_group = "root"
security_driver = "none"
namespaces = []
cgroup_controllers = []
stdio_handler = "file"
migration_address = "{migration_address}"
migration_host = "{migration_address}"
migrate_tls_x509_cert_dir = "{pki}"
migrate_tls_x509_verify = 1
shared_filesystems = ["{shared}"]
"""


class ServiceError(Exception):
    """A service did not start; the message is its own."""


def start_services(machine: LabMachine) -> None:
    """Start the services, and return when they answer. Raises ServiceError, OSError."""
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while not _has(machine.migration_address):
        _pause(deadline_s, "the host's network")
    sshd = _start_sshd(machine)
    libvirtd = None if machine.bare else _start_libvirtd(machine)
    while not _answers(socket.AF_INET, ("127.0.0.1", SSH_PORT)):
        _pause(deadline_s, "sshd", sshd)
    while libvirtd and not _answers(socket.AF_UNIX, str(LIBVIRT_SOCKET)):
        _pause(deadline_s, "libvirtd", libvirtd)
    virsh = ["virsh", "--connect", "qemu:///system", "uri"]
    if libvirtd and subprocess.run(virsh, env=_ENVIRONMENT, check=False).returncode:
        raise ServiceError("libvirtd does not answer, see its log")


def _start_sshd(machine: LabMachine) -> subprocess.Popen[bytes]:
    Path("/etc/ssh/sshd_config").write_text(_SSHD)
    Path("/run/sshd").mkdir()
    program, libraries = Path("/usr/sbin/sshd"), {}
    if machine.bare:
        program = PACKAGES / "sbin/sshd"
        libraries = {"LD_LIBRARY_PATH": f"{PACKAGES}/lib/x86_64-linux-gnu"}
    return _start([str(program), "-D", "-E", "/var/log/sshd.log"], libraries)


def _start_libvirtd(machine: LabMachine) -> subprocess.Popen[bytes]:
    pki = STATE_DIR / "pki"
    pki.mkdir(mode=0o700, exist_ok=True)  # libvirtd does not start without it
    words = {
        "uuid": machine.uuid,
        "migration_address": machine.migration_address,
        "shared": machine.shared,
        "pki": pki,
    }
    Path("/run/libvirt").mkdir()
    Path("/var/log/libvirt").mkdir(exist_ok=True)
    Path("/etc/libvirt/libvirtd.conf").write_text(_LIBVIRTD.format_map(words))
    Path("/etc/libvirt/qemu.conf").write_text(_QEMU.format_map(words))
    return _start(["/usr/sbin/libvirtd", "--listen"], {})


def _start(argv: Sequence[str], settings: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        argv, env={**_ENVIRONMENT, **settings}, stdin=subprocess.DEVNULL, start_new_session=True
    )


def _pause(deadline_s: float, what: str, process: subprocess.Popen[bytes] | None = None) -> None:
    if process and process.poll() is not None:
        raise ServiceError(f"{what} ended with status {process.returncode}, see the host's logs")
    if time.monotonic() > deadline_s:
        raise ServiceError(f"{what}: not there after {_START_TIMEOUT_S:.0f} s")
    time.sleep(0.01)


def _has(address: str) -> bool:
    """Whether the host has the address by now."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _answers(family: socket.AddressFamily, address: str | tuple[str, int]) -> bool:
    with socket.socket(family) as client:
        return client.connect_ex(address) == 0
