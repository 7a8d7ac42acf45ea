"""What a restore or a fork makes of a checkpoint: a VM's spec and files, and who refuses it."""

import secrets
import shutil
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from vmckpt.checkpoint.facts import CheckpointFacts
from vmckpt.checkpoint.origin import digest
from vmckpt.checkpoint.restore.foreign import confined, require_safe
from vmckpt.errors import RefusedError
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory.inventory import check_name
from vmckpt.hosts.processes.process import ProcessId
from vmckpt.preflight.checkpoint import NewImage, Wanted, restore_checks
from vmckpt.preflight.finding import Finding
from vmckpt.state.durable import make_dir_durably, sync_file
from vmckpt.store.files.manifest import Manifest
from vmckpt.vm.argv import Platform
from vmckpt.vm.inventory import Vm, read_vm
from vmckpt.vm.paths import IMAGES, vm_dir
from vmckpt.vm.spec.spec import Disk, Firmware, Spec, parse_spec
from vmckpt.vm.spec.spec_text import written
from vmckpt.vm.start import Qemu, new_qemu_id


@dataclass(frozen=True, slots=True)
class NewDisk:
    """An image to be made: of the checkpoint's disk `number`, for `path`; on the host."""

    number: int
    path: Path


@dataclass(frozen=True, slots=True)
class PlannedRestore:
    """A VM that is to be there; its QEMU is not started yet."""

    vm: Vm
    facts: CheckpointFacts
    disks: tuple[NewDisk, ...]
    # Of a copy with UEFI: the variable store to copy, so that there is one. The firmware's own
    # state, which has the variables, is written into it when the guest runs.
    variables: Path | None = None
    # Disks that there must not be yet, in place either.
    made_new: frozenset[Path] = frozenset()
    # Disks that the VM of this name on the host writes now.
    current: frozenset[Path] = frozenset()

    @property
    def spec(self) -> Spec:
        """What it is."""
        return self.vm.spec

    @property
    def own_variables(self) -> Path | None:
        """Where a copy's variable store will stand."""
        firmware = self.spec.firmware
        return firmware.vars if firmware is not None and self.variables is not None else None


class CheckpointStanding(NamedTuple):
    """How far a checkpoint counts here: see `checkpoint/origin.py` and `foreign.py`.

    `own` is the spec of the VM that has its VM's name on the host.
    """

    checkpoint: str
    is_foreign: bool
    is_trusted: bool
    own: Spec | None

    def admit(self, spec: Spec, *, plugged: bool) -> None:
        """Raises RefusedError if it is foreign, not trusted, and asks for more than a guest."""
        if self.is_foreign and not self.is_trusted:
            require_safe(spec, self.own, plugged=plugged)


async def standing_of(
    manifest: Manifest, host: Host, *, known: str, is_foreign: bool
) -> CheckpointStanding:
    """`known` is the digest of what the operator looked at.

    Raises RefusedError: it is another checkpoint now.
    """
    if known and known != digest(manifest):
        raise RefusedError(
            f"checkpoint {manifest.id[:12]} is not what it was a moment ago",
            why="its store has another one of that id now",
            remedy="find out who writes to the store: vmckpt checkpoint show",
        )
    found = await read_vm(host, check_name(manifest.vm, "VM"))
    own = found.spec if found is not None else None
    return CheckpointStanding(manifest.id, is_foreign or not known, bool(known), own)


def plan_itself(
    facts: CheckpointFacts, host: Host, standing: CheckpointStanding, *, plugged: bool = True
) -> PlannedRestore:
    """The VM itself, as it was: its name, its disks' paths, its MACs. Its generation is another.

    What was isolated stays so; all of it is, unless it is `plugged`.
    """
    base = vm_dir(host.state_dir, "-").path
    spec = parse_spec(facts.spec, "the checkpoint's spec", base)
    standing.admit(spec, plugged=plugged)
    made_new: frozenset[Path] = frozenset()
    if standing.is_foreign:
        before, spec = spec, confined(spec, standing.own, standing.checkpoint)
        pairs = zip(before.disks, spec.disks, strict=True)
        made_new = frozenset(now.on(host.state_dir) for was, now in pairs if was.path != now.path)
    if not plugged:
        spec = _isolated(spec, isolated=True)
    if not plugged or made_new or any(device["driver"] == "vmgenid" for device in spec.devices):
        spec = _renewed(spec)
    disks = [
        NewDisk(number, disk.on(host.state_dir))
        for number, disk in enumerate(spec.disks)
        if not disk.read_only
    ]
    own = standing.own.disks if standing.own is not None else ()
    current = frozenset(disk.on(host.state_dir) for disk in own if not disk.read_only)
    return replace(_planned(spec, facts, host, disks), made_new=made_new, current=current)


