"""Builds a lab whose hosts look like machines: each with its own root, processes and network.

Everything ends with the processes that hold it: mounts, namespaces, networks and what runs in them.
"""

import asyncio
import os
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import vmckpt
from vmckpt.errors import OperationFailedError, RefusedError
from vmckpt.hosts.processes.process import ProcessId, identify, is_alive
from vmckpt.lab import network
from vmckpt.lab.namespaces import Namespaces, last_line
from vmckpt.lab.processes import known, python, tool
from vmckpt.lab.real.first import READY
from vmckpt.lab.real.keys import make_keys
from vmckpt.lab.real.machine import STATE_DIR, LabMachine, write_plan
from vmckpt.lab.real.management import address, connect, lay_cable
from vmckpt.lab.state import LabHost, heartbeats_socket

# The path of QEMU on a bare host once Debian's is installed.
BARE_QEMU = Path("/usr/bin/qemu-system-x86_64")
_START_TIMEOUT_S = 60.0
_UNSHARE = ("--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup", "--propagation", "private")
# The path of a host's QEMU, for libvirt too; images/qemu.py puts these three side by side.
_QEMU_PROGRAMS = ("qemu-system-x86_64", "qemu-img", "qemu-nbd")


@dataclass(frozen=True, slots=True)
class MachineKit:
    """The parts of such hosts: `packages` of images/hosts.py; `bare`: see `LabMachine.bare`."""

    packages: Path
    bare: bool = False


def usual_packages() -> Path:
    """The directory where images/hosts.py puts the packages."""
    return _cache() / "hosts/11.3"


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vmckpt"


def check_kit(kit: MachineKit) -> None:
    """Raises RefusedError if it is clear beforehand that such hosts cannot be created."""
    if os.geteuid() != 0:
        raise RefusedError(
            "hosts that look like machines cannot be created",
            why="creating their mounts and namespaces requires root",
            remedy="run it as root, or make a lab without --real",
        )
    if not (kit.packages / "usr/sbin/sshd").is_file():
        raise RefusedError(
            "hosts that look like machines cannot be created",
            why=f"{kit.packages} does not hold the packages that they need",
            remedy="run 'python3 images/hosts.py 11.3' in vmckpt's source directory; it prints the "
            "directory for --packages",
        )


@dataclass(frozen=True, slots=True)
class Begun:
    """Hosts that have their namespaces, and wait for their network."""

    hosts: tuple[LabHost, ...]
    management: int


async def begin(
    namespaces: Namespaces,
    switch: int,
    names: Sequence[str],
    qemus: Sequence[Path],
    kit: MachineKit,
) -> Begun:
    """Start the hosts' first processes. Raises RefusedError, OperationFailedError."""
    directory = namespaces.directory
    if namespaces.rootless:
        raise RefusedError(
            "hosts that look like machines cannot be created",
            why="root may not create namespaces here (in a container?)",
            remedy="run it as the root of the machine, or make a lab without --real",
        )
    management = await lay_cable(directory, switch)
    machines = _plan(directory, management, names, qemus, kit)
    machines[0].shared.mkdir()
    for machine in machines:
        machine.folder.mkdir(mode=0o700)
    await make_keys(directory, machines)
    pids = [_start(namespaces, machine) for machine in machines]
    holders = [
        await _first_process(namespaces, m, pid) for m, pid in zip(machines, pids, strict=True)
    ]
    hosts = [
        LabHost(
            name=machine.name,
            holder=holder,
            enter=namespaces.enter(holder.pid),
            state_dir=STATE_DIR,
            migration_address=machine.migration_address,
            qemu=qemu,
            second_address=machine.address,
            ssh_address=machine.address,
        )
        for machine, holder, qemu in zip(machines, holders, qemus, strict=True)
    ]
    return Begun(tuple(hosts), management)


