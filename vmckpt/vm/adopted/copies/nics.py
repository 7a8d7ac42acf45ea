"""The NICs in an adopted machine's arguments, and their MAC addresses. Pure."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from vmckpt.vm.adopted.arguments import values
from vmckpt.vm.adopted.settings import JsonObject, Settings

# QEMU's models of network cards for x86_64, 7.2 to 11.1.
_MODELS = re.compile(
    r"virtio-net(-.+)?|e1000.*|igb|i82.+|ne2k_.+|pcnet|rtl8139|tulip|usb-net|vmxnet3"
)
# Where QEMU's own choice begins (net.c, qemu_macaddr_default_if_unset), and where it ends.
_BASE, _FIRST, _END = "52:54:00:12:34:", 0x56, 0xFF


class _Card(NamedTuple):
    """A NIC: where its option's value is, that value, and the key of its address there."""

    at: int
    option: str
    value: Settings
    key: str

    @property
    def made(self) -> int:
        """When QEMU makes it (vl.c): -nic, -net, then -device, those in JSON last."""
        if self.option == "device":
            return 3 if isinstance(self.value, JsonObject) else 2
        return ("nic", "net").index(self.option)


def macs(arguments: Sequence[str]) -> list[str]:
    """The address of each NIC, in the arguments' order: the given one, or QEMU's own choice."""
    found, used = dict[int, str](), set[str]()
    for card in sorted(_cards(arguments), key=lambda card: (card.made, card.at)):
        mac = (card.value.get(card.key) or _chosen(used)).lower()
        used.add(mac)
        found[card.at] = mac
    return [found[at] for at in sorted(found)]


def with_macs(arguments: Sequence[str], new: Sequence[str]) -> list[str]:
    """The arguments with these addresses, one for each of `macs`."""
    given = list(arguments)
    for card, mac in zip(_cards(arguments), new, strict=True):
        given[card.at] = str(card.value.put(card.key, mac))
    return given


def _cards(arguments: Sequence[str]) -> list[_Card]:
    found = []
    for at, option, value in values(arguments, "device", "nic", "net"):
        kind = value.get("type")
        if option == "device":
            is_card = _MODELS.fullmatch(value.get("driver") or "") is not None
        else:
            is_card = kind == "nic" if option == "net" else kind != "none"
        if is_card:
            found.append(_Card(at, option, value, "macaddr" if option == "net" else "mac"))
    return found


def _chosen(used: set[str]) -> str:
    choices = (f"{_BASE}{last:02x}" for last in range(_FIRST, _END))
    return next((mac for mac in choices if mac not in used), f"{_BASE}ff")