def plan_copy(
    facts: CheckpointFacts,
    host: Host,
    name: str,
    standing: CheckpointStanding,
    *,
    keep_macs: bool,
    plugged: bool = False,
    overlays: bool = False,
) -> PlannedRestore:
    """Another VM: its own name, disks in the host's `images/`, MACs and generation.

    It has no network, now or later, unless it is `plugged`. With `overlays` its disks are qcow2,
    whatever the checkpoint's were.
    """
    base = vm_dir(host.state_dir, "-").path
    spec = parse_spec(facts.spec, "the checkpoint's spec", base)
    standing.admit(spec, plugged=plugged)
    if spec.adopted is not None:
        raise RefusedError(
            f"the checkpoint cannot become '{name}'",
            why="its VM was adopted: its name, MACs and disks stand in a command line of others'",
            remedy="restore the VM itself: --in-place, or where there is none of its name",
        )
    if any(device.ssh for device in spec.passthrough) and not spec.guest_agent:
        raise RefusedError(
            f"the checkpoint cannot become '{name}'",
            why="its hooks are reached by SSH alone, where the VM itself answers",
            remedy="restore the VM itself, or give it the guest agent before a checkpoint is taken",
        )
    # A copy begins with the original's address: there the original would answer.
    devices = tuple(device._replace(ssh=None) for device in spec.passthrough)
    nics = tuple(
        nic._replace(mac=facts.macs[number] if keep_macs else None)
        for number, nic in enumerate(spec.nics)
    )
    disks = tuple(
        disk
        if disk.read_only
        else _own(disk, name, number, facts, "qcow2" if overlays else disk.format)
        for number, disk in enumerate(spec.disks)
    )
    firmware = spec.firmware
    if firmware:
        firmware = Firmware(firmware.code, host.state_dir / IMAGES / f"{name}-vars.fd")
    copy = spec._replace(
        name=name,
        nics=nics,
        disks=disks,
        firmware=firmware,
        heartbeat_id=None,
        passthrough=devices,
    )
    new = [
        NewDisk(number, disk.on(host.state_dir))
        for number, disk in enumerate(disks)
        if not disk.read_only
    ]
    copy = _isolated(copy, isolated=not plugged)
    planned = _planned(_renewed(copy), facts, host, new)
    return replace(planned, variables=spec.firmware.vars if spec.firmware else None)


def _isolated(spec: Spec, *, isolated: bool) -> Spec:
    return spec._replace(nics=tuple(nic._replace(isolated=isolated) for nic in spec.nics))


def overcommitted(planned: PlannedRestore) -> PlannedRestore:
    """The same, started however much memory is left for it."""
    vm = planned.vm
    spec = vm.spec._replace(overcommit=True)
    return replace(planned, vm=vm._replace(spec=spec._replace(text=written(spec))))


def _own(disk: Disk, name: str, number: int, facts: CheckpointFacts, kind: str) -> Disk:
    image = Path(IMAGES) / f"{name}-{number}.{kind}"
    return disk._replace(path=image, format=kind, size_bytes=facts.disks[number].size_bytes)


def _renewed(spec: Spec) -> Spec:
    """With another VM generation ID, by which a guest knows that time was turned back."""
    devices = tuple(
        {**device, "guid": str(uuid.uuid4())} if device["driver"] == "vmgenid" else device
        for device in spec.devices
    )
    spec = spec._replace(devices=devices)
    return spec._replace(text=written(spec))


def _planned(
    spec: Spec, facts: CheckpointFacts, host: Host, disks: Sequence[NewDisk]
) -> PlannedRestore:
    directory = vm_dir(host.state_dir, spec.name)
    platform = Platform(**facts.platform)
    qemu = Qemu(directory.qemu(new_qemu_id()), ProcessId(0, 0), platform)
    return PlannedRestore(Vm(spec, host, directory, qemu), facts, tuple(disks))


def copy_variables(planned: PlannedRestore) -> None:
    """Make a copy's UEFI variable store, if it has one. Blocking. Raises OSError."""
    own = planned.own_variables
    if planned.variables is not None and own is not None:
        make_dir_durably(own.parent)
        shutil.copyfile(planned.variables, own)
        sync_file(own)


def aside_path(path: Path) -> Path:
    """Where a disk's content is made ready that takes the place of the one at `path`."""
    return path.with_name(f"{path.name}.vmckpt-{secrets.token_hex(4)}")


def images_of(planned: PlannedRestore, *, in_place: bool) -> tuple[NewImage, ...]:
    """The images that a restore writes, for its checks."""
    return tuple(
        NewImage(
            disk.path,
            planned.facts.disks[disk.number].size_bytes,
            not in_place or disk.path in planned.made_new,
            in_place and disk.path in planned.current,
        )
        for disk in planned.disks
    )


async def checks(
    planned: PlannedRestore, *, in_place: bool, lazy: bool, plugged: bool
) -> list[Finding]:
    """All that is for and against making it; changes nothing. Raises HostDownError."""
    wanted = Wanted(
        planned.vm, images_of(planned, in_place=in_place), planned.variables, planned.facts.firmware
    )
    return await restore_checks(wanted, in_place=in_place, lazy=lazy, plugged=plugged)


def cannot_become(name: str, host: Host) -> str:
    """What an error says of a checkpoint that checks are against."""
    return f"the checkpoint cannot become '{name}' on {host.name}"
