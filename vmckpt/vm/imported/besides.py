"""What libvirt does for a domain besides starting its QEMU. A VM of vmckpt's own goes without."""

from collections.abc import Iterator
from xml.etree.ElementTree import Element

from vmckpt.vm.domains.definition.description import parse_xml

# Libvirt's limits on a domain, by their elements, and on its disks and NICs.
_LIMITS = ("cputune", "memtune", "blkiotune", "numatune")
_DISK_LIMITS, _NIC_LIMITS = "iotune", "bandwidth"


def protections(xml: str) -> list[str]:
    """What the guest or others rely on, and would lose. Raises UsageError."""
    devices = parse_xml(xml, "a domain's XML").find("devices")
    if devices is None:
        return []
    found = [why for disk in devices.iterfind("disk") for why in _of_disk(disk)]
    found += [why for nic in devices.iterfind("interface") for why in _of_nic(nic)]
    if devices.find("lease") is not None:
        found.append("it has leases, by which libvirt keeps its disks from being used twice")
    return found


def limits(xml: str) -> list[str]:
    """The elements of libvirt's limits on it. Raises UsageError."""
    root = parse_xml(xml, "a domain's XML")
    found = [name for name in _LIMITS if root.find(name) is not None]
    paths = (f"devices/disk/{_DISK_LIMITS}", f"devices/interface/{_NIC_LIMITS}")
    found += [path.rpartition("/")[2] for path in paths if root.find(path) is not None]
    if root.find("vcpu[@cpuset]") is not None:
        found.append("cpuset")
    return found


def _of_disk(disk: Element) -> Iterator[str]:
    target = disk.find("target")
    name = "" if target is None else target.get("dev", "")
    if disk.find("transient") is not None:
        yield f"disk {name} is transient: what the guest writes would be kept"
    if disk.find("shareable") is not None and disk.find("readonly") is None:
        yield f"disk {name} is shareable: other domains may write to it, too"


def _of_nic(nic: Element) -> Iterator[str]:
    address = nic.find("mac")
    name = "" if address is None else address.get("address", "")
    if nic.find("filterref") is not None:
        yield f"NIC {name} has a network filter"
    if nic.find("vlan") is not None:
        yield f"NIC {name} is in a VLAN"
    if nic.find("port[@isolated='yes']") is not None:
        yield f"NIC {name} is isolated from others on its bridge"
    if nic.find("link[@state='down']") is not None:
        yield f"NIC {name} is not connected (its link is down)"
