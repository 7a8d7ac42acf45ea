"""A lab: several hosts on this machine, and an outside client on their guests' network.

`up` creates one network namespace per host and one for the switch and the client; `down` removes
everything, however `up` ended. Root creates the namespaces directly; other users get one user
namespace that owns them. Which of the two works is found by trying.
"""

import asyncio
import contextlib
import errno
import os
import shutil
import socket
import string
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vmckpt.errors import OperationFailedError, RefusedError, UsageError
from vmckpt.hosts.processes.process import identify
from vmckpt.lab import network
from vmckpt.lab.inventory import check_free, enter_hosts, remove_hosts
from vmckpt.lab.leftovers import remove_ram_files
from vmckpt.lab.lock import locked
from vmckpt.lab.namespaces import Namespaces, last_line
from vmckpt.lab.processes import end_all, find, known, python, reap, tag
from vmckpt.lab.real import build as real
from vmckpt.lab.real.build import BARE_QEMU, MachineKit, check_kit
from vmckpt.lab.real.management import remove_cable
from vmckpt.lab.state import (
    HOST_PREFIX,
    Lab,
    LabHost,
    check_path_lengths,
    heartbeats_socket,
    lab_directory,
    read,
    write_record,
)

MAX_HOSTS = 16
HEARTBEAT_PORT = 7700
_START_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class LabRemoval:
    """What `down` found and removed."""

    hosts: int
    processes: int
    ram_files: int


async def up(
    state_dir: Path, *, hosts: int, qemus: Sequence[Path], kit: MachineKit | None = None
) -> Lab:
    """Create a lab of `hosts` hosts, named lab-a, lab-b, ...; when this returns, everything works.

    The i-th host gets qemus[i], or the last one. With a `kit` hosts look like machines; bare ones
    need no QEMU. On failure and on cancellation everything created is removed again (which blocks
    for a moment). Raises UsageError, BusyError if `up` or `down` runs, RefusedError if there is a
    lab, including an incomplete one left by a crash, or if this machine or user cannot have one,
    OperationFailedError.
    """
    directory = lab_directory(state_dir)
    _check_request(hosts, qemus, kit)
    if kit:
        check_kit(kit)
    check_path_lengths(directory)
    names = [f"{HOST_PREFIX}{letter}" for letter in string.ascii_lowercase[:hosts]]
    async with locked(directory):
        _refuse_a_second(state_dir)
        check_free(directory, names)
        namespaces = Namespaces(directory)
        try:
            directory.mkdir(mode=0o700)
            heartbeats_socket(directory).parent.mkdir(mode=0o700)
            given = [path.absolute() for path in qemus] or [BARE_QEMU]
            paths = [given[min(i, len(given) - 1)] for i in range(hosts)]
            lab = await _build(namespaces, names, paths, kit)
            write_record(lab)
            enter_hosts(lab)
        except BaseException:
            _remove(directory, namespaces.pids)
            raise
        return lab


async def down(state_dir: Path) -> LabRemoval:
    """Remove the lab, even an incomplete one, without leftovers.

    QEMUs and all other processes in the lab's namespaces are ended. Does nothing if there is no
    lab. Cancellation does not interrupt it; it blocks the loop while the processes end. Raises
    BusyError if `up` or `down` runs, OperationFailedError.
    """
    directory = lab_directory(state_dir)
    async with locked(directory):
        pids: list[int] = []
        with contextlib.suppress(RefusedError):  # incomplete: another process made it
            if lab := read(state_dir):
                pids = [lab.client.pid, lab.observer.pid, *(host.holder.pid for host in lab.hosts)]
        return _remove(directory, pids)


def _check_request(hosts: int, qemus: Sequence[Path], kit: MachineKit | None) -> None:
    if not 1 <= hosts <= MAX_HOSTS:
        raise UsageError(
            f"a lab cannot have {hosts} hosts",
            why=f"a lab has 1 to {MAX_HOSTS}",
            remedy="give another number of hosts",
        )
    if not qemus and not (kit and kit.bare):
        raise UsageError("no QEMU was named", why="a host needs one", remedy="name its path")
    for path in qemus:
        if not os.access(path, os.X_OK) or path.is_dir():
            raise UsageError(
                f"'{path}' is not a QEMU",
                why="there is no such program, or this user may not run it",
                remedy="name the path of a qemu-system program",
            )


def _refuse_a_second(state_dir: Path) -> None:
    if read(state_dir) is not None:
        raise RefusedError(
            "there is a lab already",
            why="a state directory has one at most",
            remedy="see 'vmckpt lab status'; 'vmckpt lab down' removes it",
        )
    directory = lab_directory(state_dir)
    if find(directory):
        raise RefusedError(
            "the lab is incomplete",
            why=f"its directory {directory} is gone, but some of its processes run",
            remedy="run 'vmckpt lab down'",
        )


