"""The primary's service: what surrounds the protection of a VM, from its lock to its end."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    ExitStack,
    contextmanager,
    suppress,
)
from functools import partial
from pathlib import Path

from vmckpt.deadlines import poll
from vmckpt.epoch.capture import Capture, capturing
from vmckpt.epoch.output import HeldOutput
from vmckpt.epoch.ram import require_ram
from vmckpt.epoch.senders import senders
from vmckpt.errors import HostDownError, OperationFailedError, RefusedError, StorageError
from vmckpt.hosts.processes.deadman import armed, attended
from vmckpt.hosts.processes.kernel import PageTracking, page_tracking
from vmckpt.hosts.processes.process import identify
from vmckpt.hosts.processes.scheduling import batch_priority
from vmckpt.hosts.remote.tls import TlsEndpoint, open_link
from vmckpt.lease.lease import Lease
from vmckpt.lease.record import LeaseSpan
from vmckpt.lease.rule import Claimant, Holding
from vmckpt.memory.allocator import keep_freed_memory
from vmckpt.memory.ram_file import open_fd
from vmckpt.memory.soft_dirty import is_sound
from vmckpt.preflight.finding import ask, require
from vmckpt.preflight.replication.checks import runs
from vmckpt.preflight.replication.memory import primary_bytes
from vmckpt.qemu.monitor import Monitor
from vmckpt.replicate.arbiter import open_arbiter
from vmckpt.replicate.channel import Channel
from vmckpt.replicate.control import answering
from vmckpt.replicate.disks.copies import mark_as_disks
from vmckpt.replicate.disks.mirrors import MirrorSource, mirrored
from vmckpt.replicate.disks.overlays import add_overlays
from vmckpt.replicate.domains.guest import (
    give_back,
    guard_of,
    operator_monitor,
    record_home,
    take_charge,
)
from vmckpt.replicate.fencing.agent import this_machine
from vmckpt.replicate.narration import narrated
from vmckpt.replicate.paths import SecondPath, second_path
from vmckpt.replicate.primary.claim import Claim, require_right
from vmckpt.replicate.primary.ending import libvirt_moves
from vmckpt.replicate.primary.epochs import PrimaryHandles
from vmckpt.replicate.primary.keeper import TermKeeper
from vmckpt.replicate.primary.protection import Protection
from vmckpt.replicate.promised import promised
from vmckpt.replicate.request import ReplicationRequest, ServiceFiles, read_request, stop_command
from vmckpt.replicate.wire.beats import Sender
from vmckpt.replicate.wire.frames import FrameKind
from vmckpt.replicate.wire.messages import (
    Hello,
    HelloDisk,
    Process,
    Welcome,
    decode_failure,
    decode_welcome,
)
from vmckpt.vm.inventory import Vm, require_at_home
from vmckpt.vm.lifecycle import owner, read_again
from vmckpt.vm.paths import lock_path
from vmckpt.vm.users.users import grant_write

HELLO_S, REQUEST_S, POLL_S = 60.0, 60.0, 0.02
# The standby reserves memory for all of the guest before it sends WELCOME, and sends heartbeats
# meanwhile. A kernel clears some GiB in a second.
LEAST_RESERVED_BYTES_PER_S = 128 << 20
# A guard that leaves a line unanswered for this long counts as dead.
GUARD_ANSWER_S = 5.0


async def serve_primary(directory: Path, own_command: list[str]) -> None:
    """Protect the VM until that ends; then it runs unprotected, or on the standby, or is off.

    Raises whatever prevents the start: nothing was changed then.
    """
    keep_freed_memory()
    files = ServiceFiles(directory)
    request = await _await_request(directory)
    host = request.primary
    async with AsyncExitStack() as stack:
        action = f"replicate to {request.standby.name}"
        holder = owner(action, request.run, stop_command(request.vm))
        await stack.enter_async_context(host.lock(lock_path(host.state_dir, request.vm), holder))
        vm = await _vm_of(request)
        undo = await _recorded(stack, vm, request)
        await stack.enter_async_context(_with_memory(vm, request))
        pidfd = stack.enter_context(_pidfd(vm))
        tell_guard = stack.enter_context(_guarded(await guard_of(vm), files))
        await require_right(vm)
        lease, dead = await _entitled(request, vm)
        keeper = TermKeeper(lease, tell_guard)
        await keeper.take(dead)
        for replica in (vm.directory.gone_replica, vm.directory.listed_replica):
            await host.remove(replica)
        _claim(request, lease).write(vm.directory.claim)
        unprotected = stack.enter_context(ExitStack())
        unprotected.callback(vm.directory.claim.unlink, missing_ok=True)
        recovery = [*own_command, "replica", "recover", str(directory)]
        stack.enter_context(armed(recovery, files.recovery_log))
        await take_charge(vm, request.domain)
        channel = await _connect(request, keeper.term)
        stack.callback(channel.abort)
        second = await stack.enter_async_context(
            second_path(request, Sender.PRIMARY, _endpoint(request).token)
        )
        welcome = await _greet(channel, request, vm, second)
        monitor = await stack.enter_async_context(operator_monitor(vm))
        moves = stack.enter_context(libvirt_moves(monitor))
        held = await senders(vm, monitor) if request.options.holds_output else []
        output = HeldOutput(monitor, held)
        capture = await stack.enter_async_context(await _capturing(vm, monitor, output))
        sources = await _sources(monitor, request, vm)
        let_in = partial(grant_write, vm.qemu.files)
        mirrored_to = mirrored(monitor, sources, vm.qemu.files.mirrors, tell_guard, let_in)
        mirrors = await stack.enter_async_context(mirrored_to)
        protection = Protection(
            request, files, PrimaryHandles(vm, monitor, capture, output, pidfd, mirrors),
            keeper=keeper, channel=channel, replica=welcome.replica, second=second, moves=moves,
        )  # fmt: skip
        await stack.enter_async_context(narrated(protection.status, host))
        await stack.enter_async_context(answering(files.control, protection.answer))
        batch_priority()  # everything that runs beside it has been started
        unprotected.pop_all()  # from here on, how the protection ends decides about the claim
        # A host that shuts down sends this to all processes, QEMU included.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, protection.hand_over)
        try:
            await protection.run()
        finally:
            if not protection.is_settled:  # another host has the guest, or may have it
                undo.pop_all()


async def _recorded(stack: AsyncExitStack, vm: Vm, request: ReplicationRequest) -> AsyncExitStack:
    """Record a domain as this host's; libvirt has it again in the end, unless that is forgotten."""
    undo = await stack.enter_async_context(AsyncExitStack())
    undo.push_async_callback(give_back, vm.host, vm.name, request.domain)
    await record_home(vm, request.domain)
    return undo


