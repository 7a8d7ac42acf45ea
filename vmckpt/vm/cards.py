"""Which cards a host can give to guests: what its kernel shows of them, and who has one."""

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from vmckpt.errors import OperationFailedError
from vmckpt.hosts.host import Host
from vmckpt.vm.passthrough import VFIO, Passthrough
from vmckpt.vm.paths import QEMU_PREFIX, QemuDir, vm_dir, vms_dir

# Drivers that leave the rest of an IOMMU group usable.
HARMLESS = frozenset({VFIO, "pci-stub", "pcieport", ""})
VFIO_DEVICES = Path("/dev/vfio")
# One line per PCI function: address, vendor, device, driver, IOMMU group, whose virtual function.
_LIST = """\
for d in /sys/bus/pci/devices/*; do
    [ -e "$d/vendor" ] || continue
    driver=$(readlink "$d/driver"); group=$(readlink "$d/iommu_group")
    of=$(readlink "$d/physfn")
    echo "${d##*/} $(cat "$d/vendor") $(cat "$d/device") ${driver##*/}- ${group##*/}- ${of##*/}-"
done
"""
_OPEN = 'exec 3<>"$1"'


class Function(NamedTuple):
    """A PCI function of a host: `name` is VENDOR:DEVICE, `driver` and `group` may be empty.

    A virtual one (SR-IOV) is `part_of` another.
    """

    address: str
    name: str
    driver: str
    group: str
    part_of: str

    @property
    def card(self) -> str:
        """What all functions of a card share; a virtual one is a card by itself."""
        return self.address if self.part_of else self.address.rpartition(".")[0]


class Card(NamedTuple):
    """All functions of one card, by number; VENDOR:DEVICE of function 0 is its name."""

    functions: tuple[Function, ...]

    @property
    def name(self) -> str:
        """What it is."""
        return self.functions[0].name

    @property
    def addresses(self) -> tuple[str, ...]:
        """Its functions' addresses."""
        return tuple(function.address for function in self.functions)


def parse_functions(text: str) -> list[Function]:
    """What `_LIST` prints. Pure."""
    found = []
    for line in text.splitlines():
        address, vendor, device, driver, group, part_of = line.split()
        name = f"{vendor.removeprefix('0x')}:{device.removeprefix('0x')}"
        found.append(Function(address, name, driver[:-1], group[:-1], part_of[:-1]))
    return found


def cards(functions: Iterable[Function]) -> list[Card]:
    """Functions put together to cards. Pure."""
    found: dict[str, list[Function]] = defaultdict(list)
    for function in sorted(functions):
        found[function.card].append(function)
    return [Card(tuple(parts)) for parts in found.values()]


def unfit(card: Card, taken: Iterable[str], others: Iterable[Card] = ()) -> str | None:
    """Why the card cannot be given to a guest now; None: it can. `others` are the host's. Pure."""
    wrong = [one for one in card.functions if one.driver != VFIO]
    if wrong:
        what = ", ".join(f"{one.address} ({one.driver or 'no driver'})" for one in wrong)
        return f"{what} is not bound to {VFIO}"
    if has := sorted(set(card.addresses) & set(taken)):
        return f"{has[0]} is another VM's"
    groups = {one.group for one in card.functions}
    mates = [one for other in others if other != card for one in other.functions]
    for one in mates:
        if one.group in groups and one.driver not in HARMLESS:
            return f"{one.address} ({one.driver}) is in its IOMMU group and not bound to {VFIO}"
    return None


async def cards_of(host: Host) -> list[Card]:
    """The host's cards. Raises OperationFailedError."""
    done = await host.run(["sh", "-c", _LIST])
    try:
        return cards(parse_functions(done.stdout))
    except ValueError as exc:
        raise OperationFailedError(
            f"cannot list the PCI devices of {host.name}",
            why=f"{exc}; {done.stderr.strip()}",
            remedy="look at /sys/bus/pci/devices there",
        ) from exc


async def choose(host: Host, device: Passthrough, taken: Iterable[str]) -> tuple[Card | None, str]:
    """A card that is `device`'s equal and free; None and why there is none."""
    everything = await cards_of(host)
    equals = [card for card in everything if card.name == device.match]
    if not equals:
        return None, f"{host.name} has no device {device.match}"
    taken = set(taken)
    reasons = []
    for card in equals:
        reason = unfit(card, taken, everything) or await closed(host, card)
        if reason is None:
            return card, f"{card.addresses[0]} is free"
        reasons.append(reason)
    return None, f"no device {device.match} of {host.name} is free: {'; '.join(reasons)}"


async def closed(host: Host, card: Card) -> str | None:
    """What of a card that no VM of vmckpt's has cannot be opened, and why; None: nothing.

    A group can be open once at a time, so that whoever else has the card is found out, a domain of
    libvirt's as well.
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


async def taken_on(host: Host, besides: QemuDir | None = None) -> set[str]:
    """The addresses of functions that VMs of vmckpt's have on a host, `besides`' own left out."""
    found: set[str] = set()
    for vm in await host.list_dir(vms_dir(host.state_dir)):
        directory = vm_dir(host.state_dir, vm)
        for name in await host.list_dir(directory.path):
            files = directory.qemu(name.removeprefix(QEMU_PREFIX))
            if name.startswith(QEMU_PREFIX) and files != besides:
                given = await read_given(host, files)
                found |= {one for addresses in given.values() for one in addresses}
    return found


async def read_given(host: Host, files: QemuDir) -> dict[str, list[str]]:
    """Which functions of the host's each device of a QEMU has, or is about to get."""
    text = await host.read_text(files.given)
    try:
        return {name: list(found) for name, found in json.loads(text or "{}").items()}
    except (ValueError, AttributeError, TypeError):
        return {}  # cut off as it was written: what it named was not given yet
