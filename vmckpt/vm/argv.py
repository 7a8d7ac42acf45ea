"""QEMU's command line from a spec. Pure."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vmckpt.vm.adopted.copies.isolation import isolated, unconnected
from vmckpt.vm.adopted.escape import double_commas
from vmckpt.vm.adopted.holes import RAM, fill
from vmckpt.vm.adopted.settings import JsonObject, parse_settings
from vmckpt.vm.passthrough.passthrough import port_arguments
from vmckpt.vm.paths import QemuDir
from vmckpt.vm.record import RAM_NAME, Platform
from vmckpt.vm.spec.spec import Disk, Nic, Spec

FIRST_SLOT = 3
# System calls that no QEMU of vmckpt needs but a compromised one would use: to become another user,
# start programs, or raise its priority. The same as libvirt's. What vmckpt itself has QEMU do (a
# userfaultfd, real-time priority for a pause) is not among them, or is done from outside.
SANDBOX = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"


def qemu_argv(
    spec: Spec,
    platform: Platform,
    files: QemuDir,
    qemu: str,
    *,
    incoming: bool,
    private_ram: bool = False,
    ram_is_read_only: bool = False,
) -> list[str]:
    """The command line. The VM waits for `cont`, or for a migration if `incoming`.

    `private_ram`: its RAM file is mapped privately, opened without the right to write if
    `ram_is_read_only` (from QEMU 8.2 on).
    Devices have fixed PCI addresses, so that both ends of a migration agree whatever other devices
    there are.
    """
    mapping = _mapping(private=private_ram, read_only=ram_is_read_only)
    return [
        qemu,
        "-name",
        f"{spec.name},process=vmckpt-{spec.name}"[:64],
        *(
            _described(spec, platform, files, _ram(spec, files) | mapping)
            if spec.adopted is None
            else _adopted(spec, files, mapping)
        ),
        "-pidfile",
        str(files.pid),
        "-msg",
        "timestamp=on",
        *_sockets(files),
        # The log then shows when vCPUs started to run: evidence, even for a dead QEMU, whether they
        # did.
        "-trace",
        "vm_state_notify",
        *(["-sandbox", SANDBOX] if spec.sandbox else []),
        "-S",
        *(["-incoming", "defer"] if incoming else []),
    ]


def _adopted(spec: Spec, files: QemuDir, mapping: dict[str, Any]) -> list[str]:
    """An adopted machine, by its own command line."""
    images = [disk.on(files.state_dir) for disk in spec.disks]
    arguments: Sequence[str] = spec.adopted.arguments if spec.adopted else ()
    if spec.is_isolated:
        arguments = isolated(arguments)
    arguments = [_mapped(word, mapping) if RAM in word else word for word in arguments]
    return fill(arguments, files, files.ram(spec.ram_dir), images, len(spec.nics))


def _described(spec: Spec, platform: Platform, files: QemuDir, ram: dict[str, Any]) -> list[str]:
    """A machine that the spec describes."""
    argv = [
        "-nodefaults",
        "-no-user-config",
        "-display",
        "none",
        "-vga",
        "none",
        "-accel",
        platform.accel + (",thread=multi" if platform.accel == "tcg" else ""),
        "-machine",
        f"{platform.machine},memory-backend={RAM_NAME}",
        "-cpu",
        platform.cpu,
        "-smp",
        str(spec.vcpus),
        "-m",
        f"{spec.memory_bytes >> 20}M",
        "-object",
        _json(ram),
        *_console(files),
        *_boot(spec),
    ]
    slot, virtio = FIRST_SLOT, _virtio(platform.accel)
    stand_ins, addresses = [device.nic for device in spec.passthrough], macs(spec)
    for number, disk in enumerate(spec.disks):
        argv += _disk(number, disk, disk.on(files.state_dir), slot, virtio)
        slot += 1
    for number, nic in enumerate(spec.nics):
        # Isolation applies to all NICs: another NIC would be a way out.
        nic = nic._replace(isolated=spec.is_isolated)  # noqa: PLW2901
        mac = addresses[number]
        pair = {"failover": True} if number in stand_ins else {}
        if nic.isolated and nic.network == "user":
            argv += ["-netdev", _json(unconnected(f"net{number}-off"))]
        argv += _nic(number, mac, _netdev(number, nic, files.tap(number)), slot, virtio | pair)
        slot += 1
    if spec.guest_agent:
        argv += _agent(files, slot, virtio)
        slot += 1
    argv += port_arguments(spec.passthrough, slot)
    for number, passed in enumerate(spec.passthrough, len(spec.nics)):
        if passed.netdev:
            argv += ["-netdev", _json(_tap(passed.netdev, files.tap(number)))]
    for device in spec.devices:
        argv += ["-device", _json(device)]
    return argv


def _virtio(accel: str) -> dict[str, Any]:
    """Extra settings for virtio devices.

    Under TCG, an eventfd per queue saves no exit to QEMU. But a device creates its eventfds at each
    `cont`: the first one of a standby's QEMU took 11 to 21 ms with them, 2 to 6 ms without.
    """
    return {"ioeventfd": False} if accel == "tcg" else {}


def _nic(
    number: int, mac: str, netdev: dict[str, Any], slot: int, more: dict[str, Any]
) -> list[str]:
    device = {
        "driver": "virtio-net-pci",
        "id": f"nic{number}",
        "netdev": netdev["id"],
        "mac": mac,
        "addr": hex(slot),
        "romfile": "",
        **more,
    }
    return ["-netdev", _json(netdev), "-device", _json(device)]


def _netdev(number: int, nic: Nic, tap: str) -> dict[str, Any]:
    """A NIC's back end. An isolated NIC's tap is on no bridge; a hub has no other port.

    It remains a tap, because the features negotiated with the guest depend on the type of back end.
    """
    name = f"net{number}"
    if nic.network == "bridge":
        return _tap(name, tap)
    if nic.isolated:
        return {"type": "hubport", "id": name, "hubid": number}
    return {"type": "user", "id": name}


def _tap(name: str, tap: str) -> dict[str, Any]:
    options = {"ifname": tap, "script": "no", "downscript": "no", "vhost": False}
    return {"type": "tap", "id": name, **options}


def _agent(files: QemuDir, slot: int, virtio: dict[str, Any]) -> list[str]:
    port = {"driver": "virtserialport", "chardev": "agent", "name": "org.qemu.guest_agent.0"}
    return [
        "-device",
        _json({"driver": "virtio-serial-pci", "id": "serial0", "addr": hex(slot), **virtio}),
        "-chardev",
        f"socket,id=agent,path={_plain(files.agent)},server=on,wait=off",
        "-device",
        _json(port),
    ]


def bridged_macs(spec: Spec) -> list[str]:
    """The MACs of its NICs that are, or may be, on the host's bridge; those that QEMU chose are
    unknown.
    """
    if spec.is_isolated or "bridge" not in {nic.network for nic in spec.nics}:
        return []
    if spec.adopted is None:
        return [
            nic.mac or default_mac(spec.name, number)
            for number, nic in enumerate(spec.nics)
            if nic.network == "bridge"
        ]
    values = zip(spec.adopted.arguments, spec.adopted.arguments[1:], strict=False)
    given = [parse_settings(value) for name, value in values if name in ("-device", "-nic", "-net")]
    return [mac.lower() for one in given if (mac := one.get("mac") or one.get("macaddr"))]


def macs(spec: Spec) -> tuple[str, ...]:
    """The addresses of the guest's NICs, in order."""
    if spec.adopted is not None:
        from vmckpt.vm.adopted.copies import nics

        return tuple(nics.macs(spec.adopted.arguments))
    named = enumerate(spec.nics)
    return tuple(nic.mac or default_mac(spec.name, number) for number, nic in named)


