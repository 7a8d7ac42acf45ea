"""A host's cards for passthrough: what the kernel shows, and which VM has each."""

import re
import reprlib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from vmckpt.codec import convert
from vmckpt.errors import OperationFailedError
from vmckpt.foreign import MalformedError, parse
from vmckpt.hosts.host import Host
from vmckpt.units import format_size
from vmckpt.vm.passthrough.passthrough import MDEV, VFIO, Passthrough, Strategy
from vmckpt.vm.paths import QEMU_PREFIX, QemuDir, vm_dir, vms_dir

# Drivers that leave the rest of an IOMMU group usable.
HARMLESS = frozenset({"pci-stub", "pcieport", ""})
VFIO_DEVICES = Path("/dev/vfio")
SYSFS = "/sys"
# One line per PCI function and per mediated device: address, vendor:device or mdev:type, driver and
# its version, IOMMU group, parent device, whether its driver exposes it to VFIO, its windows.
_LIST = """\
version() { version=; [ -e "$1" ] && read -r version _ < "$1"; }
for d in "$1"/bus/pci/devices/*; do
    [ -e "$d/vendor" ] || continue
    driver=$(readlink "$d/driver"); group=$(readlink "$d/iommu_group")
    of=$(readlink "$d/physfn"); read -r vendor < "$d/vendor"; read -r device < "$d/device"
    version "$d/driver/module/version"
    shown=; [ -e "$d/vfio-dev" ] && shown=vfio
    windows=
    [ -e "$d/resource" ] && while read -r first last _; do
        windows="$windows$first-$last,"
    done < "$d/resource"
    echo "${d##*/} ${vendor#0x}:${device#0x} ${driver##*/}- $version-" \
        "${group##*/}- ${of##*/}- $shown- $windows-"
done
for d in "$1"/bus/mdev/devices/*; do
    [ -e "$d/mdev_type" ] || continue
    type=$(readlink "$d/mdev_type"); group=$(readlink "$d/iommu_group")
    on=$(readlink -f "$d"); on=${on%/*}; driver=$(readlink "$on/driver")
    version "$on/driver/module/version"
    echo "${d##*/} mdev:${type##*/} ${driver##*/}- $version-" \
        "${group##*/}- ${on##*/}- ${group:+vfio}- -"
done
"""
# Mediated devices that can still be created of a type: parent device, and how many.
_COULD_BE_MADE = """\
for d in "$1"/class/mdev_bus/*/mdev_supported_types/"$2"; do
    [ -e "$d/available_instances" ] || continue
    on=${d%/mdev_supported_types/*}; read -r number < "$d/available_instances"
    echo "${on##*/} $number"
done
"""
# Of a PCI function, or a mediated device; and what the kernel shows of a resource.
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]|[0-9a-f-]{36}")
_WINDOW = re.compile(r"0x[0-9a-f]{1,16}-0x[0-9a-f]{1,16}")
# The number of a PCI function's resources that are its own BARs.
BARS = 6
_OPEN = 'exec 3<>"$1"'


class Function(NamedTuple):
    """A host's PCI function: `name` is VENDOR:DEVICE; `driver` and `group` may be empty.

    A virtual function (SR-IOV) is `part_of` another. `is_vfio`: its driver allows passthrough. It
    maps at most `window_bytes` at once. A mediated device (vGPU) counts as a function as well: its
    address is its UUID, its name mdev:TYPE, its driver that of the card that it is `part_of`.
    """

    address: str
    name: str
    driver: str
    group: str
    part_of: str
    is_vfio: bool
    version: str = ""
    window_bytes: int = 0

    @property
    def card(self) -> str:
        """The common address of a card's functions; a virtual function is a card by itself."""
        return self.address if self.part_of else self.address.rpartition(".")[0]


class Card(NamedTuple):
    """All functions of one card, by number; VENDOR:DEVICE of function 0 is its name."""

    functions: tuple[Function, ...]

    @property
    def name(self) -> str:
        """Its VENDOR:DEVICE."""
        return self.functions[0].name

    @property
    def addresses(self) -> tuple[str, ...]:
        """Its functions' addresses."""
        return tuple(function.address for function in self.functions)


