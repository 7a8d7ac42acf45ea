"""What a foreign checkpoint asks of a host, and what the operator has to allow.

A guest with new images and memory of its own is safe. Anything else that a manifest names (files,
devices and networks of the host, QEMU arguments) would be opened with vmckpt's rights. It is
refused by name, unless the operator trusts the checkpoint, or has written the same into the spec of
the host's VM of that name.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from vmckpt.errors import RefusedError
from vmckpt.vm.passthrough.passthrough import Passthrough
from vmckpt.vm.paths import IMAGES, IN_MEMORY
from vmckpt.vm.spec.spec import Spec

# Emulated devices without a back end on the host.
SAFE_DEVICES = frozenset(
    {
        "VGA", "bochs-display", "edu", "ich9-usb-ehci1", "ich9-usb-uhci1", "pvpanic", "qemu-xhci",
        "usb-kbd", "usb-mouse", "usb-tablet", "virtio-balloon-pci", "virtio-gpu-pci",
        "virtio-keyboard-pci", "virtio-mouse-pci", "virtio-rng-pci", "virtio-tablet-pci",
        "virtio-vga", "vmgenid", "i6300esb",
    }
)  # fmt: skip
# Their settings that concern only the guest: identity, address and features.
_SAFE_SETTINGS = frozenset(
    {
        "driver", "id", "addr", "bus", "guid", "multifunction", "port", "edid", "xres", "yres",
        "xmax", "ymax", "vgamem_mb", "max_outputs", "disable-legacy", "disable-modern",
        "deflate-on-oom", "free-page-reporting", "p2", "p3", "masterbus", "firstport",
    }
)  # fmt: skip


def require_safe(spec: Spec, own: Spec | None, *, plugged: bool) -> None:
    """Raises RefusedError naming all that the host would open. `own`: see `wanted`. Pure."""
    found = list(wanted(spec, own, plugged=plugged))
    if found:
        raise RefusedError(
            f"the checkpoint of '{spec.name}' was not taken by this site, and needs more than "
            "its own guest",
            why="; ".join(found),
            remedy="do not restore it; or, if you trust it with all of the above, add --trust",
        )


def wanted(spec: Spec, own: Spec | None, *, plugged: bool) -> Iterator[str]:
    """All that the host would open for the VM, in words, except what is in `own`.

    `own` is the spec of the host's VM of that name. Writable disks are not listed: a foreign VM
    gets new images.
    """
    yield from _files(spec, own)
    if not spec.sandbox and (own is None or own.sandbox):
        yield "a QEMU whose system calls are not filtered (sandbox = false)"
    if spec.overcommit and not (own and own.overcommit):
        yield "memory that is not reserved for it (overcommit)"
    for device in spec.devices:
        if not _is_safe(device) and (own is None or device not in own.devices):
            yield f"device {device}"
    for passed in spec.passthrough:
        if own is None or passed not in own.passthrough:
            yield f"a device of the host passed through: '{passed.id}' ({_whole(passed)})"
    if spec.adopted is not None and (own is None or spec.adopted != own.adopted):
        yield f"arguments of QEMU's: {' '.join(spec.adopted.arguments)}"
    if plugged and not spec.is_isolated:
        ours = {nic.network for nic in own.nics} if own else set[str]()
        for network in dict.fromkeys(nic.network for nic in spec.nics):
            if network not in ours:
                yield f"the host's network ({network}; without it: --network isolated)"


def _whole(passed: Passthrough) -> str:
    """All that a passed-through device names: devices, options, hook and sshd."""
    words = [passed.match or passed.driver, *(f"{k}={v}" for k, v in passed.options.items())]
    words += [str(one) for one in (passed.hook, passed.ssh) if one]
    return ", ".join(words)


def _files(spec: Spec, own: Spec | None) -> Iterator[str]:
    known = {_Opened(IN_MEMORY, "memory"), *(_opened(own) if own else ())}
    found = dict.fromkeys(one.path for one in _opened(spec) if one not in known)
    yield from (f"file {path}" for path in found)


class _Opened(NamedTuple):
    """A path and how the host opens it: read access in `own` does not allow writing."""

    path: Path
    use: str


def _opened(spec: Spec) -> Iterator[_Opened]:
    variables = spec.firmware.vars if spec.firmware else None
    for path in spec.files:
        yield _Opened(path, "variables" if path == variables else "read")
    yield _Opened(spec.ram_dir, "memory")
    yield from (_Opened(disk.path, "read") for disk in spec.disks if disk.read_only)


def _is_safe(device: dict[str, Any]) -> bool:
    plain = all(not isinstance(value, str) or "/" not in value for value in device.values())
    return device["driver"] in SAFE_DEVICES and plain and device.keys() <= _SAFE_SETTINGS


def confined(spec: Spec, own: Spec | None, checkpoint_id: str) -> Spec:
    """The spec with each writable disk in the host's `images/`, under a new name. Pure.

    A disk that `own`, the VM to be replaced, writes too keeps its path.
    """
    disks = list(spec.disks)
    for number, disk in enumerate(disks):
        its_own = own.disks[number] if own is not None and number < len(own.disks) else None
        is_own = its_own is not None and its_own.path == disk.path and not its_own.read_only
        if not disk.read_only and not is_own:
            name = f"{spec.name}-{number}-{checkpoint_id[:8]}.{disk.format}"
            disks[number] = disk._replace(path=Path(IMAGES) / name)
    return spec._replace(disks=tuple(disks))
