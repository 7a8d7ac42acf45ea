"""Guest-visible downtime of any guest: a probe on its source's bridge that asks it by ARP."""

from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypedDict

from vmckpt.codec import convert
from vmckpt.deadlines import poll
from vmckpt.errors import OperationFailedError, VmckptError
from vmckpt.foreign import parse
from vmckpt.hosts.host import Host
from vmckpt.hosts.processes.process import ProcessId
from vmckpt.vm.argv import bridged_macs
from vmckpt.vm.inventory import Vm
from vmckpt.vm.paths import lock_path

if TYPE_CHECKING:
    from vmckpt.hosts.sockets.heartbeats import Silence

_POLL_S = 0.05
# How long a migration waits until the guest has answered its probe, before it begins.
_ANSWERED_S = 1.0
# How the names of probes' output files begin; the rest names the run.
_OUTPUTS = "echo-"


class BridgedNic(NamedTuple):
    """A guest's NIC (MAC in lower case), and the bridge that its host has it on."""

    bridge: str
    mac: str


class _Neighbour(TypedDict, total=False):
    """A line of `ip -j neigh`."""

    dst: str
    lladdr: str
    state: tuple[str, ...]


class _ProbeOutput(TypedDict, total=False):
    """A line of what the probe printed: that it was answered, then figures, or why it has none."""

    answered: bool
    received: int
    lost: int
    longest_gap_ms: float
    silent_ms: float
    too_short_ms: float
    why: str


class Echo(NamedTuple):
    """A probe that runs on a host. It ends by itself soon after its run gives up the VM's lock."""

    host: Host
    process: ProcessId
    out: Path

    async def answered(self) -> "Echo":
        """Wait until the guest has answered: what it does from then on is seen.

        Raises HostDownError, MalformedError, OperationFailedError: it does not answer.
        """
        if not await self._line(0, within_s=_ANSWERED_S):
            raise self._saw_nothing(f"it answered no ARP request within {_ANSWERED_S} s")
        return self

    async def end(self) -> "Silence | None":
        """End it; the guest's silence since it began, None if the probe has ended by itself.

        Raises HostDownError, MalformedError, OperationFailedError: it saw nothing of the guest.
        """
        from vmckpt.hosts.sockets.arp import LAST_S
        from vmckpt.hosts.sockets.heartbeats import Silence

        await self.host.interrupt(self.process)
        try:
            reply = await self._line(1, within_s=LAST_S + 2.0)
        finally:
            await self.host.remove(self.out)
        if reply is None:
            return None
        return Silence(
            reply.get("received", 0),
            reply.get("lost", 0),
            reply.get("longest_gap_ms", 0.0),
            reply.get("silent_ms", 0.0),
            last_ns=0,
            too_short_ms=reply.get("too_short_ms", 0.0),
        )

    async def _line(self, number: int, *, within_s: float) -> _ProbeOutput | None:
        """A line of the output, from 0; None: it has not come, or the probe has ended by itself."""

        async def query() -> list[str] | None:
            text = await self.host.read_text(self.out)
            return text if text is None else text.split("\n")[:-1]

        def is_there(lines: list[str] | None) -> bool:
            return lines is None or len(lines) > number or any('"why"' in line for line in lines)

        lines = await poll(query, is_there, every_s=_POLL_S, within_s=within_s)
        if not lines:
            return None
        reply = convert(_ProbeOutput, parse(lines[-1]))
        if why := reply.get("why"):
            raise self._saw_nothing(why)
        return reply if len(lines) > number else None

    def _saw_nothing(self, why: str) -> OperationFailedError:
        return OperationFailedError(
            f"nothing was seen of it from {self.host.name}", why=why, remedy="none"
        )


async def begin(
    host: Host, vm: str, run: str, nics: Sequence[BridgedNic], agent: Path | None
) -> Echo | None:
    """Start probing a VM of `host`, whose lock `run` holds. None: no address of it is known.

    Addresses come from the host's neighbour table, or from the guest agent at `agent`. Raises
    HostDownError.
    """
    await _remove_leftovers(host)
    for nic in nics:
        address = await _neighbour(host, nic)
        if address is None and agent is not None:
            address = await _by_agent(host, agent, nic.mac)
        if address is None:
            continue
        out = host.state_dir / f"{_OUTPUTS}{run}.json"
        lock = lock_path(host.state_dir, vm)
        words = ["echo", nic.bridge, nic.mac, str(address), str(lock), run, str(out)]
        return Echo(host, await host.spawn([*await host.own_command(), *words], out), out)
    return None


async def begin_for(vm: Vm, run: str) -> Echo | None:
    """The same for a VM of vmckpt's own."""
    bridge = vm.host.bridge
    nics = [BridgedNic(bridge, mac) for mac in bridged_macs(vm.spec) if bridge]
    agent = vm.qemu.files.agent if vm.spec.guest_agent else None
    return await begin(vm.host, vm.name, run, nics, agent)


async def _remove_leftovers(host: Host) -> None:
    """Remove the outputs of probes that were killed, as on a host that went down."""
    for name in await host.list_dir(host.state_dir):
        if name.startswith(_OUTPUTS) and not await host.find_processes(name):
            await host.remove(host.state_dir / name)


async def _neighbour(host: Host, nic: BridgedNic) -> IPv4Address | None:
    done = await host.run(["ip", "-j", "neigh", "show", "dev", nic.bridge])
    if done.returncode:
        return None
    return _address(convert(tuple[_Neighbour, ...], parse(done.stdout)), nic.mac)


def _address(neighbours: Iterable[_Neighbour], mac: str) -> IPv4Address | None:
    """The IPv4 address that a host knows a MAC by. Pure."""
    for one in neighbours:
        dst = one.get("dst", "")
        is_known = "." in dst and "FAILED" not in one.get("state", ())
        if is_known and one.get("lladdr", "").lower() == mac:
            return IPv4Address(dst)
    return None


async def _by_agent(host: Host, path: Path, mac: str) -> IPv4Address | None:
    from vmckpt.qemu.agent import GuestAgent

    try:
        agent = await GuestAgent.connect(await host.connect(path), timeout_s=1.0)
        try:
            found = await agent.interfaces(timeout_s=1.0)
        finally:
            await agent.close()
    except VmckptError:  # a guest without an agent, or a slow one
        return None
    mine = (one for one in found if one.mac == mac)
    every = (address for one in mine for address in one.addresses)
    return next((one for one in every if isinstance(one, IPv4Address)), None)
