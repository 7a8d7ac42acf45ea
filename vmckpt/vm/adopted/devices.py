"""-device, -object and the machine: guest-visible parts are kept, host parts replaced."""

import re
from collections.abc import Mapping
from typing import Any

from vmckpt.vm.adopted.draft import Draft
from vmckpt.vm.adopted.host_ends import plugged_network
from vmckpt.vm.adopted.memory import BACK_END, in_file
from vmckpt.vm.adopted.options import Option
from vmckpt.vm.adopted.settings import JsonObject, KeyValues, Settings, parse_settings

# The prefix of a driver's name, and the host resource that it hands to the guest.
_PASSED_THROUGH = {
    "vfio-": "it is a device of the host, passed through",
    "pci-assign": "it is a device of the host, passed through",
    "usb-host": "it is a USB device of the host",
    "usb-redir": "it is a USB device behind a program outside",
    "scsi-generic": "it is a SCSI device of the host",
    "scsi-block": "it is a SCSI device of the host",
    "vhost-user": "a program outside QEMU serves it and writes the guest's memory",
    "vhost-scsi": "the host's kernel serves it",
    "vhost-vdpa": "it is a device of the host",
    "ivshmem": "it shares memory with programs on the host",
    "virtio-9p": "it shares a directory of the host",
    "u2f-passthru": "it is a device of the host",
    "ccid-card-emulated": "it is a card of the host",
    "ccid-card-passthru": "it is a card behind a program outside",
    "tpm-": "its state is outside QEMU",
    "xen-": "it needs Xen",
    "virtio-gpu-gl": "it draws on the host's GPU",
    "virtio-vga-gl": "it draws on the host's GPU",
    "virtio-gpu-rutabaga": "it draws on the host's GPU",
    "virtio-input-host": "it is an input device of the host",
}
# Checkpoints could contain half of a write to it, and restores replace it.
_SHARED = "other QEMUs may write to its disk, too"
_ON = ("on", "yes", "true")
_OBJECTS = frozenset(
    {"iothread", "rng-random", "rng-builtin", "throttle-group", "main-loop", "thread-context",
     "can-bus", "cryptodev-backend", "cryptodev-backend-builtin", "secret",
     "acpi-generic-initiator"}
)  # fmt: skip
# They serve displays and monitors, which are not moved.
_LEFT_BEHIND = re.compile(r"(tls-creds|tls-cipher|authz)-")


def device(draft: Draft, option: Option) -> None:
    """-device: kept in its position; unplugged devices are dropped."""
    settings = parse_settings(option.value or "", "driver")
    driver, name = settings.get("driver") or "", settings.get("id")
    for start, why in _PASSED_THROUGH.items():
        if driver.startswith(start):
            draft.refuse_option(option, why)
            return
    if settings.get("share-rw") in _ON:
        draft.refuse_option(option, _SHARED)
        return
    if name and name not in draft.facts.devices:
        draft.notes.append(
            f"'{name}' ({driver}) was unplugged, and the destination does not get it"
        )
        return
    if (rom := settings.get("romfile")) and "/" in rom:
        settings = settings.put("romfile", str(draft.file(rom, option)))
    if name and settings.get("addr") is None and name in draft.facts.slots:
        settings = settings.put("addr", draft.facts.slots[name])
    if name and (module := draft.facts.modules.get(name)):
        settings = settings.put("addr", module.address).put("slot", module.slot)
    draft.add("device", settings)


def plugged_devices(draft: Draft, nodes: Mapping[str, str]) -> None:
    """Devices that were plugged in later; `nodes` are their disks' nodes on the destination."""
    for name, settings in sorted(draft.facts.late.items()):
        written: dict[str, Any] = dict(settings)
        if why := _unpluggable(settings, nodes):
            draft.refuse(f"the device '{name}' ({settings['driver']})", f"plugged later: {why}")
            continue
        if "drive" in settings:
            written["drive"] = nodes[name]
        if (netdev := settings.get("netdev")) and not _has_network(draft, netdev):
            plugged_network(draft, netdev)
        draft.notes.append(
            f"'{name}' ({settings['driver']}) was plugged later: the destination gets it"
        )
        draft.add("device", JsonObject(written))


