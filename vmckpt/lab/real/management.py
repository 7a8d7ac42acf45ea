"""The network over which the operator, this machine, reaches the hosts that look like machines.

    this machine:      vklabN 10.78.N.254/24
                          | one cable
    switch namespace:  bridge `mgmt`
                          | mgmt-a, mgmt-b, ...
    host namespace:    mgmt0 10.78.N.1, 10.78.N.2, ...

N is a number that no other lab has: the first lab that creates the cable gets its name. The cable
ends with the switch's namespace, so a lab that is killed half-way leaves none; `remove_cable` need
not wait for that, as the lab's tag is written on it.
"""

import ipaddress
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from vmckpt.errors import OperationFailedError, RefusedError
from vmckpt.lab.network import BITS, BRIDGE, apply, mac
from vmckpt.lab.processes import run, tag, tool
from vmckpt.lab.state import Lab, LabHost

CABLE = "vklab"
_OPERATOR = 254
_PORT = "operator"
_INTERFACES = Path("/sys/class/net")


def address(network: int, number: int) -> str:
    """The address of the host with this number (from 1) in the management network `network`."""
    return f"10.78.{network}.{number}"


async def lay_cable(directory: Path, switch: int) -> int:
    """Lay a cable from this machine to the switch's namespace; return the network's number.

    `switch`: a process in that namespace. Raises RefusedError, OperationFailedError.
    """
    routes = Path("/proc/net/route").read_text()
    for number in free_networks(routes, range(256)):
        cable = f"{CABLE}{number}"
        lines = [
            f"link add name {cable} address {mac(10, 0)} type veth"
            f" peer name {_PORT} address {mac(11, 0)} netns {switch}",
            f"link set {cable} alias {tag(directory)}",
        ]
        try:
            await run([tool("ip"), "-batch", "-"], directory, stdin="\n".join(lines) + "\n")
        except OperationFailedError:
            if (_INTERFACES / cable).exists():  # another lab was faster
                continue
            raise
        return number
    raise RefusedError(
        "the lab's hosts cannot be reached from here",
        why="this machine has routes to all networks 10.78.0.0/24 to 10.78.255.0/24",
        remedy="remove labs with 'vmckpt lab down', or routes that are not needed",
    )


async def connect(
    directory: Path, network: int, switch_enter: tuple[str, ...], hosts: Sequence[LabHost]
) -> None:
    """Connect this machine and the hosts, which have their namespaces. Raises OperationFailedError.

    Their addresses are those of `address`.
    """
    lines = [f"link add name mgmt address {mac(7, 0)} {BRIDGE}", "link set mgmt up"]
    lines += [f"link set {_PORT} master mgmt up"]
    for number, host in enumerate(hosts, start=1):
        port = _port(host)
        lines += [
            f"link add name {port} address {mac(8, number)} type veth"
            f" peer name mgmt0 address {mac(9, number)} netns {host.holder.pid}",
            f"link set {port} master mgmt up",
        ]
    await apply(directory, switch_enter, lines)
    for number, host in enumerate(hosts, start=1):
        own = f"{address(network, number)}/{BITS}"
        lines = [f"address add {own} dev mgmt0", "link set mgmt0 up"]
        await apply(directory, host.enter, lines)
    here = f"{address(network, _OPERATOR)}/{BITS}"
    cable = f"{CABLE}{network}"
    lines = [f"address add {here} dev {cable}", f"link set {cable} up"]
    await run([tool("ip"), "-batch", "-"], directory, stdin="\n".join(lines) + "\n")


def remove_cable(directory: Path) -> None:
    """Remove the cable of the lab in `directory`, if there is one. Raises OperationFailedError."""
    for cable in _INTERFACES.glob(f"{CABLE}*"):
        with suppress(OSError):  # it disappeared by itself
            if (cable / "ifalias").read_text().strip() != tag(directory):
                continue
            remove = [tool("ip"), "link", "delete", cable.name]
            done = subprocess.run(remove, capture_output=True, text=True, check=False)
            if done.returncode and cable.exists():
                raise OperationFailedError(
                    f"the lab's cable {cable.name} could not be removed",
                    why=done.stderr.strip(),
                    remedy="fix the cause, then run 'vmckpt lab down'",
                )


async def set_operator_link(lab: Lab, *, up: bool, host: str | None = None) -> None:
    """Plug in or unplug the operator's cable, or the one of `host` to the operator's network.

    An unplugged cable drops packets without an error on either side. Raises NotFoundError,
    OperationFailedError.
    """
    port = _PORT if host is None else _port(lab.host(host))
    state = "up" if up else "down"
    await run([*lab.client_enter, tool("ip"), "link", "set", port, state], lab.directory)


def free_networks(routes: str, numbers: Iterable[int]) -> Iterator[int]:
    """The management networks to which this machine has no route, by /proc/net/route.

    The default route matches everything and does not count.
    """
    taken = []
    for line in routes.splitlines()[1:]:
        _, where, _, _, _, _, _, mask, *_ = line.split()
        network = [ipaddress.ip_address(bytes.fromhex(word)[::-1]) for word in (where, mask)]
        if int(mask, 16):
            taken.append(ipaddress.ip_network("/".join(map(str, network))))
    for number in numbers:
        ours = ipaddress.ip_network(f"{address(number, 0)}/{BITS}")
        if not any(ours.overlaps(other) for other in taken):
            yield number


def _port(host: LabHost) -> str:
    return f"mgmt-{host.letter}"
