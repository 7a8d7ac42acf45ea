"""The standby's waiting QEMU of a libvirt domain, and how it takes the guest over.

libvirt starts the domain from a save image in a pipe, and its QEMU waits there for what follows the
list of its RAM. Its RAM is the replica's file, which it was made to map. At the takeover the state
of its devices is written into the pipe: libvirt then has the domain, paused, as if it had restored
it, and resumes it. If this process dies, its dead-man's switch ends what waits.
"""

import asyncio
import os
from collections.abc import Iterable
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path

from vmckpt.deadlines import poll, retry
from vmckpt.epoch.load import LOAD_TIMEOUT_S
from vmckpt.errors import (
    HostDownError,
    OperationFailedError,
    OutcomeUnknownError,
    StorageError,
    VmckptError,
)
from vmckpt.hosts.host import Host
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes.process import ProcessId
from vmckpt.memory.private.from_file import give_content
from vmckpt.memory.ram_file import open_fd
from vmckpt.qemu.stream_head import StreamHead, plain_end, read_stream_head
from vmckpt.replicate.domains.described import standalone
from vmckpt.replicate.domains.facts import ReplicatedDomain
from vmckpt.replicate.domains.guest import concluded
from vmckpt.replicate.standby.warm import CHECK_S, RUN_POLL_S, RUN_S, SILENT_S
from vmckpt.sequence.in_thread import in_thread, in_thread_at_last
from vmckpt.sequence.steps import finish
from vmckpt.state.durable import storage_errors, sync_directory
from vmckpt.vm.domains.faults import LibvirtRefusedError
from vmckpt.vm.domains.flags import DomainState
from vmckpt.vm.domains.libvirtd import Libvirtd
from vmckpt.vm.domains.loading.image_pipe import ImagePipe, release
from vmckpt.vm.domains.loading.starting import StartedQemu, begin_marked, image_head
from vmckpt.vm.domains.sessions import libvirtd
from vmckpt.vm.inventory import Vm
from vmckpt.vm.paths import IN_MEMORY, QEMU_PREFIX, QemuDir, VmDir, new_qemu_id, vm_dir
from vmckpt.vm.record import Platform, Qemu, Replaced
from vmckpt.vm.spec.spec import Spec

_RELEASE_S, _RELEASE_POLL_S = 10.0, 0.05
_SPOIL_S = 10.0
# How long a libvirtd that ended at the takeover is waited for, and what it raises meanwhile.
_LIBVIRTD_S, _AGAIN_S = 60.0, 0.1
_LIBVIRTD_ENDS = (HostDownError, OutcomeUnknownError, LibvirtRefusedError)
# The pipe, among the files of its QEMU.
_PIPE = "image"