def parse_functions(text: str) -> list[Function]:
    """Parse the output of `_LIST`. Raises ValueError. Pure."""
    found = []
    for line in text.splitlines():
        address, name, *rest = line.split()
        _require_address(address)
        driver, version, group, part_of, shown, windows = (word[:-1] for word in rest)
        # Before Linux 6.1 only a driver's name shows that it is VFIO's, or a vendor's VFIO driver.
        is_vfio = bool(shown) or driver.replace("-", "_").endswith("vfio_pci")
        window_bytes = max(map(_window_bytes, windows.split(",")[:BARS]))
        found.append(
            Function(address, name, driver, group, part_of, is_vfio, version, window_bytes)
        )
    return found


def _require_address(text: str) -> None:
    if not _ADDRESS.fullmatch(text):
        raise MalformedError(f"{reprlib.repr(text)} is not the address of a device")


def _window_bytes(text: str) -> int:
    if text and not _WINDOW.fullmatch(text):
        raise MalformedError(f"{reprlib.repr(text)} is not a window of a device")
    first, _, last = text.partition("-")
    return int(last, 16) - int(first, 16) + 1 if last and int(last, 16) else 0


def cards(functions: Iterable[Function]) -> list[Card]:
    """Group functions by card. Pure."""
    found: dict[str, list[Function]] = defaultdict(list)
    for function in sorted(functions):
        found[function.card].append(function)
    return [Card(tuple(parts)) for parts in found.values()]


def unfit(card: Card, taken: Iterable[str], others: Iterable[Card] = ()) -> str | None:
    """Why the card cannot be given to a guest now; None: it can. `others` are the host's. Pure."""
    wrong = [one for one in card.functions if not one.is_vfio]
    if wrong:
        what = ", ".join(f"{one.address} ({one.driver or 'no driver'})" for one in wrong)
        return f"{what} is not bound to {VFIO}"
    if has := sorted(set(card.addresses) & set(taken)):
        return f"{has[0]} is another VM's"
    groups = {one.group for one in card.functions}
    mates = [one for other in others if other != card for one in other.functions]
    for one in mates:
        if one.group in groups and not one.is_vfio and one.driver not in HARMLESS:
            return f"{one.address} ({one.driver}) is in its IOMMU group and not bound to {VFIO}"
    return None


def unlike(card: Card, strategy: Strategy, ours: Card) -> str | None:
    """Why this card cannot replace the guest's card `ours`; None: it can. Pure.

    With hooks an equivalent that maps no less will do. QEMU's own migration needs a driver that
    moves state, the same on both sides: plain vfio-pci does not.
    """
    first, mine = ours.functions[0], card.functions[0]
    if strategy is Strategy.VFIO_MIGRATION:
        for one in (first, mine):
            if one.driver == VFIO:
                return f"{one.address} is bound to {VFIO}, which moves no state of a device"
        if first.driver != mine.driver:
            return f"{mine.address} is bound to {mine.driver}, the VM's own to {first.driver}"
    if mine.window_bytes < first.window_bytes:
        least, most = format_size(mine.window_bytes), format_size(first.window_bytes)
        return f"{mine.address} maps {least} of its memory, the VM's own {most}"
    return None


async def cards_of(host: Host) -> list[Card]:
    """The host's cards. Raises OperationFailedError."""
    done = await host.run(["sh", "-c", _LIST, "sh", SYSFS])
    try:
        return cards(parse_functions(done.stdout))
    except ValueError as exc:
        raise OperationFailedError(
            f"cannot list the PCI devices of {host.name}",
            why=f"{exc}; {done.stderr.strip()}",
            remedy="check /sys/bus/pci/devices there",
        ) from exc


