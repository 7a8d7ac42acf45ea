"""Start and end a VM's QEMU on a host."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

from vmckpt.errors import (
    BusyError,
    HostDownError,
    OperationFailedError,
    RefusedError,
    StorageError,
    UsageError,
)
from vmckpt.hosts.grants import Grant, GrantKind
from vmckpt.hosts.host import FreeMemory, Host, Promise
from vmckpt.hosts.processes.process import ProcessId
from vmckpt.procfs import status_fields
from vmckpt.qemu.monitor import Monitor
from vmckpt.sequence.steps import all_of, finish
from vmckpt.state.documents import Schema, load_from, save_to
from vmckpt.units import format_size
from vmckpt.vm.argv import qemu_argv
from vmckpt.vm.ended import LOG_HEAD, last_lines
from vmckpt.vm.paths import IN_MEMORY, QEMU_PREFIX, QemuDir, VmDir
from vmckpt.vm.record import Platform, Qemu
from vmckpt.vm.spec.spec import Spec
from vmckpt.vm.users.reach import require_reachable
from vmckpt.vm.users.user_processes import all_of_user, end_all_of
from vmckpt.vm.users.users import VmUser, set_up, take_back

# QEMU starts slowly on a machine that is busy with other guests; there are two attempts.
START_TIMEOUT_S = 30.0
# A file system takes long for an overlay of hundreds of gigabytes.
REMOVE_S = 300.0
SOCKET_POLL_S = 0.002
SOCKET_PATH_BYTES = 107
_PROCESS = Schema(
    ProcessId,
    'write {{"pid": N, "start_ticks": N}} into it, both as in vm.json of the VM',
)


async def start_qemu(
    host: Host,
    spec: Spec,
    platform: Platform,
    files: QemuDir,
    *,
    incoming: bool,
    private_ram: bool = False,
    ram_is_read_only: bool = False,
) -> tuple[Qemu, Monitor]:
    """Start a QEMU with the VM's devices, waiting for `cont` or (`incoming`) for a migration.

    With `private_ram` its memory is the existing RAM file, mapped privately; `ram_is_read_only`:
    see `qemu_argv`.

    Returns also a session on its operator monitor, which the caller closes. Its taps are not
    plugged yet. On an error nothing of it remains. Raises RefusedError (no memory),
    OperationFailedError (QEMU's own words), HostDownError.
    """
    passed = files._replace(as_user=host.vm_uids is not None)
    _require_short_paths(host, passed)
    await host.make_dir(files.path)
    try:
        for ram_dir in {spec.ram_dir, IN_MEMORY}:
            await host.make_private_dir(files.memory(ram_dir))
        await _promise(host, spec, files, is_private=private_ram)
        user = await set_up(host, spec, files, has_kvm=platform.accel == "kvm")
        if user and not private_ram:
            await host.grant([Grant(GrantKind.MADE, files.ram(spec.ram_dir), user.uid)], user.uids)
        elif user:
            shared = Grant(GrantKind.READ, files.ram(spec.ram_dir), user.shared_group)
            await host.grant([shared], user.uids)
        argv = qemu_argv(
            spec, platform, passed, host.qemu, incoming=incoming,
            private_ram=private_ram, ram_is_read_only=ram_is_read_only,
        )  # fmt: skip
        await host.write_text(files.path / "argv.json", json.dumps(argv))
        # This log will prove whether the guest ran: allocate its first block now, in case the disk
        # fills up.
        await host.write_text(files.stderr, f"{LOG_HEAD} {spec.name}\n")
        if user:
            argv = user.command(argv)
        process, monitor = await _started(host, spec, argv, files, user)
    except BaseException:
        await finish(end_qemu(host, spec.ram_dir, files))
        raise
    return Qemu(files, process, platform, private_ram=private_ram), monitor


async def _started(
    host: Host, spec: Spec, argv: Sequence[str], files: QemuDir, user: VmUser | None
) -> tuple[ProcessId, Monitor]:
    try:
        process, monitor = await greeted(host, argv, files.operator, files.stderr)
        try:
            if user and user.taps:
                await host.bind_taps(process)
        except BaseException:
            await finish(monitor.close())
            raise
        return process, monitor
    except OperationFailedError:
        if user:  # QEMU's messages do not name a directory above a file
            await require_reachable(host, spec, user)
        raise


async def end_qemu(host: Host, ram_dir: Path, files: QemuDir, *, await_freed: bool = True) -> None:
    """Kill the QEMU of `files`, recorded or not, and remove its files.

    Without `await_freed` none of it runs on return, but for a moment the kernel may still be
    freeing its memory and the locks on its disks. Raises OperationFailedError if the process does
    not end.
    """
    for process in await processes(host, files):
        end = host.kill if await_freed else host.stop_for_good
        if not await end(process):
            raise OperationFailedError(
                f"QEMU {process.pid} on {host.name} does not end",
                why="it survived SIGKILL for 5 s",
                remedy="it is stuck in the kernel: check its storage",
            )
    await remove_qemu_files(host, ram_dir, files)


async def processes(host: Host, files: QemuDir) -> list[ProcessId]:
    """The running QEMU of `files`, recorded in vm.json or not.

    If it has its own user, all processes of that user: a process can claim anything about itself.
    """
    if found := await host.find_processes(files.mark):
        return found
    if found := await all_of_user(host, files):
        return found
    foreign = await foreign_process(host, files)
    return [foreign] if foreign else []


async def foreign_process(host: Host, files: QemuDir) -> ProcessId | None:
    """The running QEMU of `files`, if it was adopted.

    Raises StorageError on a damaged file.
    """
    recorded = await load_from(host, files.process, _PROCESS)
    return recorded if recorded and await host.is_alive(recorded) else None


async def record_foreign(host: Host, files: QemuDir, process: ProcessId) -> None:
    """Record the process of the QEMU of `files`, for `foreign_process`. Raises StorageError."""
    await save_to(host, files.process, _PROCESS, process)


async def sweep(host: Host, spec: Spec, directory: VmDir, keep: QemuDir | None) -> None:
    """End QEMUs of the VM that killed commands have left: all except `keep`.

    If the VM is not at home here (no `keep`), what is left of an earlier one of its name goes, too:
    another VM must not get its identity, its claim, or its overlays. The caller holds its lock.

    Without `keep`, raises BusyError after an interrupted migration to this host (its QEMU may have
    the guest), or an interrupted restore (its images are incomplete; recovery removes them);
    RefusedError: a libvirt domain of that name was replicated, and is in no libvirt.
    """
    if keep is None and await host.exists(directory.journal):
        raise BusyError(
            f"{host.name} has remains of an interrupted migration of '{spec.name}'",
            why="the guest may run there",
            remedy=f"recover it first: vmckpt migrate --recover {spec.name}; or use another "
            "name or host",
        )
    if keep is None and await host.exists(directory.restoring):
        raise BusyError(
            f"{host.name} has something of a restore of '{spec.name}' that was interrupted",
            why="the images that it made are not complete, and are removed when it is ended",
            remedy=f"end it first: vmckpt vm show {spec.name}",
        )
    if keep is None and await host.exists(directory.domain):
        await _require_defined(host, spec.name, directory)
    known = keep.path.name if keep else None
    of_another = {path.name for path in directory.about_it} if keep is None else set[str]()
    for name in await host.list_dir(directory.path):
        if name in of_another:
            await host.remove(directory.path / name)
        elif name.startswith(QEMU_PREFIX) and name != known:
            files = directory.qemu(name.removeprefix(QEMU_PREFIX))
            # An interrupted adoption started nothing.
            is_foreign = await host.exists(files.process)
            end = remove_qemu_files if is_foreign else end_qemu
            await end(host, spec.ram_dir, files)


async def _require_defined(host: Host, name: str, directory: VmDir) -> None:
    if await host.exists(directory.undefined):
        raise RefusedError(
            f"{host.name} has a libvirt domain '{name}', which no libvirt has",
            why="its replication was interrupted, and has its definition",
            remedy=f"return it first: vmckpt replicate stop {name}; or use another name",
        )


async def remove_home(host: Host, directory: VmDir) -> None:
    """Remove the VM's directory. Wherever that is cut off, the VM is at home here with what says
    whether it may run, or not at all: `sweep` removes the rest.

    Raises HostDownError, StorageError.
    """
    in_order = directory.overlays_request, directory.current, directory.domain, directory.path
    # One command: once the VM is not at home here, it may come back.
    done = await host.run(["rm", "-rf", "--", *map(str, in_order)], REMOVE_S)
    if done.returncode:
        raise StorageError(
            f"cannot remove {directory.path} on {host.name}",
            why=done.stderr.strip(),
            remedy="fix the permissions of the directory, and remove it",
        )
    await host.run(["sync", "--", str(directory.path.parent)], REMOVE_S)


async def remove_qemu_files(host: Host, ram_dir: Path, files: QemuDir) -> None:
    """Remove the files of a QEMU that has ended: its directory and its RAM file.

    A QEMU that only replaced a VM that was off had its RAM in memory, wherever the VM's own is.
    """
    await end_all_of(host, files)
    await take_back(host, files)
    loose = files._replace(is_loose=True)
    old = (loose.ram(ram_dir), loose.ram(IN_MEMORY), loose.key, loose.saved_file(in_memory=True))
    now = (files.memory(ram_dir), files.memory(IN_MEMORY))
    await all_of(host.remove(path) for path in dict.fromkeys((*now, *old)))
    # Last: while it exists, the next holder of the VM's lock removes everything.
    await host.remove(files.path)


class _EndedSilentlyError(OperationFailedError):
    """A QEMU that ended during its start without a message: it crashed."""


async def greeted(
    host: Host, argv: Sequence[str], path: Path, stderr: Path
) -> tuple[ProcessId, Monitor]:
    """Start a QEMU and open its monitor `path`; all of its devices exist on return.

    Raises OperationFailedError with QEMU's own words if it ends instead, HostDownError if it hangs
    or the host is down; QEMU is dead then.
    """
    try:
        return await _greeted(host, argv, path, stderr)
    except (HostDownError, _EndedSilentlyError):
        # Seen occasionally: it waits for an answer of the kernel that never comes; or 10.0 dies
        # (SIGSEGV, 1 in some 3,000 on a busy machine) when a client connects early, as its main
        # loop and its monitors' thread both take over the socket.
        return await _greeted(host, argv, path, stderr)


async def _greeted(
    host: Host, argv: Sequence[str], path: Path, stderr: Path
) -> tuple[ProcessId, Monitor]:
    process = await host.spawn(argv, stderr)
    try:
        return process, await _wait_for_monitor(host, process, path, stderr)
    except BaseException:
        await finish(host.kill(process))
        raise


async def _wait_for_monitor(host: Host, process: ProcessId, path: Path, stderr: Path) -> Monitor:
    deadline = asyncio.get_running_loop().time() + START_TIMEOUT_S
    while True:
        try:
            return await Monitor.connect(
                await host.connect(path), f"QEMU on {host.name}", START_TIMEOUT_S
            )
        except HostDownError as exc:
            if not await host.is_alive(process):
                await host.require_up()  # else the error is not from QEMU
                what = f"QEMU did not start on {host.name}"
                if words := await last_lines(host, stderr):
                    remedy = "correct what it names; nothing was left behind"
                    if "-sandbox" in words:
                        remedy = (
                            "use a QEMU that was built with seccomp, or write sandbox = false into "
                            "the VM's spec: then a guest that breaks out of QEMU meets no filter"
                        )
                    raise OperationFailedError(what, why=words, remedy=remedy) from exc
                raise _EndedSilentlyError(
                    what,
                    why="it ended twice without a message",
                    remedy="look into the kernel's log for its signal; nothing was left behind",
                ) from exc
            if asyncio.get_running_loop().time() > deadline:
                raise HostDownError(
                    f"QEMU on {host.name} does not open its monitor",
                    why=f"none within {START_TIMEOUT_S:g} s{await _whereabouts(host, process)}",
                    remedy="check the host's load and storage",
                ) from exc
        await asyncio.sleep(SOCKET_POLL_S)


async def _whereabouts(host: Host, process: ProcessId) -> str:
    """What a hung process waits for, in the kernel's words (proc(5))."""
    status = await host.read_text(Path(f"/proc/{process.pid}/status")) or ""
    wchan = await host.read_text(Path(f"/proc/{process.pid}/wchan"))
    state = " ".join(status_fields(status).get("State", []))
    return f"; the process is in {wchan or '?'}, state {state}" if state else ""


def _require_short_paths(host: Host, files: QemuDir) -> None:
    longest = max(len(str(path).encode()) for path in (files.rescue, files.console))
    if longest > SOCKET_PATH_BYTES:
        raise UsageError(
            f"the state directory of {host.name} has too long a path",
            why=f"a Unix socket's path has at most {SOCKET_PATH_BYTES} bytes, one has {longest}",
            remedy="choose a shorter state directory (VMCKPT_STATE_DIR) or VM name",
        )


async def _promise(host: Host, spec: Spec, files: QemuDir, *, is_private: bool) -> None:
    """Reserve all of its memory, however little the guest has touched so far.

    Raises RefusedError.
    """
    ram = files.ram(spec.ram_dir)
    promise = Promise(files.promised, spec.memory_bytes, ram, is_private, files.mark)
    found = await host.promise_memory(promise, overcommit=spec.overcommit)
    if not found.is_given:
        raise no_room(host, spec.memory_bytes, spec.ram_dir, found)


def no_room(host: Host, needed_bytes: int, ram_dir: Path, found: FreeMemory) -> RefusedError:
    """The error for memory that cannot be reserved."""
    return RefusedError(
        f"{host.name} has no room for the VM's memory",
        why=f"it needs {format_size(needed_bytes)} in {ram_dir}, {format_size(found.free_bytes)} "
        f"are free; {format_size(found.promised_bytes)} are other VMs', which have not touched "
        "them yet",
        remedy="end or move other VMs, give the VM less memory, or accept that guests die when "
        "memory runs out: overcommit = true in its spec (fork: --overcommit)",
    )


async def plug_taps(host: Host, spec: Spec, files: QemuDir) -> None:
    """Put a running QEMU's taps on the host's bridge, except those of isolated NICs.

    Raises RefusedError (no bridge), OperationFailedError.
    """
    if spec.is_isolated:
        return
    bridged = [number for number, nic in enumerate(spec.nics) if nic.network == "bridge"]
    first = len(spec.nics)
    bridged += [n for n, device in enumerate(spec.passthrough, first) if device.netdev]
    for number in bridged:
        if host.bridge is None:
            raise RefusedError(
                f"{host.name} has no bridge for {spec.name}'s NIC {number}",
                why="its inventory entry names none",
                remedy='use network = "user", or name the host\'s bridge',
            )
        done = await host.run(
            ["ip", "link", "set", "dev", files.tap(number), "master", host.bridge, "up"]
        )
        if done.returncode:
            raise OperationFailedError(
                f"cannot put {files.tap(number)} on bridge {host.bridge} of {host.name}",
                why=done.stderr.strip() or f"ip exited with {done.returncode}",
                remedy="check the host's bridge",
            )
