"""A domain's XML with other images, or as a copy of the domain. Pure."""

from collections.abc import Mapping
from typing import NamedTuple
from xml.etree import ElementTree

from vmckpt.errors import RefusedError
from vmckpt.vm.argv import default_mac
from vmckpt.vm.domains.definition.description import ImageFile, parse_xml, variables_of

# The usual prefixes; libvirt itself looks only at the URIs.
for _prefix, _uri in (
    ("qemu", "http://libvirt.org/schemas/domain/qemu/1.0"),
    ("libosinfo", "http://libosinfo.org/xmlns/libvirt/domain/1.0"),
    ("vmckpt", "urn:vmckpt"),
):
    ElementTree.register_namespace(_prefix, _uri)
_HEARTBEATS = "{urn:vmckpt}heartbeats"
# What a NIC keeps when it is connected to nothing.
_GUEST_SIDE = ("mac", "model", "address", "alias", "rom", "driver", "boot", "mtu", "acpi")
# Where libvirt makes sockets of its own choice.
_LIBVIRTS = ("/var/lib/libvirt/qemu/", "/run/libvirt/qemu/", "/var/run/libvirt/qemu/")
# Among images: no disk has this name.
VARIABLES = "nvram"
_BASES = ("backingStore", "mirror")
# Options of QEMU's that <qemu:commandline> may have in a copy: without a path none of them names a
# file or a network.
_QEMU = "{http://libvirt.org/schemas/domain/qemu/1.0}"
_ARGUMENTS = f"{_QEMU}commandline/{_QEMU}arg"
_HARMLESS = frozenset({"boot", "cpu", "device", "global", "rtc", "set", "smp"})
_CHARACTER_DEVICES = ("serial", "console", "parallel", "channel", "redirdev")
# What the content of an image is in besides its file.
_ELSEWHERE = ("slices", "dataStore")
# Devices of which one machine's would be another's, too. The definition may have more of them than
# a domain that could be captured: they come with its next start.
_OF_THE_HOST = {
    "hostdev": "a device of its host",
    "filesystem": "a directory of its host",
    "shmem": "memory shared with others",
    "vsock": "an address of its host",
    "input[@type='evdev']": "an input device of its host",
    "input[@type='passthrough']": "an input device of its host",
    "rng/backend[@model='egd']": "a service for random numbers",
    "pstore": "a file of its host (pstore)",
}


class DomainIdentity(NamedTuple):
    """What is unique to a copy. `macs`: by NIC, None: those of the original."""

    name: str
    uuid: str
    macs: tuple[str, ...] | None
    isolated: bool


def with_images(xml: str, images: Mapping[str, ImageFile]) -> str:
    """The XML with these images, by the disks' names (vda): they are based on no others.

    VARIABLES: the UEFI variable store. It is returned as it was if it has them already. Raises
    UsageError.
    """
    root, is_changed = parse_xml(xml, "a domain's XML"), False
    for disk in root.iterfind("devices/disk"):
        target = disk.find("target")
        image = None if target is None else images.get(target.get("dev", ""))
        if image is not None and not _has(disk, image):
            _give(disk, image)
            is_changed = True
    store = images.get(VARIABLES)
    if store is not None and variables_of(root) not in (None, store):
        _give_variables(root, store)
        is_changed = True
    return ElementTree.tostring(root, encoding="unicode") if is_changed else xml


def _give_variables(root: ElementTree.Element, image: ImageFile) -> None:
    for element in root.iterfind("os/nvram"):
        if element.get("format", "raw") != image.format:
            element.set("format", image.format)
        if (source := element.find("source")) is None:
            element.text = str(image.path)
        else:
            source.set("file", str(image.path))


def _has(disk: ElementTree.Element, image: ImageFile) -> bool:
    source, driver = disk.find("source"), disk.find("driver")
    if source is None or driver is None or any(disk.find(name) is not None for name in _BASES):
        return False
    if any(source.find(name) is not None for name in _ELSEWHERE):
        return False
    return (source.get("file"), driver.get("type")) == (str(image.path), image.format)


def _give(disk: ElementTree.Element, image: ImageFile) -> None:
    for name in ("source", *_BASES):
        for old in disk.findall(name):
            disk.remove(old)
    disk.set("type", "file")
    if (driver := disk.find("driver")) is None:
        driver = ElementTree.SubElement(disk, "driver", {"name": "qemu"})
    driver.set("type", image.format)
    ElementTree.SubElement(disk, "source", {"file": str(image.path)})


