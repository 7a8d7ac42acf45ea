"""What a domain's XML says about capturing it while it runs, and its disks. Pure."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from vmckpt.vm.domains.definition.description import ImageFile, parse_xml, variables_of

FORMATS = ("qcow2", "raw")
# Their memory is read and tracked like RAM, and restored with it.
VIDEO = ("vga", "virtio", "bochs", "cirrus", "none")
_MAC = re.compile(r"([0-9a-f]{2}:){5}[0-9a-f]{2}")
# Elements of <domain> or <devices> whose state is outside QEMU, or that write memory without it.
_OUTSIDE = {
    "os/varstore": "UEFI variables in a file that only QEMU can read (varstore)",
    "launchSecurity": "encrypted memory",
    "devices/hostdev": "a device passed through",
    "devices/shmem": "memory shared with others",
    "devices/filesystem": "a file system of its host",
    "devices/vsock": "a vsock device (vhost), which bypasses QEMU",
    "devices/smartcard": "a smartcard",
    "devices/nvram": "an NVRAM device",
}
_BYPASSING_NICS = ("hostdev", "vhostuser", "vdpa")


class DomainPart(NamedTuple):
    """A disk of a running domain: `alias` is its device's id in QEMU."""

    target: str
    alias: str
    path: Path
    format: str
    read_only: bool


class Parts(NamedTuple):
    """What a domain consists of, and `obstacles`: why it cannot be captured while it runs.

    `aliases`: the ids of all its devices, which change when one is plugged in or out.
    """

    disks: tuple[DomainPart, ...]
    variables: ImageFile | None
    macs: tuple[str, ...]
    aliases: tuple[str, ...]
    obstacles: tuple[str, ...]


def parts_of(xml: str) -> Parts:
    """The parts of a running domain. Raises UsageError: it is not XML of a domain."""
    root = parse_xml(xml, "a domain's XML")
    disks, obstacles = list[DomainPart](), list(_obstacles(root))
    for element in root.iterfind("devices/disk"):
        if (source := element.find("source")) is None:
            continue  # an empty drive
        target = element.find("target")
        name = "" if target is None else target.get("dev", "")
        if (why := _unfit(element, source)) is not None:
            obstacles.append(f"disk {name} {why}")
            continue
        driver, alias = element.find("driver"), element.find("alias")
        disks.append(
            DomainPart(
                name,
                "" if alias is None else alias.get("name", ""),
                Path(source.get("file") or source.get("dev") or ""),
                "raw" if driver is None else driver.get("type", "raw"),
                element.find("readonly") is not None,
            )
        )
    macs = [mac.get("address", "").lower() for mac in root.iterfind("devices/interface/mac")]
    return Parts(
        tuple(disks),
        variables_of(root),
        tuple(mac for mac in macs if _MAC.fullmatch(mac)),
        tuple(sorted(alias.get("name", "") for alias in root.iterfind("devices/*/alias"))),
        tuple(obstacles),
    )


def _obstacles(root: ElementTree.Element) -> Iterator[str]:
    for path, what in _OUTSIDE.items():
        if root.find(path) is not None:
            yield f"it has {what}"
    for memory in root.iterfind("devices/memory"):
        if memory.get("model") != "dimm":
            yield f"it has a memory device of model {memory.get('model')} (dimm is possible)"
    # QEMU's state has that of an emulated TPM, and the content of the UEFI variable store.
    for backend in root.iterfind("devices/tpm/backend"):
        if backend.get("type") != "emulator":
            yield f"it has a TPM of type {backend.get('type')}, which is its host's"
    if root.find("os/nvram") is not None and variables_of(root) is None:
        yield "its UEFI variables are not in a file"
    for nic in root.iterfind("devices/interface"):
        if nic.get("type") in _BYPASSING_NICS:
            yield f"it has a NIC of type {nic.get('type')}, which bypasses QEMU"
    yield from _cards(root)


def _cards(root: ElementTree.Element) -> Iterator[str]:
    for video in root.iterfind("devices/video/model"):
        if video.get("type") not in VIDEO:
            kind, possible = video.get("type"), ", ".join(VIDEO)
            yield f"it has a graphics card of type {kind} ({possible} are possible)"
    accelerated = root.find("devices/video/model/acceleration[@accel3d='yes']")
    if accelerated is not None:
        yield "its graphics card is accelerated by its host's"


def _unfit(disk: ElementTree.Element, source: ElementTree.Element) -> str | None:
    """Why a disk cannot be part of a checkpoint."""
    driver = disk.find("driver")
    kind = "raw" if driver is None else driver.get("type", "raw")
    if disk.get("device") == "lun":
        return "is a SCSI device of its host (lun)"
    if not (source.get("file") or source.get("dev")):
        return f"is of type {disk.get('type')}: its image is neither a file nor a block device"
    if kind not in FORMATS:
        return f"has the format {kind} ({' and '.join(FORMATS)} are possible)"
    for name, what in (
        ("shareable", "is shared with other domains"),
        ("transient", "is transient"),
        ("encryption", "is encrypted by QEMU: its content would be stored as plain text"),
    ):
        if disk.find(name) is not None or source.find(name) is not None:
            return what
    return None
