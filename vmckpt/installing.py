"""Commands that install packages on a machine, by its /etc/os-release: with apt or dnf."""

import re
from collections.abc import Mapping
from enum import Enum
from pathlib import Path

OS_RELEASE = Path("/etc/os-release")
_SETTING = re.compile(r"""^(\w+)=(["']?)([\w. -]*)\2$""", re.MULTILINE)


class Need(Enum):
    """What is needed: its packages on Debian, on Fedora, and on RHEL and its rebuilds."""

    QEMU = "qemu-system-x86 qemu-utils", "qemu-system-x86 qemu-img", "qemu-kvm qemu-img"
    LIBVIRTD = "libvirt-daemon-system", "libvirt-daemon-kvm", "libvirt-daemon-kvm"
    TIME_SERVICE = "chrony", "chrony", "chrony"
    SSH_CLIENT = "openssh-client", "openssh-clients", "openssh-clients"
    FUSE = "fuse3", "fuse3", "fuse3"
    LIBVIRT_SOURCES = (
        "gcc libvirt-dev pkg-config python3-dev",
        "gcc libvirt-devel pkgconf-pkg-config python3-devel",
        "gcc libvirt-devel pkgconf-pkg-config python3-devel",
    )

    def __init__(self, debian: str, fedora: str, rhel: str) -> None:
        self.debian, self.fedora, self.rhel = debian, fedora, rhel


class Family(Enum):
    """Distributions with the same packages; the last: with others, or unknown."""

    DEBIAN = "debian"
    FEDORA = "fedora"
    RHEL = "rhel"
    OTHER = "other"


def settings(os_release: str) -> Mapping[str, str]:
    """The plain values of an os-release(5)."""
    return {name: value for name, _, value in _SETTING.findall(os_release)}


def family(os_release: str) -> Family:
    """By ID, then by ID_LIKE."""
    reply = settings(os_release)
    ids = [reply.get("ID", ""), *reply.get("ID_LIKE", "").split()]
    for name in ids:
        match name:
            case "debian" | "ubuntu":
                return Family.DEBIAN
            case "rhel" | "centos":
                return Family.RHEL
            case "fedora":
                return Family.FEDORA
    return Family.OTHER


def qemu_program(os_release: str) -> str:
    """How the distribution's QEMU is called: in PATH, or by its path."""
    return "/usr/libexec/qemu-kvm" if family(os_release) is Family.RHEL else "qemu-system-x86_64"


def install(need: Need, os_release: str) -> str | None:
    """The command that installs it, as root; None: the distribution is unknown."""
    match family(os_release):
        case Family.DEBIAN:
            return f"apt-get install -y {need.debian}"
        case Family.FEDORA:
            return f"dnf install -y {need.fedora}"
        case Family.RHEL:
            return f"dnf install -y {need.rhel}"
        case Family.OTHER:
            return None


def advice(need: Need, os_release: str) -> str:
    """As `install`, or in words."""
    return install(need, os_release) or f"install (by Debian's names) {need.debian}"


def advice_here(need: Need) -> str:
    """`advice` for this machine."""
    try:
        return advice(need, OS_RELEASE.read_text(errors="replace"))
    except OSError:
        return advice(need, "")
