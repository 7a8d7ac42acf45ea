"""The lab's two networks: what each namespace contains, and how a link is cut or limited.

    switch namespace:  bridge `lan` 10.77.0.254/24 (the outside client)    bridge `mig`
                          | lan-a, lan-b, ...                                 | mig-a, mig-b, ...
    host namespace:    uplink - bridge `br0` - the guests' taps            mig0 10.77.1.N/24
                       10.77.2.N/24

Each namespace also has an unused bridge named with the lab's tag: by it `down` knows the namespace.
MAC addresses are fixed, so that a bridge does not change its own when ports come and go.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from vmckpt.lab.processes import run, tool
from vmckpt.lab.state import Lab, LabHost

CLIENT_ADDRESS = "10.77.0.254"
GUEST_BRIDGE = "br0"
BITS = 24
# No spanning tree, no learning delay, no snooping: a frame passes from the first moment.
BRIDGE = "type bridge stp_state 0 forward_delay 0 mcast_snooping 0"
_IPV6_SWITCHES = [f"/proc/sys/net/ipv6/conf/{which}/disable_ipv6" for which in ("default", "all")]
# A qdisc sends up to this much at once; below some tens of KiB a fast rate cannot be kept with
# 64 KiB segments and a 250 Hz timer.
_BURST_MIN_BYTES = 128 << 10
_BURST_S = 0.01
_QUEUE_S = 0.1


def migration_address(number: int) -> str:
    """The address of the host with this number (from 1) on the migration network."""
    return f"10.77.1.{number}"


def second_address(number: int) -> str:
    """Its address on the guests' network, which has separate cables."""
    return f"10.77.2.{number}"


def mac(kind: int, number: int) -> str:
    """The address of host `number`'s interface of one kind: 0 to 6 are created here."""
    return f"02:76:6b:00:{kind:02x}:{number:02x}"


async def make_switch(
    directory: Path, enter: tuple[str, ...], tag: str, hosts: Sequence[LabHost]
) -> None:
    """Bring up the switch namespace and lay two cables from it to each host's.

    Raises OperationFailedError.
    """
    lines = [
        "link set lo up",
        f"link add name {tag} {BRIDGE}",
        f"link add name lan address {mac(0, 0)} {BRIDGE}",
        f"link add name mig address {mac(1, 0)} {BRIDGE}",
        f"address add {CLIENT_ADDRESS}/{BITS} dev lan",
        "link set lan up",
        "link set mig up",
    ]
    for number, host in enumerate(hosts, start=1):
        for kind, network, peer in ((2, "lan", "uplink"), (4, "mig", "mig0")):
            port = f"{network}-{host.letter}"
            lines += [
                f"link add name {port} address {mac(kind, number)} type veth"
                f" peer name {peer} address {mac(kind + 1, number)} netns {host.holder.pid}",
                f"link set {port} master {network} up",
            ]
    await apply(directory, enter, lines)


async def make_host(directory: Path, host: LabHost, tag: str, number: int) -> None:
    """Bring up a host's namespace, into which the switch has laid its cables.

    Raises OperationFailedError.
    """
    lines = [
        "link set lo up",
        f"link add name {tag} {BRIDGE}",
        f"link add name {GUEST_BRIDGE} address {mac(6, number)} {BRIDGE}",
        f"link set uplink master {GUEST_BRIDGE} up",
        f"link set {GUEST_BRIDGE} up",
        f"address add {host.migration_address}/{BITS} dev mig0",
        "link set mig0 up",
    ]
    if host.ssh_address is None:  # otherwise it is on the operator's network
        lines.append(f"address add {host.second_address}/{BITS} dev {GUEST_BRIDGE}")
    await apply(directory, host.enter, lines)


async def apply(directory: Path, enter: tuple[str, ...], lines: list[str]) -> None:
    """Pass lines to ip(8) in the namespace behind `enter`. Raises OperationFailedError."""
    if os.access(_IPV6_SWITCHES[0], os.F_OK):
        # Before the first interface: only IPv4 and what the guests send is on the wire.
        await run([*enter, tool("tee"), *_IPV6_SWITCHES], directory, stdin="1")
    await run([*enter, tool("ip"), "-batch", "-"], directory, stdin="\n".join(lines) + "\n")


async def try_tap(directory: Path, enter: tuple[str, ...]) -> None:
    """Create and remove a tap, as a guest's network card will. Raises OperationFailedError."""
    lines = ["tuntap add dev try mode tap", "tuntap del dev try mode tap"]
    await run([*enter, tool("ip"), "-batch", "-"], directory, stdin="\n".join(lines) + "\n")


async def set_link(lab: Lab, host: str, *, up: bool, network: str = "mig") -> None:
    """Plug in or unplug a host's cable of the migration network, or the guests' (`lan`).

    An unplugged cable drops packets without an error on either side. Raises NotFoundError,
    OperationFailedError.
    """
    port = f"{network}-{lab.host(host).letter}"
    state = "up" if up else "down"
    await run([*lab.client_enter, tool("ip"), "link", "set", port, state], lab.directory)


async def shape_link(lab: Lab, host: str, rate_bytes_per_s: int | None) -> None:
    """Limit a host's link of the migration network in each direction, or (None) remove the limit.

    A token bucket (tc-tbf(8)) with a burst of 10 ms and a queue of 100 ms. Raises NotFoundError,
    OperationFailedError.
    """
    machine = lab.host(host)
    discipline = ["noqueue"]
    if rate_bytes_per_s is not None:
        burst_bytes = max(_BURST_MIN_BYTES, int(rate_bytes_per_s * _BURST_S))
        # In tc "bps" is bytes per second.
        discipline = ["tbf", "rate", f"{rate_bytes_per_s}bps", "burst", str(burst_bytes)]
        discipline += ["latency", f"{_QUEUE_S * 1000:.0f}ms"]
    for enter, device in ((lab.client_enter, _port(machine)), (machine.enter, "mig0")):
        command = [*enter, tool("tc"), "qdisc", "replace", "dev", device, "root", *discipline]
        await run(command, lab.directory)


def _port(host: LabHost) -> str:
    return f"mig-{host.letter}"