class WaitingDomain:
    """A `WaitingGuest` that libvirt is restoring. Its NICs are plugged in: it sends nothing."""

    def __init__(
        self,
        host: LocalHost,
        spec: Spec,
        domain: ReplicatedDomain,
        qemu: Qemu,
        started: "_PipedRestore",
    ) -> None:
        self._host, self._spec, self._domain, self.qemu = host, spec, domain, qemu
        self._started = started

    @classmethod
    async def start(
        cls, host: LocalHost, spec: Spec, domain: ReplicatedDomain, platform: Platform,
        replaces: Replaced,
    ) -> "WaitingDomain":  # fmt: skip
        """Raises what libvirt says, StorageError, OperationFailedError; nothing of it is left."""
        directory = vm_dir(host.state_dir, spec.name)
        files = directory.qemu(new_qemu_id())
        await host.make_dir(files.path)
        await host.make_private_dir(files.memory(IN_MEMORY))
        started = _PipedRestore(host, _pipe(files))
        try:
            ram = files.ram(spec.ram_dir)
            _make_ram(ram, spec.memory_bytes)
            process = await started.begin(spec, domain, ram)
            qemu = Qemu(
                files, process, platform, is_foreign=True, replaces=replaces,
                ram_names=domain.ram_names, domain=domain.uuid,
            )  # fmt: skip
            # Written beforehand: at the takeover the disk may be full.
            await host.write_text(directory.undefined, "")
            await host.write_text(directory.awaited_domain, qemu.to_json())
        except BaseException:
            await finish(started.end())
            await finish(_removed(host, spec, files))
            raise
        return cls(host, spec, domain, qemu, started)

    @property
    def directory(self) -> VmDir:
        """The VM's files on this host."""
        return vm_dir(self._host.state_dir, self._spec.name)

    async def load(self, device_state: bytes) -> None:
        """See `WaitingGuest`."""
        try:
            head = read_stream_head(device_state)
            if head.blocks != self._domain.blocks:
                raise ValueError("its guest has got other memory than it had at the start")
            await self._started.load(head)
        except (VmckptError, ValueError, OSError, TimeoutError) as exc:
            why = f"{exc.what}: {exc.why}" if isinstance(exc, VmckptError) else str(exc)
            raise OperationFailedError(
                f"the standby's libvirt does not take '{self._spec.name}' over",
                why=why or "its QEMU does not load the state of its devices",
                remedy="the primary's VM, if it is alive, is not touched: see `vmckpt vm list`",
            ) from exc

    def settle_here(self) -> None:
        """See `WaitingGuest`."""
        self.directory.awaited_domain.rename(self.directory.domain)
        with suppress(OSError):  # it protects against a power cut, which takes the guest as well
            sync_directory(self.directory.path)

    async def run(self) -> None:
        """See `WaitingGuest`."""
        resume = self._started.switch.resume
        try:
            try:
                await retry(
                    lambda: resume(self._domain.uuid),
                    LibvirtRefusedError,
                    every_s=RUN_POLL_S,
                    within_s=RUN_S,
                )
            except (HostDownError, OutcomeUnknownError):  # libvirtd has ended just now
                await retry(
                    self._resume_again, _LIBVIRTD_ENDS, every_s=_AGAIN_S, within_s=_LIBVIRTD_S
                )
        except VmckptError as exc:
            raise OperationFailedError(
                f"'{self._spec.name}' is on {self._host.name} and is paused",
                why=f"{exc.what}: {exc.why}",
                remedy=f"fix that, then: vmckpt vm resume {self._spec.name}",
            ) from exc

    async def _resume_again(self) -> None:
        async with libvirtd(self._host) as session:
            now = await session.condition(self._domain.uuid)
            if now is None or now.state is not DomainState.RUNNING:
                await session.resume(self._domain.uuid)

    async def announce(self) -> None:
        """QEMU does that itself when it has loaded its devices."""

    async def conclude(self) -> None:
        """See `WaitingGuest`."""
        vm = Vm(self._spec, self._host, self.directory, self.qemu)
        await concluded(vm, self._domain)

    async def close(self) -> None:
        """See `WaitingGuest`."""
        await self._started.close()

    async def end(self) -> None:
        """See `WaitingGuest`."""
        await self._started.end()
        await _removed(self._host, self._spec, self.qemu.files)
        await self._host.remove(self.directory.path)

    async def ended(self) -> str:
        """See `WaitingGuest`."""
        return await poll(self.lack, every_s=CHECK_S)

    async def lack(self) -> str:
        """See `WaitingGuest`."""
        if why := self._started.failed():
            return f"has ended: {why}"
        if not await self._host.is_alive(self.qemu.process):
            return "has ended"
        return await self._started.silence(self._domain.uuid)


class _PipedRestore:
    """What is open while libvirt restores a domain: the pipe, and two sessions: libvirt answers
    nothing else in the one that restores.
    """

    def __init__(self, host: LocalHost, path: Path) -> None:
        self._host, self._stack, self._pipe = host, AsyncExitStack(), ImagePipe(path)
        self._restoring: asyncio.Future[None] | None = None
        self._process: StartedQemu | None = None
        self._switch: Libvirtd | None = None

    @property
    def switch(self) -> Libvirtd:
        """The session that resumes the domain."""
        if self._switch is None:
            raise RuntimeError("call begin() first")
        return self._switch

    async def begin(self, spec: Spec, domain: ReplicatedDomain, ram: Path) -> ProcessId:
        """Have libvirt start it, up to where it waits; its memory is the file then."""
        restores = await self._stack.enter_async_context(libvirtd(self._host))
        self._switch = await self._stack.enter_async_context(libvirtd(self._host))
        self._stack.enter_context(self._pipe)
        image = image_head(standalone(domain.xml), runs=False)
        self._restoring = asyncio.ensure_future(restores.restore(self._pipe.path))
        begun = asyncio.ensure_future(
            begin_marked(
                self._pipe, head_of(domain), image,
                uuid=domain.uuid, name=spec.name,
            )
        )  # fmt: skip
        either: set[asyncio.Future[object]] = {self._restoring, begun}  # type: ignore[arg-type]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._restoring.done():  # libvirt refuses it
            begun.cancel()
            await asyncio.wait({begun})
            self._restoring.result()
            raise OperationFailedError(
                f"libvirt on {self._host.name} does not wait for '{spec.name}'",
                why="it says that it has restored the domain, of which it has no memory",
                remedy="use another host as its standby",
            )
        try:
            found = begun.result()
        except BrokenPipeError:
            await self._restoring  # libvirt says why
            raise
        self._process = found
        with storage_errors(f"have the QEMU of '{spec.name}' map its memory"):
            await finish(
                in_thread(partial(give_content, found.process.pid, found.ram, ram, shared=True))
            )
        return found.process

    async def load(self, head: StreamHead) -> None:
        """Write what follows the list of its RAM; returns when libvirt has the domain, paused."""
        if self._restoring is None:
            raise RuntimeError("call begin() first")
        pieces: Iterable[bytes] = [head.pages, *plain_end(head, ())]
        feeding = asyncio.ensure_future(in_thread_at_last(partial(self._pipe.write, pieces)))
        async with asyncio.timeout(LOAD_TIMEOUT_S):
            await asyncio.shield(self._restoring)
        await feeding

    def failed(self) -> str:
        """Why libvirt no longer waits; "": it does."""
        if self._restoring is None or not self._restoring.done():
            return ""
        exc = self._restoring.exception()
        if isinstance(exc, VmckptError):
            return f"{exc.what}: {exc.why}"
        return str(exc) if exc else ""

    async def silence(self, uuid: str) -> str:
        """Why libvirtd could not resume the domain; "": it answers. One that is being stopped does
        not, and waits for what waits here.
        """
        try:
            async with asyncio.timeout(SILENT_S):
                await self.switch.condition(uuid)
        except TimeoutError:
            return f"is libvirtd's, which has not answered for {SILENT_S:g} s"
        except VmckptError as exc:
            return f"is libvirtd's: {exc.what}: {exc.why}"
        return ""

    async def close(self) -> None:
        """Close the pipe and the sessions; what libvirt has stays."""
        await self._stack.aclose()

    async def end(self) -> None:
        """End the QEMU; libvirt forgets the domain."""
        if self._process is not None:
            await self._host.stop_for_good(self._process.process)
        if self._restoring is not None and not self._restoring.done():
            with suppress(TimeoutError):  # libvirtd hangs: it finds the end when it goes on
                await asyncio.wait_for(self._pipe.spoil(self._restoring), _SPOIL_S)
        await self.close()