async def _capturing(
    vm: Vm, monitor: Monitor, output: HeldOutput
) -> AbstractAsyncContextManager[Capture]:
    """Its epochs, for a block. Raises RefusedError: its memory cannot be read."""
    where = await require_ram(vm, monitor)
    return capturing(
        vm.qemu.process.pid, where.ram, monitor, output,
        ram_bytes=vm.spec.memory_bytes, ram_names=where.names,
    )  # fmt: skip


async def _vm_of(request: ReplicationRequest) -> Vm:
    """The VM, still run by the QEMU that is to be protected; no user has paused it since `start`
    checked. Raises NotFoundError, RefusedError.
    """
    if request.domain is not None:
        from vmckpt.replicate.domains.described import domain_of

        return await domain_of(request.primary, request.domain, request.qemu_id)
    found = await require_at_home(request.primary, request.vm)
    vm = await read_again(found, runs_again=False)  # `require_right` asks the arbiter
    _require_same_qemu(request, vm)
    if await vm.is_alive():
        async with operator_monitor(vm) as monitor:
            require(await ask(runs(vm, monitor)), f"'{vm.name}' cannot be protected")
    return vm


def _claim(request: ReplicationRequest, lease: Lease) -> Claim:
    """Whom to ask before this home is started, should the protection not end in good order."""
    options = request.options
    return Claim(
        request.vm, lease.claimant.name, request.standby.name, options.arbiter, options.credentials
    )