async def choose(
    host: Host, device: Passthrough, taken: Iterable[str], ours: Card | None = None
) -> tuple[Card | None, str]:
    """A free equivalent of `device`; or None and the reason.

    `ours` is the guest's present card.
    """
    everything = await cards_of(host)
    equals = [card for card in everything if card.name == device.match]
    if not equals:
        return None, f"{host.name} has no device {device.match}{await _could_be(host, device)}"
    taken = set(taken)
    reasons = []
    for card in equals:
        reason = unfit(card, taken, everything)
        if reason is None and ours:
            reason = unlike(card, device.strategy, ours)
        reason = reason or await closed(host, card)
        if reason is None:
            return card, f"{card.addresses[0]} is free"
        reasons.append(reason)
    return None, f"no device {device.match} of {host.name} is free: {'; '.join(reasons)}"


async def _could_be(host: Host, device: Passthrough) -> str:
    """Where a mediated device of the type could be created; empty: nowhere."""
    kind = (device.match or "").removeprefix(MDEV)
    if kind == device.match:
        return ""
    done = await host.run(["sh", "-c", _COULD_BE_MADE, "sh", SYSFS, kind])
    lines = [line.split() for line in done.stdout.splitlines()]
    found = [f"{line[1]} on {line[0]}" for line in lines if len(line) == 2 and line[1] != "0"]
    return f" (could be made by mdevctl: {', '.join(found)})" if found else ""


async def closed(host: Host, card: Card) -> str | None:
    """Which part of a free card cannot be opened, and why; None: all can.

    A group can be opened only once at a time, which reveals other users, such as a libvirt domain.
    """
    for group in sorted({one.group for one in card.functions}):
        path = VFIO_DEVICES / group
        if not await host.usable(path):
            return f"this user may not use {path} ({card.addresses[0]})"
        done = await host.run(["env", "LC_ALL=C", "sh", "-c", _OPEN, "sh", str(path)])
        if "busy" in done.stderr:
            return f"{path} is in use ({card.addresses[0]})"
        if done.returncode:
            return f"{path} cannot be opened ({card.addresses[0]}): {done.stderr.strip()}"
    return None


async def states(host: Host) -> list[tuple[Card, str]]:
    """Every card of a host: "free", or why it cannot be given to a guest now."""
    taken, found = await taken_on(host), await cards_of(host)
    return [
        (card, unfit(card, taken, found) or await closed(host, card) or "free") for card in found
    ]


async def taken_on(host: Host, besides: QemuDir | None = None) -> set[str]:
    """The addresses of functions that vmckpt's VMs have on a host, except those of `besides`.

    A QEMU that has ended, as by the guest's power-off or the host's, has none: they are given to
    running ones only, and its record stays until the next command on its VM.
    """
    found: set[str] = set()
    for vm in await host.list_dir(vms_dir(host.state_dir)):
        directory = vm_dir(host.state_dir, vm)
        for name in await host.list_dir(directory.path):
            files = directory.qemu(name.removeprefix(QEMU_PREFIX))
            if name.startswith(QEMU_PREFIX) and (besides is None or files.path != besides.path):
                given = await read_given(host, files)
                if given and await host.find_processes(files.mark):
                    found |= {one for addresses in given.values() for one in addresses}
    return found


async def read_given(host: Host, files: QemuDir) -> dict[str, list[str]]:
    """The functions that each device of a QEMU has, or is about to get."""
    text = await host.read_text(files.given)
    try:
        found = convert(dict[str, list[str]], parse(text or "{}"))
        for addresses in found.values():
            for address in addresses:
                _require_address(address)
        return found
    except MalformedError:
        return {}  # interrupted while it was written: nothing in it was assigned yet


async def cards_of_vm(host: Host, files: QemuDir) -> dict[str, Card]:
    """The cards of a QEMU's devices, by device id, as the host shows them."""
    given = await read_given(host, files)
    if not given:
        return {}
    everything = {card.addresses[0]: card for card in await cards_of(host)}
    firsts = {name: addresses[0] for name, addresses in given.items() if addresses}
    return {name: everything[first] for name, first in firsts.items() if first in everything}
