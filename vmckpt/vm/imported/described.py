"""libvirt's XML of a VM that its spec describes: the same machine to the guest. Pure.

PCI addresses are those of `argv.py`, so that the guest finds its disks and NICs where they were.
"""

from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from vmckpt.errors import RefusedError
from vmckpt.vm.argv import FIRST_SLOT, default_mac
from vmckpt.vm.record import Platform
from vmckpt.vm.spec.spec import Disk, Nic, Spec


def described_domain(spec: Spec, platform: Platform, state_dir: Path, bridge: str | None) -> str:
    """The XML for `virsh define` on the host with that state directory and bridge.

    Raises RefusedError naming what libvirt's XML cannot say of it.
    """
    _require_possible(spec, bridge)
    root = Element("domain", type="kvm" if platform.accel == "kvm" else "qemu")
    SubElement(root, "name").text = spec.name
    SubElement(root, "memory", unit="b").text = str(spec.memory_bytes)
    SubElement(root, "vcpu").text = str(spec.vcpus)
    _os(root, spec, platform)
    SubElement(SubElement(root, "features"), "acpi")
    _cpu(root, platform.cpu)
    SubElement(root, "clock", offset="utc")
    devices = SubElement(root, "devices")
    slot = FIRST_SLOT
    for number, disk in enumerate(spec.disks):
        _address(_disk(devices, disk, disk.on(state_dir), f"vd{_letters(number)}"), slot)
        slot += 1
    for number, nic in enumerate(spec.nics):
        nic = nic._replace(isolated=spec.is_isolated)  # noqa: PLW2901 - all, or none
        mac = nic.mac or default_mac(spec.name, number)
        _address(_nic(devices, nic, mac, bridge or ""), slot)
        slot += 1
    if spec.guest_agent:
        _address(SubElement(devices, "controller", type="virtio-serial", index="0"), slot)
        channel = SubElement(devices, "channel", type="unix")
        SubElement(channel, "target", type="virtio", name="org.qemu.guest_agent.0")
    SubElement(SubElement(devices, "serial", type="pty"), "target", port="0")
    SubElement(devices, "controller", type="usb", model="none")
    SubElement(SubElement(devices, "video"), "model", type="none")
    SubElement(devices, "memballoon", model="none")
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _require_possible(spec: Spec, bridge: str | None) -> None:
    why = list(_impossible(spec, bridge))
    if why:
        raise RefusedError(
            f"'{spec.name}' cannot be described for libvirt",
            why="; ".join(why),
            remedy="change its spec (vmckpt vm edit), or write the domain's XML by hand",
        )


def _impossible(spec: Spec, bridge: str | None) -> Iterator[str]:
    if spec.devices:
        names = ", ".join(str(device["driver"]) for device in spec.devices)
        yield f"[[devices]] are QEMU's own words: {names}"
    if spec.passthrough:
        yield f"host devices are passed through: {', '.join(one.id for one in spec.passthrough)}"
    if bridge is None and any(nic.network == "bridge" for nic in spec.nics):
        yield "its NICs are on a bridge, and its host has none in the inventory"


def _os(root: Element, spec: Spec, platform: Platform) -> None:
    system = SubElement(root, "os")
    SubElement(system, "type", arch="x86_64", machine=platform.machine).text = "hvm"
    if spec.boot:
        SubElement(system, "kernel").text = str(spec.boot.kernel)
        if spec.boot.initrd:
            SubElement(system, "initrd").text = str(spec.boot.initrd)
        SubElement(system, "cmdline").text = spec.boot.cmdline
    if spec.firmware:
        loader = SubElement(system, "loader", readonly="yes", type="pflash")
        loader.text = str(spec.firmware.code)
        SubElement(system, "nvram").text = str(spec.firmware.vars)


def _cpu(root: Element, words: str) -> None:
    """QEMU's CPU: a model, then +feature or -feature."""
    model, *features = words.split(",")
    if model == "host":
        cpu = SubElement(root, "cpu", mode="host-passthrough", check="none")
    else:
        cpu = SubElement(root, "cpu", mode="custom", match="exact", check="none")
        SubElement(cpu, "model", fallback="forbid").text = model
    for feature in features:
        policy = "disable" if feature.startswith("-") or feature.endswith("=off") else "require"
        name = feature.lstrip("+-").partition("=")[0]
        SubElement(cpu, "feature", policy=policy, name=name)


def _disk(devices: Element, disk: Disk, image: Path, target: str) -> Element:
    element = SubElement(devices, "disk", type="file", device="disk")
    SubElement(element, "driver", name="qemu", type=disk.format, cache=disk.cache, discard="unmap")
    SubElement(element, "source", file=str(image))
    SubElement(element, "target", dev=target, bus="virtio")
    if disk.read_only:
        SubElement(element, "readonly")
    return element


def _nic(devices: Element, nic: Nic, mac: str, bridge: str) -> Element:
    element = SubElement(devices, "interface", type=nic.network)
    SubElement(element, "mac", address=mac)
    if nic.network == "bridge":
        SubElement(element, "source", bridge=bridge)
    SubElement(element, "model", type="virtio")
    SubElement(element, "driver", name="qemu")
    SubElement(element, "rom", enabled="no")
    if nic.isolated:
        SubElement(element, "link", state="down")
    return element


def _address(element: Element, slot: int) -> None:
    SubElement(
        element, "address", type="pci", domain="0x0000", bus="0x00", slot=f"0x{slot:02x}",
        function="0x0",
    )  # fmt: skip


def _letters(number: int) -> str:
    """A to z, then aa, ab, ... as Linux names disks."""
    text = ""
    while number >= 0:
        text = chr(ord("a") + number % 26) + text
        number = number // 26 - 1
    return text