def head_of(domain: ReplicatedDomain) -> StreamHead:
    """What a QEMU that waits for it reads first: no page of any block."""
    ram = tuple(name for name, _ in domain.blocks if name.rpartition("/")[2] in domain.ram_names)
    return StreamHead(domain.machine, domain.blocks, b"", ram, b"")


async def end_waiting_domain(host: Host, name: str, uuid: str) -> None:
    """End a QEMU that a killed standby has left waiting, on any host. It never ran.

    The domain may have come to that host since, without vmckpt: only a QEMU that is recorded as
    waiting, or reads the standby's pipe, is ended. The caller holds the VM's lock; the domain is
    not at home there. Raises OperationFailedError, OutcomeUnknownError.
    """
    directory, waiting = vm_dir(host.state_dir, name), set[ProcessId]()
    with suppress(StorageError):  # a power cut emptied it, and ended the QEMU as well
        if (text := await host.read_text(directory.awaited_domain)) is not None:
            waiting.add(Qemu.from_json(text, directory).process)
    for process in await host.find_processes(f"-uuid\0{uuid}\0", of_anyone=True):
        if await _reads_pipe(host, process, name):
            waiting.add(process)
    for process in waiting:
        if not await host.stop_for_good(process):
            raise OperationFailedError(
                f"QEMU {process.pid} on {host.name} does not end",
                why=f"it waited there for '{name}', and survived SIGKILL",
                remedy="it is stuck in the kernel: look at its storage",
            )


async def _reads_pipe(host: Host, process: ProcessId, name: str) -> bool:
    pipe = f"*/vms/{name}/{QEMU_PREFIX}*/{_PIPE}*"  # the name has no characters of patterns
    command = ["find", f"/proc/{process.pid}/fd", "-lname", pipe, "-printf", "x"]
    return bool((await host.run(command)).stdout)


async def release_pipes(host: LocalHost, name: str) -> None:
    """Have a libvirtd on this machine give up an image that a killed standby left incomplete."""
    directory = vm_dir(host.state_dir, name)
    for path in directory.path.glob(f"*/{_PIPE}"):
        await poll(partial(_is_released, path), every_s=_RELEASE_POLL_S, within_s=_RELEASE_S)


def _is_released(path: Path) -> bool:
    release(path)
    return not path.exists()


def _pipe(files: QemuDir) -> Path:
    return files.path / _PIPE


def _make_ram(path: Path, size_bytes: int) -> None:
    with storage_errors(f"create {path}"):
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open_fd(os.open(path, flags, 0o600)) as fd:
            os.ftruncate(fd, size_bytes)


async def _removed(host: LocalHost, spec: Spec, files: QemuDir) -> None:
    await host.remove(files.memory(spec.ram_dir))
    await host.remove(files.path)
