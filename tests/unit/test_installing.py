"""Commands that install packages: the machine's own package manager, by its os-release."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from vmckpt.hosts.inventory.paste import Paste
from vmckpt.hosts.local import LocalHost
from vmckpt.installing import Need, advice, install, qemu_program
from vmckpt.preflight.host import remedies

pytestmark = pytest.mark.unit
DEBIAN = 'PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nVERSION_CODENAME=bookworm\nID=debian\n'
UBUNTU = 'ID=ubuntu\nID_LIKE=debian\nVERSION_ID="24.04"\n'
MINT = 'ID=linuxmint\nID_LIKE="ubuntu debian"\n'
FEDORA = "ID=fedora\nVERSION_ID=41\n"
RHEL = 'ID="rhel"\nID_LIKE="fedora"\nVERSION_ID="9.4"\n'
ROCKY = "ID='rocky'\nID_LIKE='rhel centos fedora'\n"
ARCH = 'ID=arch\nPRETTY_NAME="apt $(reboot)"\n'


@pytest.mark.parametrize(
    ("release", "command"),
    [
        (DEBIAN, "apt-get install -y qemu-system-x86 qemu-utils"),
        (UBUNTU, "apt-get install -y qemu-system-x86 qemu-utils"),
        (MINT, "apt-get install -y qemu-system-x86 qemu-utils"),
        (FEDORA, "dnf install -y qemu-system-x86 qemu-img"),
        (RHEL, "dnf install -y qemu-kvm qemu-img"),
        (ROCKY, "dnf install -y qemu-kvm qemu-img"),
        (ARCH, None),
        ("", None),
    ],
)
def test_the_command_is_the_distributions(release: str, command: str | None) -> None:
    assert install(Need.QEMU, release) == command
    said = advice(Need.QEMU, release)
    assert said == (command or "install (by Debian's names) qemu-system-x86 qemu-utils")


def test_how_qemu_is_called() -> None:
    assert qemu_program(ROCKY) == "/usr/libexec/qemu-kvm"
    assert {qemu_program(one) for one in (DEBIAN, FEDORA, ARCH)} == {"qemu-system-x86_64"}


class _Host(LocalHost):
    """A host with an os-release of its own."""

    release = ""

    async def read_text(self, path: Path) -> str | None:
        return self.release if path == Path("/etc/os-release") else None

    async def find_executable(self, name: str) -> Any:
        return None


CHRONYD = "dnf install -y chrony && systemctl enable --now chronyd && chronyc makestep"
KERNEL = "# boot a kernel of 6.7 or newer on local"
# Of QEMU, libvirtd, the clock and the kernel.
LINES = {
    DEBIAN: (
        "apt-get install -y qemu-system-x86 qemu-utils",
        "apt-get install -y libvirt-daemon-system",
        "apt-get install -y chrony && chronyc makestep",
        "apt-get install -y -t bookworm-backports linux-image-amd64",
    ),
    FEDORA: (
        "dnf install -y qemu-system-x86 qemu-img",
        "dnf install -y libvirt-daemon-kvm",
        CHRONYD,
        "dnf upgrade -y kernel",
    ),
    ROCKY: (
        "dnf install -y qemu-kvm qemu-img && vmckpt host set local --qemu /usr/libexec/qemu-kvm",
        "dnf install -y libvirt-daemon-kvm",
        CHRONYD,
        KERNEL,
    ),
    ARCH: (
        "# install (by Debian's names) qemu-system-x86 qemu-utils",
        "# install (by Debian's names) libvirt-daemon-system",
        "# install (by Debian's names) chrony",
        KERNEL,
    ),
}


@pytest.mark.parametrize("release", LINES)
def test_remedies_of_host_check(release: str, tmp_path: Path) -> None:
    host = _Host("local", tmp_path, "127.0.0.1")
    object.__setattr__(host, "release", release)
    paste = Paste(host, root=True)

    async def remedied() -> tuple[str, ...]:
        return (
            await remedies.qemu(host, paste),
            await remedies.libvirtd(host, paste),
            await remedies.clock(host, paste),
            (await remedies.kernel(host, paste)).partition("  # then")[0],
        )

    assert asyncio.run(remedied()) == LINES[release]