def _with_memory(vm: Vm, request: ReplicationRequest) -> AbstractAsyncContextManager[None]:
    """Reserve the memory that this service may come to use, for the block. Raises RefusedError."""
    files, how = vm.qemu.files, page_tracking()
    is_in_file = vm.ram_is_shared and how is PageTracking.SOFT_DIRTY
    if is_in_file and not is_sound(files.ram(vm.spec.ram_dir)):
        how = PageTracking.COMPARISON
    copied = () if request.shares_disks else request.disks
    need_bytes = primary_bytes(
        vm.spec.memory_bytes,
        how,
        has_disks=bool(request.disks),
        copied_bytes=sum(disk.size_bytes for disk in copied),
    )
    return promised(vm.host, files, vm.spec, "primary", need_bytes)


def _require_same_qemu(request: ReplicationRequest, vm: Vm) -> None:
    """The standby will record that it replaced this QEMU. Raises RefusedError."""
    if vm.qemu.files.qemu_id != request.qemu_id:
        raise RefusedError(
            f"'{vm.name}' has another QEMU now",
            why="it was restarted while its protection began",
            remedy="start again: vmckpt replicate start",
        )


async def _sources(monitor: Monitor, request: ReplicationRequest, vm: Vm) -> list[MirrorSource]:
    """The sources of the mirrors: each disk's node with the guest's writes."""
    disks = request.disks
    sources = [MirrorSource(disk.number, vm.nodes[disk.number], disk.size_bytes) for disk in disks]
    if request.shares_disks:
        return await add_overlays(monitor, request, vm, sources)
    paths = [vm.spec.disks[disk.number].on(vm.host.state_dir) for disk in disks]
    mark_as_disks(paths, vm.name, request.identity)
    return sources


@contextmanager
def _pidfd(vm: Vm) -> Iterator[int]:
    """A pidfd of its QEMU, for the block, safe against reuse of the pid. Raises RefusedError."""
    try:
        pidfd = os.pidfd_open(vm.qemu.process.pid)
    except ProcessLookupError as exc:
        raise RefusedError(
            f"'{vm.name}' does not run",
            why="its QEMU has just ended",
            remedy=f"start it: vmckpt vm start {vm.name}",
        ) from exc
    with open_fd(pidfd):
        yield pidfd


async def _await_request(directory: Path) -> ReplicationRequest:
    """Wait for the request: the process is started before it arrives."""
    files = ServiceFiles(directory)
    await poll(
        lambda: files.request.exists() or not directory.exists(),
        every_s=POLL_S,
        within_s=REQUEST_S,
    )
    return read_request(directory)


async def _entitled(request: ReplicationRequest, vm: Vm) -> tuple[Lease, Holding | None]:
    """A lease for the VM whose home is here, and the term that it follows.

    The holder of the VM's lock succeeds the previous holder, whose process is dead, unless there is
    a replica that may take over and is not known to be gone. Raises RefusedError.
    """
    store, name = open_arbiter(request.options), f"{request.primary.name}/{request.run}"
    found = await store.read(request.vm)
    span = LeaseSpan(request.options.lease_s)
    if found is None:
        return Lease(store, request.vm, Claimant(name), span), None
    record = found.record
    gone = await vm.host.read_text(vm.directory.gone_replica)
    if record.in_sync is not None and record.in_sync != gone:
        with suppress(StorageError):  # then the operator cannot declare it gone
            await vm.host.write_text(vm.directory.listed_replica, record.in_sync)
        raise RefusedError(
            f"'{request.vm}' is protected already",
            why=f"{record.in_sync} may take over from {record.holder}, according to the arbiter",
            remedy=f"vmckpt replicate stop {request.vm} (with --standby-is-dead if both hosts of "
            "that replication are gone for good)",
        )
    claimant = Claimant(name, succeeds=record.holder)
    return Lease(store, request.vm, claimant, span), Holding(record.term, record.holder)