def default_mac(vm_name: str, number: int) -> str:
    """A stable locally administered MAC for NIC `number` of the VM."""
    import hashlib

    digest = hashlib.sha256(f"{vm_name}/{number}".encode()).digest()
    return "52:54:00:" + ":".join(f"{byte:02x}" for byte in digest[:3])


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))


def _plain(path: Path) -> str:
    return double_commas(str(path))


def _ram(spec: Spec, files: QemuDir) -> dict[str, Any]:
    # A named, shared file, which outside access to guest RAM requires.
    return {
        "qom-type": "memory-backend-file",
        "id": RAM_NAME,
        "size": spec.memory_bytes,
        "mem-path": str(files.ram(spec.ram_dir)),
    }


def _mapping(*, private: bool, read_only: bool) -> dict[str, Any]:
    return {"share": not private, **({"readonly": True, "rom": "off"} if read_only else {})}


def _mapped(argument: str, mapping: dict[str, Any]) -> str:
    """An adopted machine's RAM, if it is in a file of vmckpt's."""
    value = parse_settings(argument)
    return str(JsonObject(value.data | mapping)) if isinstance(value, JsonObject) else argument


def _sockets(files: QemuDir) -> list[str]:
    argv = []
    for name in ("operator", "onlooker", "rescue"):
        path = _plain(getattr(files, name))
        argv += [
            "-chardev",
            f"socket,id={name},path={path},server=on,wait=off",
            "-mon",
            f"chardev={name},mode=control",
        ]
    return argv


def _console(files: QemuDir) -> list[str]:
    log = f"logfile={_plain(files.console_log)},logappend=on"
    chardev = f"socket,id=console,path={_plain(files.console)},server=on,wait=off,{log}"
    return ["-chardev", chardev, "-serial", "chardev:console"]


def _boot(spec: Spec) -> list[str]:
    argv = []
    if spec.boot:
        argv += ["-kernel", str(spec.boot.kernel), "-append", spec.boot.cmdline]
        if spec.boot.initrd:
            argv += ["-initrd", str(spec.boot.initrd)]
    if spec.firmware:
        for unit, (path, read_only) in enumerate(
            ((spec.firmware.code, True), (spec.firmware.vars, False))
        ):
            name = f"pflash{unit}"
            node = {"driver": "file", "filename": str(path)}
            argv += [
                "-blockdev",
                _json({"driver": "raw", "node-name": name, "read-only": read_only, "file": node}),
                "-machine",
                f"{name}={name}",
            ]
    return argv


def _disk(number: int, disk: Disk, image: Path, slot: int, virtio: dict[str, Any]) -> list[str]:
    protocol = {
        "driver": "file",
        "node-name": f"disk{number}-file",
        "filename": str(image),
        "cache": {"direct": disk.cache == "none"},
        "discard": "unmap",
    }
    node = {
        "driver": disk.format,
        "node-name": f"disk{number}",
        "file": f"disk{number}-file",
        "read-only": disk.read_only,
        "discard": "unmap",
    }
    device = {
        "driver": "virtio-blk-pci",
        "id": f"disk{number}-dev",
        "drive": f"disk{number}",
        "addr": hex(slot),
        **virtio,
    }
    return ["-blockdev", _json(protocol), "-blockdev", _json(node), "-device", _json(device)]