def as_copy(xml: str, new: DomainIdentity) -> str:
    """The XML of a copy. Raises RefusedError: it needs something that the original has; UsageError.

    Graphics get ports of libvirt's choice. An isolated copy's NICs are taps on no bridge.
    """
    root = parse_xml(xml, "a domain's XML")
    root.attrib.pop("id", None)
    for tag, text in (("name", new.name), ("uuid", new.uuid)):
        element = root.find(tag)
        if element is None:
            element = ElementTree.SubElement(root, tag)
        element.text = text
    _require_own_arguments(root, new.name)
    for path, what in _OF_THE_HOST.items():
        if root.find(f"devices/{path}") is not None:
            raise _shared(new.name, f"the original has {what}")
    _change_platform(root, new)
    for metadata in root.iterfind("metadata"):
        for own in metadata.findall(_HEARTBEATS):
            metadata.remove(own)
    for label in root.findall("seclabel[@type='dynamic']"):
        root.remove(label)
    for number, nic in enumerate(root.iterfind("devices/interface")):
        _change_nic(nic, new, number)
    for kind in _CHARACTER_DEVICES:
        for device in root.iterfind(f"devices/{kind}"):
            _change_character_device(device, new.name)
    for graphics in root.iterfind("devices/graphics"):
        _change_graphics(graphics)
    return ElementTree.tostring(root, encoding="unicode")


def _require_own_arguments(root: ElementTree.Element, name: str) -> None:
    """Raises RefusedError if QEMU may have a disk or a network that the rest does not show."""
    for argument in root.iterfind(_ARGUMENTS):
        value = argument.get("value", "")
        is_harmless = value.lstrip("-") in _HARMLESS if value.startswith("-") else "/" not in value
        if not is_harmless:
            raise RefusedError(
                f"the checkpoint cannot become '{name}'",
                why=f"the original gives QEMU the argument '{value}' (qemu:commandline), and the "
                "copy would share what that names",
                remedy="restore the domain itself: --in-place, or where there is none of its name",
            )


def _change_platform(root: ElementTree.Element, new: DomainIdentity) -> None:
    for entry in root.iterfind("sysinfo/system/entry[@name='uuid']"):
        entry.text = new.uuid
    for backend in root.iterfind("devices/tpm/backend"):
        for source in backend.findall("source"):
            backend.remove(source)  # libvirt has a place for each domain's state


def _change_graphics(graphics: ElementTree.Element) -> None:
    for name in ("port", "tlsPort", "websocket", "socket"):
        graphics.attrib.pop(name, None)
    if graphics.get("type") in ("vnc", "spice"):
        graphics.set("autoport", "yes")
    for listen in graphics.iterfind("listen[@type='socket']"):
        listen.attrib.pop("socket", None)


def _change_nic(nic: ElementTree.Element, new: DomainIdentity, number: int) -> None:
    if new.macs is not None:
        if (mac := nic.find("mac")) is None:
            mac = ElementTree.SubElement(nic, "mac")
        # One that the original was to get with its next start is in the definition alone.
        is_known = number < len(new.macs)
        mac.set("address", new.macs[number] if is_known else default_mac(new.name, number))
    for target in nic.findall("target"):
        nic.remove(target)  # the tap of the original
    if new.isolated:
        for child in list(nic):
            if child.tag not in _GUEST_SIDE:
                nic.remove(child)
        for driver in nic.findall("driver"):
            driver.attrib.pop("name", None)
        nic.attrib.clear()
        nic.set("type", "ethernet")


def _change_character_device(device: ElementTree.Element, name: str) -> None:
    kind = device.get("type")
    for log in device.findall("log"):
        device.remove(log)  # libvirt would empty the original's, or mix both in it
    if kind == "pty":
        device.attrib.pop("tty", None)
    for source in device.findall("source"):
        path = source.get("path", "")
        if kind == "pty" or (kind == "unix" and path.startswith(_LIBVIRTS)):
            device.remove(source)  # libvirt makes another one
        elif kind not in ("null", "spicevmc", "spiceport", "qemu-vdagent"):
            used = f"the original's {device.tag} of type {kind} uses {path or 'an address'}"
            raise _shared(name, used)


def _shared(name: str, used: str) -> RefusedError:
    return RefusedError(
        f"the checkpoint cannot become '{name}'",
        why=f"{used}, which the copy would use too",
        remedy="restore the domain itself: --in-place, or where there is none of its name",
    )
