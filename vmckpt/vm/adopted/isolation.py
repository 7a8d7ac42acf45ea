"""An adopted VM's command line with its networks cut off: the same devices, no way out."""

import json
from collections.abc import Sequence
from typing import Any

from vmckpt.vm.adopted.settings import KeyValues, parse_settings

# What of a network is the guest's device, not the host's end. A tap stays: it is on no bridge.
_OF_THE_DEVICE = ("id", "name", "model", "mac", "macaddr", "addr", "vectors")
_NETWORKS = frozenset({"-netdev", "-nic", "-net"})
_STAYS = frozenset({"tap", "none", "nic"})


def unconnected(name: str) -> dict[str, Any]:
    """A user-mode network without a NIC: it takes the state that QEMU saved of the guest's own.

    It is one of the sections of a saved machine, and a machine that has none refuses to be loaded.
    """
    return {"type": "user", "id": name, "restrict": True}


def isolated(arguments: Sequence[str]) -> list[str]:
    """The arguments, each network back end but taps a port of a hub with no other port. Pure."""
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
        if name != "-net":  # its NIC is in a hub, in which there is nothing else then
            kept = [(key, text) for key in _OF_THE_DEVICE if (text := settings.get(key))]
            pairs = (("type", "hubport"), ("hubid", str(hub)), *kept)
            found += [option, str(KeyValues(pairs))]
    return found