@contextmanager
def _guarded(command: list[str], files: ServiceFiles) -> Iterator[Callable[[str], None]]:
    """A guard beside the VM for the block; the returned function sends it lines.

    It raises OSError with the last output of a guard that has died.
    """
    with attended(command, files.guard_log, answer_s=GUARD_ANSWER_S) as tell:

        def show(line: str) -> None:
            try:
                tell(line)
            except TimeoutError:
                raise
            except OSError as exc:
                words = files.guard_log.read_text().strip().splitlines()
                raise OSError(exc.errno, words[-1] if words else "it was killed") from exc

        yield show


async def _connect(request: ReplicationRequest, term: int) -> Channel:
    wire = await open_link(request.standby.name, _endpoint(request))
    return Channel(wire.reader, wire.writer, term)


def _endpoint(request: ReplicationRequest) -> TlsEndpoint:
    if request.place is None:
        raise OperationFailedError(
            "the primary does not know its standby's address",
            why="its request has no address",
            remedy="start again: vmckpt replicate start",
        )
    return request.place


async def _greet(
    channel: Channel, request: ReplicationRequest, vm: Vm, second: SecondPath
) -> Welcome:
    """Send HELLO, and heartbeats over both paths from then on.

    Raises HostDownError, OperationFailedError, WireError.
    """
    itself = identify(os.getpid())
    emitters = tuple(
        Process(which.pid, which.start_ticks) for which in (itself, vm.qemu.process) if which
    )
    hello = Hello(
        vm=vm.name,
        holder=f"{request.primary.name}/{request.run}",
        host=request.primary.name,
        machine=this_machine(),
        ram_bytes=vm.spec.memory_bytes,
        disks=tuple(HelloDisk(f"disk{disk.number}", disk.size_bytes) for disk in request.disks),
        emitters=emitters,
        heartbeat_port=second.port,
    )
    try:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + HELLO_S + vm.spec.memory_bytes / LEAST_RESERVED_BYTES_PER_S
        async with asyncio.timeout(HELLO_S) as patience:
            await channel.send(channel.outbound.frame(FrameKind.HELLO, 0, hello.encode()))
            head, payload = await channel.receive()
            while head.kind is FrameKind.HEARTBEAT:
                patience.reschedule(min(until_s, loop.time() + HELLO_S))
                head, payload = await channel.receive()
    except TimeoutError as exc:
        raise HostDownError(
            f"{request.standby.name} does not accept its primary",
            why=f"no answer within {HELLO_S:g} s, or it reserves memory for too long",
            remedy=f"see {ServiceFiles.of(request.standby, vm.name).log} there",
        ) from exc
    if head.kind is FrameKind.FAILURE:
        message = decode_failure(payload)
        raise OperationFailedError(message.what, why=message.why, remedy=message.remedy)
    if head.kind is not FrameKind.WELCOME:
        raise OperationFailedError(
            f"{request.standby.name} does not accept its primary",
            why=f"it said {head}",
            remedy="install the same vmckpt on both sides",
        )
    welcome = decode_welcome(payload)
    # The arbiter stores the name: accept only one that it can store, and only this replica's.
    if welcome.replica != request.replica:
        raise OperationFailedError(
            f"{request.standby.name} does not accept its primary",
            why=f"it says that it is {welcome.replica:.100}, not {request.replica}",
            remedy="install the same vmckpt on both sides, and start again",
        )
    second.begin(welcome.heartbeat_port)
    return welcome