async def finish(namespaces: Namespaces, switch_enter: tuple[str, ...], begun: Begun) -> None:
    """Connect the operator, and wait until every host is ready. Raises OperationFailedError."""
    try:
        await connect(namespaces.directory, begun.management, switch_enter, begun.hosts)
    except OperationFailedError:
        for host in begun.hosts:
            if not is_alive(host.holder):
                raise _not_made(namespaces, host.name) from None
        raise
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    for host in begun.hosts:
        while last_line(namespaces.log(host.name)) != READY:
            if not is_alive(host.holder) or time.monotonic() > deadline_s:
                raise _not_made(namespaces, host.name)
            await asyncio.sleep(0.01)


def require_alive(namespaces: Namespaces, begun: Begun) -> None:
    """Raises OperationFailedError if a host's first process has ended, with its last output."""
    for host in begun.hosts:
        if not is_alive(host.holder):
            raise _not_made(namespaces, host.name)


def _plan(
    directory: Path, management: int, names: Sequence[str], qemus: Sequence[Path], kit: MachineKit
) -> list[LabMachine]:
    addresses = {name: network.migration_address(i) for i, name in enumerate(names, 1)}
    return [
        LabMachine(
            name=name,
            folder=directory / name,
            packages=kit.packages.resolve(),
            uuid=str(uuid.uuid4()),
            address=address(management, number),
            migration_address=addresses[name],
            shared=directory / "shared",
            seen=(*_seen(qemu), heartbeats_socket(directory).parent),
            programs=_programs(qemu),
            names=addresses,
            bare=kit.bare,
        )
        for number, (name, qemu) in enumerate(zip(names, qemus, strict=True), start=1)
    ]


def _seen(qemu: Path) -> tuple[Path, ...]:
    """Folders of this machine without which vmckpt or QEMU would not run on a host.

    Everything else in this machine's homes and /tmp is hidden from the hosts, as are other file
    systems.
    """
    of_qemu = qemu.parent.parent if qemu.parent.name == "bin" else qemu.parent
    here = Path(vmckpt.__file__).parents[1]
    ours = (Path(sys.prefix), Path(sys.base_prefix), here, of_qemu, _cache())
    wanted = {path.resolve() for path in ours}
    kept = [path for path in wanted if not Path("/usr").is_relative_to(path) and path.is_dir()]
    return tuple(
        path for path in sorted(kept) if not any(path.is_relative_to(o) for o in kept if o != path)
    )


def _programs(qemu: Path) -> dict[str, str]:
    links = {Path("/usr/bin", name): qemu.with_name(name) for name in _QEMU_PROGRAMS}
    links[Path("/usr/bin/qemu-system-x86_64")] = qemu
    links[Path("/usr/local/bin/vmckpt")] = Path(sys.prefix, "bin/vmckpt")
    return {str(at): str(to) for at, to in links.items() if at != to and to.is_file()}


def _start(namespaces: Namespaces, machine: LabMachine) -> int:
    write_plan(machine)
    unshare = [tool("unshare"), *_UNSHARE, "--fork", "--kill-child"]
    return namespaces.start(
        [*unshare, *python("vmckpt.lab.real.first", str(machine.plan))], machine.name
    )


async def _first_process(namespaces: Namespaces, machine: LabMachine, unshare: int) -> ProcessId:
    """The host's first process, the one child of `unshare`: its namespaces are there."""
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    children = Path(f"/proc/{unshare}/task/{unshare}/children")
    while identify(unshare) is not None and time.monotonic() < deadline_s:
        with suppress(OSError):
            if pids := children.read_text().split():
                return known(int(pids[0]))
        await asyncio.sleep(0.001)
    raise _not_made(namespaces, machine.name)


def _not_made(namespaces: Namespaces, name: str) -> OperationFailedError:
    return OperationFailedError(
        f"host {name} could not be made",
        why=last_line(namespaces.log(name)) or "no answer",
        remedy="fix the cause, and try again",
    )