def _unpluggable(settings: Mapping[str, Any], nodes: Mapping[str, str]) -> str | None:
    """Why the destination cannot have a device that was plugged in later; None: it can."""
    for start, why in _PASSED_THROUGH.items():
        if settings["driver"].startswith(start):
            return why
    if "bus" not in settings:
        return "vmckpt does not support hot-plugged processors and memory"
    if "chardev" in settings:
        return "vmckpt does not support hot-plugged character devices"
    if settings.get("share-rw"):
        return _SHARED
    if "drive" in settings and settings["id"] not in nodes:
        return "there is no image in it"
    return None


def _has_network(draft: Draft, name: str) -> bool:
    return any(
        parse_settings(value, "type").get("id") == name
        for option, value in zip(draft.arguments, draft.arguments[1:], strict=False)
        if option == "-netdev"
    )


def object_(draft: Draft, option: Option) -> None:
    """-object: memory, threads and the like; those of monitors and displays are dropped."""
    settings = parse_settings(option.value or "", "qom-type")
    kind = settings.get("qom-type") or ""
    if found := BACK_END.fullmatch(kind):
        name = settings.get("id") or ""
        if (offset := draft.memory.offsets.get(name)) is not None:
            draft.add("object", in_file(name, offset, draft.facts, kind=found[1]))
        else:
            draft.add("object", _memory(draft, option, settings))
    elif kind in _OBJECTS:
        if path := settings.get("file"):
            settings = settings.put("file", str(draft.file(path, option)))
        draft.add("object", settings)
    elif not _LEFT_BEHIND.match(kind):
        draft.refuse_option(option, "vmckpt does not support this type of object")


def _memory(draft: Draft, option: Option, settings: Settings) -> Settings:
    path = settings.get("mem-path")
    if path is None:
        return settings
    return settings.put("mem-path", str(memory_directory(draft, option, path)))


def memory_directory(draft: Draft, option: Option, text: str) -> object:
    """Where a file of memory goes: two QEMUs must never share one.

    In a directory QEMU creates its own file.
    """
    path = draft.path(text, option)
    return path if str(path) in draft.facts.directories else path.parent


def machine(draft: Draft, options: list[Option]) -> None:
    """-machine, with the resolved type and accelerator; also the CPU and the memory."""
    given = [parse_settings(option.value or "", "type") for option in options]
    pairs: list[tuple[str, str]] = []
    for option, settings in zip(options, given, strict=True):
        if isinstance(settings, JsonObject):
            draft.refuse_option(option, "vmckpt does not read a machine in JSON")
        else:
            pairs += settings.pairs
    kept = KeyValues(tuple(pairs)).without("type", "accel", "graphics")
    if kept.get("confidential-guest-support") or kept.get("memory-encryption"):
        draft.refuse("the machine", "its memory is encrypted for this host's processor")
    facts = draft.facts
    offset = draft.memory.offsets.get(facts.ram_id or "")
    if facts.ram_id and not draft.has_own_memory and offset is not None:
        draft.add("object", in_file(facts.ram_id, offset, facts))
        kept = kept.put("memory-backend", facts.ram_id)
    draft.add("machine", KeyValues((("type", facts.platform.machine), *kept.pairs)))


def accelerator(draft: Draft, options: list[Option]) -> None:
    """-accel: the one in use, of those requested."""
    kind = draft.facts.platform.accel
    accels = [parse_settings(option.value or "", "accel") for option in options]
    chosen = next((one for one in accels if one.get("accel") == kind), None)
    draft.add("accel", chosen or KeyValues((("accel", kind),)))
