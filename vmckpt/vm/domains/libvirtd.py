"""The calls to a host's libvirtd."""

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from vmckpt.errors import NotFoundError, VmckptError
from vmckpt.units import MIB
from vmckpt.vm.domains.connection import (
    ASK_TIMEOUT_S,
    PROBE_TIMEOUT_S,
    LibvirtConnection,
    gone_meanwhile,
)
from vmckpt.vm.domains.faults import LibvirtRefusedError
from vmckpt.vm.domains.flags import DirtyRateStatus, DomainState, EventId, Stats, Undefine, Xml
from vmckpt.vm.domains.job import DomainJob, parse_job
from vmckpt.vm.domains.replies import Condition, DiskSize, DomainInfo, DomainSnapshot, Named


class Libvirtd(LibvirtConnection):
    """One session with a libvirtd. Raises as `LibvirtConnection`."""

    def _domain(self, uuid: str) -> Any:
        return self._connection.lookupByUUIDString(uuid)

    # -- what there is -----------------------------------------------------------------------

    async def domains(self) -> list[DomainInfo]:
        """Every domain, running or defined."""

        def work() -> list[DomainInfo]:
            found = []
            for domain in self._connection.listAllDomains(0):
                with gone_meanwhile():
                    found.append(_seen(domain))
            return found

        return await self._ask("list its domains", work)

    async def names(self) -> list[Named]:
        """The name of every domain, running or defined."""
        return await self._ask(
            "list its domains",
            lambda: [
                # The id of a running QEMU, which comes with the list.
                Named(domain.UUIDString(), domain.name(), domain.ID() != -1)
                for domain in self._connection.listAllDomains(0)
            ],
        )

    async def find(self, uuid: str) -> DomainInfo | None:
        """The domain; None if there is none with that UUID."""
        try:
            return await self._ask("look for a domain", lambda: _seen(self._domain(uuid)))
        except NotFoundError:
            return None

    async def condition(self, uuid: str) -> Condition | None:
        """What the domain does; None if there is none. Available even while the domain is locked.

        Its XML, and so `find`, waits for the lock.
        """

        def work() -> Condition:
            state, reason = self._domain(uuid).state()
            return Condition(DomainState(state), reason)

        try:
            return await self._ask("report what a domain does", work)
        except NotFoundError:
            return None

    async def capabilities(self) -> str:
        """The host's capabilities, XML."""
        return await self._ask(
            "report its capabilities",
            lambda: str(self._connection.getCapabilities()),
            PROBE_TIMEOUT_S,
        )

    async def domain_capabilities(self, emulator: str, arch: str, machine: str, accel: str) -> str:
        """The XML of what such domains can have there. Raises LibvirtRefusedError if there can be
        none.
        """
        return await self._ask(
            f"offer {machine}",
            lambda: str(
                self._connection.getDomainCapabilities(emulator or None, arch, machine, accel)
            ),
            PROBE_TIMEOUT_S,
        )

    async def version(self) -> tuple[int, int, int]:
        """The version of libvirt."""
        return _parts(await self._ask("report its version", self._connection.getLibVersion))

    async def qemu_version(self) -> tuple[int, int, int]:
        """The version of the host's QEMU."""
        return _parts(await self._ask("report its QEMU's version", self._connection.getVersion))

    async def has_network(self, name: str) -> bool:
        """Whether a virtual network of that name is active."""

        def work() -> bool:
            return bool(self._connection.networkLookupByName(name).isActive())

        try:
            return await self._ask("look for a network", work)
        except LibvirtRefusedError:
            return False  # no such network, or a libvirtd without networks

    async def network_bridge(self, name: str) -> str | None:
        """The bridge of a virtual network; None if it has none, or there is no such network."""
        try:
            return await self._ask(
                "name a network's bridge",
                lambda: str(self._connection.networkLookupByName(name).bridgeName()),
            )
        except LibvirtRefusedError:
            return None

    async def disk_size(self, uuid: str, target: str) -> DiskSize:
        """The size of one disk's image."""

        def work() -> DiskSize:
            virtual, allocated, _ = self._domain(uuid).blockInfo(target)
            return DiskSize(virtual, allocated)

        return await self._ask(f"measure disk {target}", work)

    async def has_saved_memory(self, uuid: str) -> bool:
        """Whether the stopped domain continues from memory that libvirt has saved."""
        return await self._ask(
            "report whether the domain's memory was saved",
            lambda: bool(self._domain(uuid).hasManagedSaveImage(0)),
        )

    async def starts_with_host(self, uuid: str) -> bool:
        """Whether libvirtd starts the domain when it starts itself."""
        return await self._ask(
            "report whether the domain starts with its host",
            lambda: bool(self._domain(uuid).autostart()),
        )

    # -- a domain's life ---------------------------------------------------------------------

    async def start(self, uuid: str) -> None:
        """Start a defined domain."""
        await self._tell("start the domain", lambda: self._domain(uuid).create())

    async def start_with_host(self, uuid: str) -> None:
        """Have libvirtd start the persistent domain when it starts itself."""
        await self._tell(
            "start the domain with its host", lambda: self._domain(uuid).setAutostart(1)
        )

    async def press_power_button(self, uuid: str) -> None:
        """Ask the guest to power off."""
        await self._tell("shut the domain down", lambda: self._domain(uuid).shutdown())

    async def suspend(self, uuid: str) -> None:
        """Pause the domain."""
        await self._tell("pause the domain", lambda: self._domain(uuid).suspend())

    async def resume(self, uuid: str) -> None:
        """Resume a paused domain."""
        await self._tell("resume the domain", lambda: self._domain(uuid).resume())

    async def reset(self, uuid: str) -> None:
        """Reset the domain's machine; the guest boots."""
        await self._tell("reset the domain", lambda: self._domain(uuid).reset())

    async def destroy(self, uuid: str) -> None:
        """End it at once, like a power cut."""
        await self._tell("end the domain", lambda: self._domain(uuid).destroy())

    async def definition(self, uuid: str) -> str:
        """The XML with which it starts the next time, secrets included."""
        flags = Xml.SECURE | Xml.INACTIVE
        return await self._ask(
            "show the domain's definition", lambda: str(self._domain(uuid).XMLDesc(flags))
        )

    async def migratable(self, uuid: str) -> str:
        """The XML with which the running domain could be started again, secrets included."""
        flags = Xml.SECURE | Xml.MIGRATABLE
        return await self._ask(
            "describe the domain", lambda: str(self._domain(uuid).XMLDesc(flags))
        )

    async def command_line(self, xml: str) -> str:
        """The command line, as shells read it, of the QEMU that a domain would have.

        NICs on networks and bridges are taps in it. Raises LibvirtRefusedError.
        """
        return await self._ask(
            "show the command line of its QEMU",
            lambda: str(self._connection.domainXMLToNative("qemu-argv", xml, 0)),
            PROBE_TIMEOUT_S,
        )

    async def define(self, xml: str) -> None:
        """Define the domain, whether or not it runs."""
        await self._tell("keep the domain", lambda: self._connection.defineXML(xml))

    async def undefine(self, uuid: str, *, keeps_tpm: bool | None = None) -> None:
        """Undefine a stopped domain and forget its snapshots; its files stay.

        `keeps_tpm`: keep its TPM's state; None: libvirt's default, which removes it unless the
        domain says otherwise (libvirt < 8.9 has no flag for it).
        """
        flags = Undefine.SNAPSHOTS_METADATA | Undefine.KEEP_NVRAM
        if keeps_tpm is not None:
            flags |= Undefine.KEEP_TPM if keeps_tpm else Undefine.TPM
        await self._tell("forget the domain", lambda: self._domain(uuid).undefineFlags(flags))

    # -- the guest ---------------------------------------------------------------------------

    async def ask_agent(self, uuid: str, request: str, timeout_s: float) -> str:
        """What the agent in the guest answers; it has whole seconds to do so, one at least.

        Raises LibvirtRefusedError: the agent does not answer, or answers with an error.
        """

        def work() -> str:
            import libvirt_qemu

            ask = libvirt_qemu.qemuAgentCommand
            return str(ask(self._domain(uuid), request, max(1, math.ceil(timeout_s)), 0))

        return await self._ask("ask the guest's agent", work, timeout_s + ASK_TIMEOUT_S)

    # -- snapshots ---------------------------------------------------------------------------

    async def snapshots(self, uuid: str) -> list[DomainSnapshot]:
        """The domain's snapshots."""
        return await self._ask(
            "list the domain's snapshots",
            lambda: [
                DomainSnapshot(snapshot.getName(), snapshot.getXMLDesc())
                for snapshot in self._domain(uuid).listAllSnapshots(0)
            ],
        )

    async def save_snapshot(self, uuid: str, xml: str) -> DomainSnapshot:
        """Save memory, devices and disks; the guest is paused meanwhile."""

        def work() -> DomainSnapshot:
            made = self._domain(uuid).snapshotCreateXML(xml, 0)
            return DomainSnapshot(made.getName(), made.getXMLDesc())

        return await self._tell("save the snapshot", work)

    async def load_snapshot(self, uuid: str, name: str) -> None:
        """Revert the domain to a snapshot."""

        def work() -> None:
            domain = self._domain(uuid)
            domain.revertToSnapshot(domain.snapshotLookupByName(name))

        await self._tell("load the snapshot", work)

    async def delete_snapshot(self, uuid: str, name: str) -> None:
        """Delete a snapshot."""
        await self._tell(
            "delete the snapshot",
            lambda: self._domain(uuid).snapshotLookupByName(name).delete(0),
        )

    # -- saved memory ------------------------------------------------------------------------

    async def save(self, uuid: str, path: Path) -> None:
        """Save the domain's memory to a file of its host; it is off then."""
        await self._tell("save the domain", lambda: self._domain(uuid).save(str(path)))

    async def restore(self, path: Path) -> None:
        """Start a domain from the file of `save`, or another save image, which stays."""
        await self._tell("restore the domain", lambda: self._connection.restore(str(path)))

    # -- migrating ---------------------------------------------------------------------------

    async def migrate(
        self, uuid: str, to_libvirtd: str, parameters: Mapping[str, Any], flags: int
    ) -> None:
        """Migrate a running domain; its own libvirtd does the work. Returns at the end.

        Until then this session answers nothing else: use another one. After a cancellation the
        migration continues: have the other session `abort` it.
        """
        await self._tell(
            "migrate the domain",
            lambda: self._domain(uuid).migrateToURI3(to_libvirtd, dict(parameters), flags),
        )

    async def job(self, uuid: str) -> DomainJob:
        """The domain's present job; not active if there is none."""
        return await self._ask(
            "report its progress", lambda: parse_job(self._domain(uuid).jobStats())
        )

    async def abort(self, uuid: str) -> None:
        """Abort the domain's job."""
        await self._tell("abort the job", lambda: self._domain(uuid).abortJob(), ASK_TIMEOUT_S)

    async def start_postcopy(self, uuid: str) -> None:
        """Switch to post-copy: the guest runs on the destination at once, and its memory
        follows.
        """
        await self._tell(
            "switch to post-copy",
            lambda: self._domain(uuid).migrateStartPostCopy(0),
            ASK_TIMEOUT_S,
        )

    async def set_max_downtime(self, uuid: str, downtime_ms: int) -> None:
        """Set the maximum downtime of the running migration."""
        await self._tell(
            "set the downtime",
            lambda: self._domain(uuid).migrateSetMaxDowntime(downtime_ms, 0),
            ASK_TIMEOUT_S,
        )

    async def set_max_speed(self, uuid: str, mib_per_s: int) -> None:
        """Set the bandwidth limit of the running migration."""
        await self._tell(
            "set the bandwidth",
            lambda: self._domain(uuid).migrateSetMaxSpeed(mib_per_s, 0),
            ASK_TIMEOUT_S,
        )

    async def processor_s(self, uuid: str) -> float:
        """Processor time that the domain's QEMU has used."""
        return await self._ask(
            "report its processor time", lambda: float(self._domain(uuid).info()[4]) / 1e9
        )

    async def begin_dirty_rate(self, uuid: str, seconds: int) -> None:
        """Have QEMU sample changed pages for 1 to 60 s."""
        await self._tell(
            "measure the dirty rate",
            lambda: self._domain(uuid).startDirtyRateCalc(seconds, 0),
            ASK_TIMEOUT_S,
        )

    async def dirty_rate(self, uuid: str) -> float | None:
        """The measured dirty rate in bytes a second; None while it is measured."""

        def work() -> Mapping[str, Any]:
            listed = self._connection.domainListGetStats([self._domain(uuid)], Stats.DIRTYRATE)
            return dict(listed[0][1]) if listed else {}

        stats = await self._ask("report the dirty rate", work)
        if stats.get("dirtyrate.calc_status") != DirtyRateStatus.MEASURED:
            return None
        return float(stats["dirtyrate.megabytes_per_second"]) * MIB

    @asynccontextmanager
    async def ended_jobs(self, uuid: str) -> AsyncIterator[asyncio.Queue[DomainJob]]:
        """Receive the final figures of the domain's jobs during the block, once at each end."""
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[DomainJob] = asyncio.Queue()

        def on_stats(_connection: Any, _domain: Any, stats: Mapping[str, Any], _: None) -> None:
            with suppress(RuntimeError):  # the event loop has closed meanwhile
                loop.call_soon_threadsafe(queue.put_nowait, parse_job(stats))

        number = await self._ask(
            "report a job's end",
            lambda: self._connection.domainEventRegisterAny(
                self._domain(uuid), EventId.JOB_COMPLETED, on_stats, None
            ),
        )
        try:
            yield queue
        finally:
            with suppress(VmckptError):  # otherwise it ends with the session
                await self._ask(
                    "stop reporting jobs",
                    lambda: self._connection.domainEventDeregisterAny(number),
                    1.0,
                )


def _parts(version: int) -> tuple[int, int, int]:
    return version // 10**6, version // 1000 % 1000, version % 1000


def _seen(domain: Any) -> DomainInfo:
    state, reason = domain.state()
    return DomainInfo(
        domain.UUIDString(),
        domain.name(),
        DomainState(state),
        reason,
        bool(domain.isPersistent()),
        domain.XMLDesc(0),
    )
