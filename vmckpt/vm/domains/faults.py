"""Translate libvirt's errors into remedies, by their texts, because codes say little."""

import re
from typing import NamedTuple

from vmckpt.errors import VmckptError


class LibvirtRefusedError(VmckptError):
    """libvirt answered a call with an error, and has undone any partial effect itself."""

    exit_code = 7
    kind = "refused-by-libvirt"

    def __init__(self, what: str, *, why: str, remedy: str, code: int) -> None:
        super().__init__(what, why=why, remedy=remedy)
        self.code = code


class _Known(NamedTuple):
    pattern: str
    remedy: str


_SHARED = "shared_filesystems in qemu.conf of both hosts names such directories to libvirt itself"

_KNOWN = tuple(
    _Known(pattern, remedy)
    for pattern, remedy in (
        (
            r"Attempt to migrate guest to the same host",
            "the two libvirtds have the same host UUID, as cloned machines do: set host_uuid in "
            "libvirtd.conf of one of them and restart it",
        ),
        (
            r"hostname on destination resolved to localhost",
            "give the host its own migration address: "
            "vmckpt host set HOST --migration-addr ADDRESS",
        ),
        (
            r"[Uu]nable to resolve address",
            "the migration address has to be one that the source can resolve: better give an IP "
            "address, vmckpt host set HOST --migration-addr ADDRESS",
        ),
        (r"Unsafe migration", f"use cache='none' for the disks, or: {_SHARED}"),
        (
            r"may lead to data corruption if disks use cache",
            "set cache='none' for the domain's disks, and restart it",
        ),
        (
            r"Storage pool not found|[Cc]annot access storage file|No such file or directory",
            "create the missing pool or file on the destination, or use shared storage for disks",
        ),
        (
            r"Compression method .* is only supported with parallel migration",
            "add --parallel 2",
        ),
        (
            r"[Uu]nable to access credentials|Cannot read CA certificate|x509",
            "vmckpt host check --fixes SOURCE TARGET prints the commands: vmckpt pki issue, and "
            "copies for QEMU's user",
        ),
        (
            r"[Cc]ertificate does not match the hostname|certificate .*(expired|not trusted|owner)",
            "issue certificates that name the migration address: vmckpt pki issue SOURCE TARGET",
        ),
        (
            r"[Uu]serfaultfd not available",
            "as root on the destination: sysctl -w vm.unprivileged_userfaultfd=1",
        ),
        (
            r"guest CPU doesn't match|CPU .*not compatible|incompatible CPU|missing features",
            "give the domain a CPU model that both hosts have (virsh domcapabilities names them)",
        ),
        (
            r"unable to connect to server at|[Uu]nable to connect to .*libvirt|Connection refused",
            "the source's libvirtd must reach the other one: start libvirtd-tls.socket there, and "
            "open TCP port 16514 (and 49152 to 49215 for QEMU) in its firewall",
        ),
        (
            r"already exists with uuid|domain .* is already (active|defined)",
            "remove or rename the domain of that name on the destination",
        ),
        (
            r"cannot migrate domain with \d+ snapshots",
            "libvirt migrates no domain with snapshots: vmckpt checkpoint rm NAME --kind internal",
        ),
        (
            r"managed save image exists",
            "start the domain, which goes on from it, or give it up: virsh managedsave-remove NAME",
        ),
        (
            r"(host|PCI|USB) ?devices? .*assigned|hostdev|non-migratable device",
            "detach the device, then migrate",
        ),
        (
            r"cannot acquire state change lock",
            "libvirtd has a job on the domain, or waits for its QEMU: wait and try again; if "
        "that does not help: systemctl restart libvirtd (QEMUs keep running)",
        ),
        (
            r"another job|[Tt]imed out during operation",
            "wait for the other job's end; virsh domjobinfo shows it",
        ),
        (
            r"limit locked memory",
            "libvirtd may not raise what QEMU may lock: give it CAP_SYS_RESOURCE, or leave out "
            "--zerocopy",
        ),
        (r"[Nn]o space left", "free space on the host"),
        (r"[Pp]ermission denied", "let libvirt's QEMU user (qemu.conf: user) use what it names"),
        (r"[Nn]etwork not found|[Cc]annot get interface|no (bridge|network)",
         "create the network or bridge that it names on the destination"),
        (r"authentication", "let this user use libvirtd: usermod -a -G libvirt USER"),
        (r"[Cc]annot allocate memory|out of memory", "free memory on the destination"),
    )
)  # fmt: skip
UNFORESEEN = "fix what libvirt names; its log (journalctl -u libvirtd) says more"


def remedy_for(text: str) -> str:
    """The remedy for an error with this text. Pure."""
    return next((known.remedy for known in _KNOWN if re.search(known.pattern, text)), UNFORESEEN)