async def _build(
    namespaces: Namespaces, names: Sequence[str], qemus: Sequence[Path], kit: MachineKit | None
) -> Lab:
    directory = namespaces.directory
    switch = await namespaces.make_switch()
    switch_enter = namespaces.enter(switch)
    await _check_taps(directory, switch_enter)
    mark = tag(directory)
    begun = await real.begin(namespaces, switch, names, qemus, kit) if kit else None
    hosts = begun.hosts if begun else await _make_hosts(namespaces, switch, names, qemus)
    try:
        await network.make_switch(directory, switch_enter, mark, hosts)
        observer = _start_observer(namespaces, switch_enter)
        for number, host in enumerate(hosts, start=1):
            await network.make_host(directory, host, mark, number)
    except OperationFailedError:
        if begun:
            # A host that has ended took its cables with it: the reason why it ended is more useful.
            real.require_alive(namespaces, begun)
        raise
    if begun:
        await real.finish(namespaces, switch_enter, begun)
    await _await_observer(namespaces, observer)
    return Lab(
        directory=directory,
        rootless=namespaces.rootless,
        client=known(switch),
        client_enter=switch_enter,
        observer=known(observer),
        heartbeats=heartbeats_socket(directory),
        hosts=hosts,
        bare=kit is not None and kit.bare,
    )


async def _make_hosts(
    namespaces: Namespaces, switch: int, names: Sequence[str], qemus: Sequence[Path]
) -> tuple[LabHost, ...]:
    directory = namespaces.directory
    holders = await namespaces.make_hosts(switch, names)
    for name in names:
        (directory / name).mkdir(mode=0o700)
    return tuple(
        LabHost(
            name=name,
            holder=known(holder),
            enter=namespaces.enter(holder),
            state_dir=directory / name,
            migration_address=network.migration_address(number),
            qemu=qemu,
            second_address=network.second_address(number),
        )
        for number, (name, holder, qemu) in enumerate(zip(names, holders, qemus, strict=True), 1)
    )


async def _check_taps(directory: Path, enter: tuple[str, ...]) -> None:
    try:
        await network.try_tap(directory, enter)
    except OperationFailedError as exc:
        raise RefusedError(
            "the lab's guests cannot have a network here",
            why=f"no tap device can be made through /dev/net/tun: {exc.why.splitlines()[0]}",
            remedy="as root: 'modprobe tun' if /dev/net/tun is missing, 'chmod 0666 /dev/net/tun'"
            " (as udev has it); or run the lab as root",
        ) from exc


def _start_observer(namespaces: Namespaces, enter: tuple[str, ...]) -> int:
    path = heartbeats_socket(namespaces.directory)
    address = f"{network.CLIENT_ADDRESS}:{HEARTBEAT_PORT}"
    argv = python("vmckpt.lab.heartbeats", "--bind", address, "--socket", str(path))
    return namespaces.start([*enter, *argv], "observer")


async def _await_observer(namespaces: Namespaces, pid: int) -> None:
    path = heartbeats_socket(namespaces.directory)
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while identify(pid) is not None and time.monotonic() < deadline_s:
        with socket.socket(socket.AF_UNIX) as client:
            error = client.connect_ex(str(path))
        if error == 0:
            return
        if error not in (errno.ENOENT, errno.ECONNREFUSED):
            break
        await asyncio.sleep(0.005)
    raise OperationFailedError(
        "the lab's heartbeat observer did not start",
        why=last_line(namespaces.log("observer")) or "no answer",
        remedy="fix the cause, and try again",
    )


def _remove(directory: Path, children: Sequence[int]) -> LabRemoval:
    """Remove what exists of a lab; the record of its existence comes last.

    `children`: processes of the lab that may be this process's, to be reaped.
    """
    names = remove_hosts(directory)
    names |= {path.name for path in directory.glob(f"{HOST_PREFIX}*") if path.is_dir()}
    ended = end_all(directory)
    reap(children)
    remove_cable(directory)
    ram_files = remove_ram_files(directory)
    if directory.exists():
        try:
            shutil.rmtree(directory)
        except OSError as exc:
            raise OperationFailedError(
                "the lab's directory could not be removed",
                why=str(exc),
                remedy="fix the cause, then run 'vmckpt lab down'",
            ) from exc
    return LabRemoval(hosts=len(names), processes=len(ended), ram_files=ram_files)
