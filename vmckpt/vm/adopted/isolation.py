"""An adopted VM's command line with its networks cut off: the same devices, no way out."""

from collections.abc import Sequence

from vmckpt.vm.adopted.settings import KeyValues, parse_settings

# What of a network is the guest's device, not the host's end. A tap stays: it is on no bridge.
_OF_THE_DEVICE = ("id", "name", "model", "mac", "macaddr", "addr", "vectors")
_NETWORKS = frozenset({"-netdev", "-nic", "-net"})
_STAYS = frozenset({"tap", "none", "nic"})


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
        elif name != "-net":  # its NIC is in a hub, in which there is nothing else then
            kept = [(key, text) for key in _OF_THE_DEVICE if (text := settings.get(key))]
            hub += 1
            pairs = (("type", "hubport"), ("hubid", str(hub)), *kept)
            found += [option, str(KeyValues(pairs))]
    return found
