"""The migration journal, written on both hosts before each step: enough to finish or undo it.

Recovery reads it after an interruption.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from vmckpt.devices.journey import BRING_BACK, STEPS_OUT
from vmckpt.errors import StorageError
from vmckpt.hosts.every import ask_every
from vmckpt.hosts.host import Host
from vmckpt.migrate.steps.disk_files import MovedDisk
from vmckpt.options.migration import Method
from vmckpt.state.documents import Schema, save_to
from vmckpt.state.durable import part_of
from vmckpt.vm.inventory import Vm
from vmckpt.vm.paths import vm_dir
from vmckpt.vm.record import Platform

if TYPE_CHECKING:
    from vmckpt.preflight.migration.checks import Preflight

# In order. Once one of AFTER_COMMIT has begun, the destination has run.
BEFORE_DEVICES = ("begin", "prepare", "agree", "turn", "mirror")
BEFORE_COMMIT = (*BEFORE_DEVICES, *STEPS_OUT, "transfer", "switchover")
AFTER_COMMIT = ("drain", "verify", BRING_BACK, "handover", "release")
STEPS = BEFORE_COMMIT + AFTER_COMMIT
# Ids of runs and QEMUs, which become file names.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class MigrationJournal:
    """One migration of one VM.

    What it creates is in the destination's `target_qemu` directory, except the copies of `disks`.
    `step` is the last one begun; `was_running`: the guest ran when it began. `offline`: the VM is
    off, and both QEMUs are ended when it is clear who has it. `stops`: the transfer stops the guest
    beforehand. `platform`: that of both QEMUs. `source` and `target` are the operator's names
    of these hosts; `source_id` and `target_id` identify them (hosts/inventory/identity.py; None: an
    older vmckpt wrote it).
    """

    run: str
    vm: str
    source: str
    target: str
    source_qemu: str
    target_qemu: str
    ram_dir: str
    was_running: bool
    step: str
    disks: tuple[MovedDisk, ...] = ()
    offline: bool = False
    stops: bool = False
    platform: Platform | None = None
    source_id: str | None = None
    target_id: str | None = None

    def __post_init__(self) -> None:
        if self.step not in STEPS:
            raise ValueError(f"'{self.step}' is not a step")
        for name in (self.run, self.source_qemu, self.target_qemu):
            if not _NAME.fullmatch(name):
                raise ValueError(f"'{name}' is not a name")

    @property
    def stopped(self) -> bool:
        """Whether vmckpt paused the guest for the migration."""
        return self.stops and self.step in ("transfer", "switchover")

    @property
    def past_commit(self) -> bool:
        """Whether the destination has run, whatever else is known about it."""
        return self.step in AFTER_COMMIT

    def is_same_run(self, other: Self) -> bool:
        """Whether both are of one run, between the same two QEMUs."""
        return self._run == other._run

    @property
    def _run(self) -> tuple[str, ...]:
        qemus = self.source_qemu, self.target_qemu
        return self.run, self.vm, self.source, self.target, *qemus

    async def write(self, hosts: Iterable[Host]) -> None:
        """Replace the journal on each host."""
        for host in hosts:
            await self.write_to(host, vm_dir(host.state_dir, self.vm).journal)

    async def write_to(self, host: Host, path: Path) -> None:
        """Write it to a file, atomically."""
        await host.make_dir(path.parent)
        await save_to(host, path, _SCHEMA, self)

    async def remove(self, hosts: Iterable[Host]) -> None:
        """Remove the journal from each host, with partial files of a killed command."""
        for host in hosts:
            journal = vm_dir(host.state_dir, self.vm).journal
            await host.remove(journal)
            await host.remove(part_of(journal))

    @staticmethod
    async def read(host: Host, vm: str) -> "MigrationJournal | None":
        """The journal on a host, None if there is none. Raises StorageError (damaged)."""
        return await MigrationJournal.read_from(host, vm_dir(host.state_dir, vm).journal)

    @staticmethod
    async def read_from(host: Host, path: Path) -> "MigrationJournal | None":
        """The journal in a file; raises as `read`."""
        text = await host.read_text(path)
        return None if text is None else MigrationJournal.parse(text, path, host.name)

    @staticmethod
    def parse(text: str, path: Path, host: str) -> "MigrationJournal":
        """Parse the file of that path on the host. Raises StorageError (damaged)."""
        found = _SCHEMA.decode(text, path, host)
        if path.parent.name != found.vm and not path.name.startswith(f"{found.vm}."):
            raise _SCHEMA.damaged(path, f"it is of '{found.vm}'", host)
        return found


_SCHEMA = Schema(
    MigrationJournal, "end the VM's QEMU on the host where it is not to run, and remove the file"
)


def first_journal(
    vm: Vm,
    destination: Host,
    checked: "Preflight",
    *,
    run: str,
    target_qemu: str,
    ids: tuple[str, str],
) -> MigrationJournal:
    """The journal of a new migration; `ids` identify the source and destination hosts."""
    options = checked.options
    return MigrationJournal(
        run=run,
        vm=vm.name,
        source=vm.host.name,
        target=destination.name,
        source_qemu=vm.qemu.files.qemu_id,
        target_qemu=target_qemu,
        ram_dir=str(vm.spec.ram_dir),
        was_running=True,
        step="begin",
        disks=tuple(
            MovedDisk(str(disk.source), str(disk.target), disk.keep) for disk in checked.copies
        ),
        offline=options.offline,
        stops=options.method is Method.STOP and not options.may_postcopy,
        platform=vm.qemu.platform,
        source_id=ids[0],
        target_id=ids[1],
    )


async def find_journal(vm: str, hosts: Iterable[Host]) -> MigrationJournal | None:
    """The journal of a migration of the VM; of two, the more advanced.

    Writing it on one host may have failed, or been interrupted after the other. Hosts that do not
    answer, or cannot read their disks, are left out: both ends of the migration have it. A journal
    that both ends have precedes one that a single end has, and that precedes a host's journal about
    others. Raises StorageError if one is damaged and none is intact.
    """
    damaged = list[StorageError]()

    async def read(host: Host) -> tuple[Host, MigrationJournal | None]:
        path = vm_dir(host.state_dir, vm).journal
        text = await host.read_text(path)
        try:
            return host, None if text is None else MigrationJournal.parse(text, path, host.name)
        except StorageError as exc:
            damaged.append(exc)
            raise

    answers = await ask_every(hosts, read)
    journals = [(host, journal) for host, journal in answers.given if journal]
    own = [one for host, one in journals if host.name in (one.source, one.target)]
    agreed = [one for one in own if sum(map(one.is_same_run, own)) > 1]
    found = newest(agreed or own or (one for _, one in journals))
    if found is None and damaged:
        raise damaged[0]
    return found


def newest(found: Iterable[MigrationJournal]) -> MigrationJournal | None:
    """The most advanced one."""
    return max(found, key=lambda journal: STEPS.index(journal.step), default=None)
