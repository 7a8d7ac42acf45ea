"""Which homes of a VM are stale, by the records of migrations.

Listing VMs needs this on every call, and its records almost never: they are imported on demand.
"""

from collections import Counter
from collections.abc import Iterable, Set
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from vmckpt.errors import StorageError
from vmckpt.hosts.every import ask_every
from vmckpt.hosts.host import Host
from vmckpt.vm.inventory import Vm, VmStatus
from vmckpt.vm.paths import left_vm

if TYPE_CHECKING:
    from vmckpt.migrate.outcome.journal import MigrationJournal


async def without_stale(looks: Iterable[VmStatus], hosts: Iterable[Host]) -> list[VmStatus]:
    """Remove stale homes from the queried VMs.

    A VM is at home on two hosts during a migration's handover, and when a dead host returns after
    another took the VM over. Records tell which home is stale: the migration's journal, on any of
    `hosts`, or the home itself (after a failover). Changes nothing; a home without such a record
    stays in the list.
    """
    looks = list(looks)
    counts = Counter(inspect.vm.name for inspect in looks)
    twice = [inspect.vm for inspect in looks if counts[inspect.vm.name] > 1]
    if not twice:
        return looks
    names, homes = {vm.name for vm in twice}, {_home_of(vm) for vm in twice}
    answers = await ask_every(hosts, lambda host: _stale_by(host, names, homes))
    stale = {home for found in answers.given for home in found}
    stale |= {_Home(vm.name, old.qemu_id) for vm in twice if (old := vm.qemu.replaces)}
    left = {home.vm for home in homes - stale}  # contradictory records hide none
    return [
        inspect
        for inspect in looks
        if _home_of(inspect.vm) not in stale or inspect.vm.name not in left
    ]


class _Home(NamedTuple):
    """Identified by its QEMU: another operator's record may use other host names."""

    vm: str
    qemu_id: str


def _home_of(vm: Vm) -> _Home:
    return _Home(vm.name, vm.qemu.files.qemu_id)


async def _stale_by(host: Host, names: Set[str], homes: Set[_Home]) -> set[_Home]:
    """The stale homes of these VMs, by the migrations that the host has on record."""
    from vmckpt.migrate.outcome.journal import MigrationJournal
    from vmckpt.migrate.outcome.machines import is_source

    stale = set[_Home]()
    directory = host.state_dir / "left"
    for file in await host.list_dir(directory):
        if left_vm(file) not in names:
            continue
        with suppress(StorageError):  # a damaged record is skipped
            if journal := await MigrationJournal.read_from(host, directory / file):
                source, destination = _ends_of(journal)
                stale.add(destination if await is_source(journal, host) else source)
    for name in names:
        if journal := await MigrationJournal.read(host, name):
            source, destination = _ends_of(journal)
            if destination in homes:  # the handover was past the commit
                stale.add(source)
    return stale


def _ends_of(journal: "MigrationJournal") -> tuple[_Home, _Home]:
    return (
        _Home(journal.vm, journal.source_qemu),
        _Home(journal.vm, journal.target_qemu),
    )
