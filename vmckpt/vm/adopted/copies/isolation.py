"""Isolate an adopted VM: the same devices, with networks cut off on its command line."""

import json
from collections.abc import Sequence
from typing import Any

from vmckpt.vm.adopted.settings import KeyValues, parse_settings

# The parts of a network option that describe the guest's device. A tap stays, but on no bridge.
_OF_THE_DEVICE = ("id", "name", "model", "mac", "macaddr", "addr", "vectors")
_NETWORKS = frozenset({"-netdev", "-nic", "-net"})
_UNCONNECTED = frozenset({"none", "nic", "hubport"})
_STAYS = frozenset({"tap", "none", "nic"})


def unconnected(name: str) -> dict[str, Any]:
    """A user-mode network without a NIC: it receives the saved state of the guest's own.

    That state is a section of a saved machine, and a QEMU without such a network refuses to load
    it.
    """
    return {"type": "user", "id": name, "restrict": True}


def networks(arguments: Sequence[str]) -> list[str]:
    """The options that connect the guest to a network."""
    from vmckpt.vm.adopted.arguments import values

    found = values(arguments, "netdev", "nic", "net")
    return [
        f"-{name} {arguments[at]}"
        for at, name, value in found
        if (value.get("type") or "user") not in _UNCONNECTED
    ]


def isolated(arguments: Sequence[str]) -> list[str]:
    """The arguments with each network back end, except taps, replaced by a hub port. Pure.

    The hub has no other port.
    """
    given, hub = list(arguments), 0
    found: list[str] = []
    while given:
        option = given.pop(0)
        name = "-" + option.lstrip("-")
        if name not in _NETWORKS or not given:
            found.append(option)
            continue
        settings = parse_settings(given.pop(0), "type")
        kind = settings.get("type") or "user"
        if kind in _STAYS:
            found += [option, str(settings)]
            continue
        hub += 1
        if kind == "user":
            found += ["-netdev", json.dumps(unconnected(f"vmckpt-off{hub}"))]
        if name != "-net":  # its NIC is in a hub with nothing else in it
            kept = [(key, text) for key in _OF_THE_DEVICE if (text := settings.get(key))]
            pairs = (("type", "hubport"), ("hubid", str(hub)), *kept)
            found += [option, str(KeyValues(pairs))]
    return found
