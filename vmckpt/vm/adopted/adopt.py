"""adopt: a QEMU started by hand becomes a VM, without changing its process."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from vmckpt.errors import (
    BusyError,
    NotFoundError,
    OperationFailedError,
    RefusedError,
    UsageError,
)
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory.inventory import all_hosts, check_name
from vmckpt.hosts.processes.process import ProcessId, from_stat
from vmckpt.procfs import status_fields
from vmckpt.qemu.monitor import Monitor, MonitorLostError
from vmckpt.sequence.steps import finish
from vmckpt.vm.adopted.facts import AdoptedFacts
from vmckpt.vm.adopted.inspect import adopted_facts, process_of
from vmckpt.vm.adopted.rewrite import rewrite
from vmckpt.vm.adopted.spec_text import spec_text
from vmckpt.vm.create import new_name
from vmckpt.vm.inventory import Vm, homes, read_vm, require_unused
from vmckpt.vm.lifecycle import owner
from vmckpt.vm.paths import QemuDir, VmDir, adoption_lock_path, new_qemu_id, vm_dir, vms_dir
from vmckpt.vm.record import Qemu
from vmckpt.vm.spec.spec import Spec, parse_spec
from vmckpt.vm.start import record_foreign, sweep

MONITOR_TIMEOUT_S = 5.0
ROLES = ("operator", "onlooker", "rescue")
# The parts of a spec that adoption cannot determine and the running machine does not depend on.
_OWNERS = ("text", "sandbox", "ram_dir", "heartbeat_id", "overcommit", "autostart", "placement")


class Adoption(NamedTuple):
    """The new VM, and notes for its owner."""

    vm: Vm
    notes: tuple[str, ...]


async def adopt(
    name: str, host: Host, monitors: Sequence[Path], pid: int | None, *, trust: bool = False
) -> Adoption:
    """Adopt the QEMU behind `monitors`, one to three of its QMP sockets, as the VM `name`.

    With `trust` it may be another user's. Raises BusyError (a monitor is held by another client, or
    another process is adopting it), NotFoundError (no such socket), RefusedError naming everything
    that could not be migrated. On an error nothing of it remains.
    """
    check_name(name, "VM")
    if len(set(monitors)) != len(monitors) or not 1 <= len(monitors) <= len(ROLES):
        raise UsageError(
            "adopt takes one to three different QMP sockets",
            why=f"there are {len(monitors)}",
            remedy="name each once: --qmp PATH --qmp PATH2",
        )
    directory = vm_dir(host.state_dir, name)
    async with new_name(name, host, "vm adopt"):
        if taken := await homes(name, all_hosts()):
            raise RefusedError(
                f"there is a VM '{name}' already",
                why=f"on host {taken[0].host.name}",
                remedy="choose another name, or see `vmckpt vm show`",
            )
        facts, process = await _inspect(host, monitors, pid, trust=trust)
        # No other command may adopt the same process under another name meanwhile.
        process_lock = adoption_lock_path(host.state_dir, process.pid)
        async with host.lock(process_lock, owner("vm adopt")):
            await _require_nobodys(host, facts, process)
            if not trust:
                await require_own_user(host, process)
            return await _become(directory, host, monitors, facts, process)


async def _become(
    directory: VmDir, host: Host, monitors: Sequence[Path], facts: AdoptedFacts, process: ProcessId
) -> Adoption:
    """Record the VM; on an error nothing of it remains."""
    name = directory.path.name
    made = rewrite(name, facts)
    text = spec_text(name, facts, made)
    spec = parse_spec(text, str(directory.spec), directory.path)
    await sweep(host, spec, directory, None)
    files = directory.qemu(new_qemu_id())
    nodes = tuple(disk.node_now for disk in made.disks)
    qemu = Qemu(files, process, facts.platform, nodes=nodes, is_foreign=True)
    try:
        await _write(host, files, process, monitors, made.console)
        await host.write_text(directory.spec, spec.text)
        await host.write_text(directory.current, qemu.to_json())
        # Another operator may assign the name on another host at the same time.
        await require_unused([name], host, all_hosts())
    except BaseException:
        await finish(host.remove(directory.path))
        raise
    notes = (*made.notes, *_on_monitors(len(monitors)), *await _on_supervisor(host, process))
    return Adoption(Vm(spec, host, directory, qemu), notes)


async def changes(vm: Vm, monitor: Monitor) -> str | None:
    """How an adopted QEMU has changed since its adoption; None: not at all."""
    facts = await adopted_facts(monitor, vm.host, vm.qemu.process.pid)
    try:
        made = rewrite(vm.name, facts)
    except RefusedError as exc:
        return exc.why
    now = parse_spec(spec_text(vm.name, facts, made), "its command line", vm.directory.path)
    nodes = tuple(disk.node_now for disk in made.disks)
    if is_same_machine(now, vm.spec) and nodes == vm.qemu.nodes:
        return None
    old, new = (set(one.adopted.arguments if one.adopted else ()) for one in (vm.spec, now))
    differing = [f"without {word}" for word in sorted(old - new)]
    differing += [f"with {word}" for word in sorted(new - old)]
    return "it is now " + (", ".join(differing) or "on other images")


def is_same_machine(now: Spec, before: Spec) -> bool:
    """Whether both describe one machine, whatever its owner has added to its spec. Pure."""
    return now._replace(**{name: getattr(before, name) for name in _OWNERS}) == before


async def _inspect(
    host: Host, monitors: Sequence[Path], pid: int | None, *, trust: bool
) -> tuple[AdoptedFacts, ProcessId]:
    """The QEMU that all the monitors belong to."""
    found = pid
    for path in monitors[1:]:
        monitor = await _open(host, path, trust=trust)
        try:
            found = await process_of(monitor, host, found)
        finally:
            await monitor.close()
    monitor = await _open(host, monitors[0], trust=trust)
    try:
        found = await process_of(monitor, host, found)
        process = from_stat(found, await host.read_text(Path(f"/proc/{found}/stat")) or "")
        facts = await adopted_facts(monitor, host, found)
    finally:
        await monitor.close()
    if process is None:
        raise NotFoundError(
            f"process {found} on {host.name} has ended", why="just now", remedy="start it again"
        )
    return facts, process


async def _open(host: Host, path: Path, *, trust: bool) -> Monitor:
    if not await host.exists(path):
        raise NotFoundError(
            f"there is no socket {path} on {host.name}",
            why="nothing exists there",
            remedy="name the path of a QMP socket: QEMU's -qmp unix:PATH,server=on,wait=off",
        )
    # Otherwise any user's claims, also about which process it is, would pass for the QEMU's.
    sock = await host.connect(path, of_anyone=trust)
    try:
        return await Monitor.connect(sock, f"the QEMU at {path}", MONITOR_TIMEOUT_S)
    except MonitorLostError as exc:
        if "no greeting" not in exc.why:
            raise
        raise BusyError(
            f"the monitor {path} is busy",
            why=f"QEMU serves one client at a time, and did not greet for {MONITOR_TIMEOUT_S:g} s: "
            "another client holds it, or QEMU is stuck",
            remedy="end the other client, or name a second QMP socket of this QEMU",
        ) from exc


async def _require_nobodys(host: Host, facts: AdoptedFacts, process: ProcessId) -> None:
    """Raises RefusedError if the QEMU is already a VM of vmckpt or libvirt."""
    for name in await host.list_dir(vms_dir(host.state_dir)):
        vm = await read_vm(host, name)
        if vm and vm.qemu.process == process:
            raise RefusedError(
                f"this QEMU is the VM '{name}' already",
                why=f"it is pid {process.pid} on {host.name}",
                remedy=f"see `vmckpt vm show {name}`",
            )
    words = " ".join(facts.argv)
    keeper = "libvirt" if "/libvirt/qemu/" in words else ""
    keeper = "another vmckpt" if ",process=vmckpt-" in words else keeper
    if keeper:
        raise RefusedError(
            f"this QEMU belongs to {keeper}",
            why="its command line says so, and two owners would work against each other",
            remedy=f"move it by {keeper}",
        )


async def require_own_user(host: Host, process: ProcessId) -> None:
    """Raises RefusedError if the QEMU's user could not open what the VM's next QEMU will open.

    That user controls the QEMU's command line and answers: through them vmckpt would open files,
    and remove copied disks, with its own rights.
    """
    status = await host.read_text(Path(f"/proc/{process.pid}/status")) or ""
    uids = status_fields(status).get("Uid", [])
    theirs, ours = sorted({*uids} - {"0"}), str(await host.user_id())
    if theirs not in ([], [ours]):
        raise RefusedError(
            f"this QEMU runs as another user (uid {theirs[0]})",
            why=f"what its command line names would be opened as uid {ours} when it is started "
            "again: files, devices, networks",
            remedy=f"check /proc/{process.pid}/cmdline, and if you trust everything that it names: "
            "--trust",
        )


async def _write(
    host: Host, files: QemuDir, process: ProcessId, monitors: Sequence[Path], console: Path | None
) -> None:
    """Create the QEMU's directory: its process, and links to its sockets under vmckpt's names."""
    await host.make_dir(files.path)
    # First: from here on the process is not mistaken for one that vmckpt started.
    await record_foreign(host, files, process)
    links = dict(zip((files.operator, files.onlooker, files.rescue), monitors, strict=False))
    links.setdefault(files.onlooker, monitors[0])
    if console is not None:
        links[files.console] = console
    for link, path in links.items():
        done = await host.run(["ln", "-s", "-T", "--", str(path), str(link)])
        if done.returncode:
            raise OperationFailedError(
                f"cannot make {link} on {host.name}",
                why=done.stderr.strip(),
                remedy="fix the permissions of the state directory",
            )


def _on_monitors(count: int) -> tuple[str, ...]:
    if count > 1:
        return ()
    return (
        "one monitor only: during operations `vm show` and `vm list` cannot query it, and "
        "another client of the socket locks vmckpt out. A second --qmp avoids that",
    )


async def supervisor(host: Host, process: ProcessId) -> str | None:
    """The service that the QEMU is part of, which may restart it after it has moved."""
    groups = (await host.read_text(Path(f"/proc/{process.pid}/cgroup")) or "").split()
    unit = next((group.rpartition("/")[2] for group in groups if group.endswith(".service")), None)
    return None if unit is None or unit.startswith("user@") else unit


async def _on_supervisor(host: Host, process: ProcessId) -> tuple[str, ...]:
    if (unit := await supervisor(host, process)) is None:
        return ()
    return (
        f"it runs in {unit}: see that nothing starts it there again when it has moved, or the "
        "guest runs twice",
    )
