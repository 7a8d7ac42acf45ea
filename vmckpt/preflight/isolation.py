"""Isolated guests: what a VM may not have besides cut-off networks."""

from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from vmckpt.hosts.host import Host
from vmckpt.preflight.finding import OK, REFUSE, Finding
from vmckpt.vm.adopted.copies.isolation import networks
from vmckpt.vm.adopted.settings import parse_settings
from vmckpt.vm.passthrough.cards import cards_of
from vmckpt.vm.spec.spec import Spec

# Devices that reach the host's kernel or devices, or a program beside QEMU.
_OUTWARD = ("vhost-", "ivshmem-", "vfio-", "usb-host", "pvrdma")
# The base class of a PCI function that is a network controller (/sys/.../class).
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_NETWORK_CLASS = "0x02"


async def isolation_checks(spec: Spec, host: Host) -> AsyncIterator[Finding]:
    """What connects the VM to the outside, even with its NICs cut off. Raises HostDownError."""
    leads_out, remedy = False, "accept that it is not isolated: --network plugged"
    for driver in drivers_of(spec):
        if driver.startswith(_OUTWARD):
            reason = f"its device {driver} is a connection to the host"
            leads_out = True
            yield Finding("isolated", REFUSE, reason, remedy)
    wanted = {device.match: device.id for device in spec.passthrough if device.match}
    for card in await cards_of(host) if wanted else ():
        if card.name in wanted and await _is_network(host, card.addresses):
            reason = f"'{wanted[card.name]}' is a network card of {host.name}"
            leads_out = True
            yield Finding("isolated", REFUSE, reason, remedy)
    if not spec.nics and (unlisted := networks(spec.adopted.arguments if spec.adopted else ())):
        reason = f"its spec does not list the network of '{unlisted[0]}' in [[nics]]"
        leads_out = True
        yield Finding("isolated", REFUSE, reason, "list it there: vmckpt vm edit")
    if not leads_out:
        yield Finding("isolated", OK, "none of its devices leads to a network")


def drivers_of(spec: Spec) -> Iterator[str]:
    """The types of its devices that its owner chose; of an adopted machine, of all."""
    yield from (str(device["driver"]) for device in spec.devices)
    yield from (device.driver for device in spec.passthrough if not device.match)
    for option, value in pairwise(spec.adopted.arguments if spec.adopted else ()):
        if option.lstrip("-") == "device":
            yield parse_settings(value, "driver").get("driver") or ""


async def _is_network(host: Host, addresses: Sequence[str]) -> bool:
    paths = [_PCI_DEVICES / address / "class" for address in addresses]
    classes = [await host.read_text(path) or "" for path in paths]
    return any(one.startswith(_NETWORK_CLASS) for one in classes)
