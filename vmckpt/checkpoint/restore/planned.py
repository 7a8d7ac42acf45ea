"""Plan a restore or fork: the VM's spec and files, and what forbids it."""

import secrets
import shutil
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from vmckpt.checkpoint.facts import CheckpointFacts
from vmckpt.checkpoint.origin import digest
from vmckpt.checkpoint.restore import adopted
from vmckpt.checkpoint.restore.foreign import confined, require_safe
from vmckpt.errors import RefusedError
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory.inventory import check_name
from vmckpt.hosts.processes.process import ProcessId
from vmckpt.hosts.sockets.unix_socket import followed
from vmckpt.preflight.checkpoint import NewImage, Wanted, restore_checks
from vmckpt.preflight.finding import Finding
from vmckpt.state.durable import make_dir_durably, sync_file
from vmckpt.store.files.manifest import Manifest
from vmckpt.vm.inventory import Vm, read_vm
from vmckpt.vm.paths import IMAGES, new_qemu_id, vm_dir
from vmckpt.vm.record import Platform, Qemu
from vmckpt.vm.spec.spec import Disk, Firmware, Spec, parse_spec
from vmckpt.vm.spec.spec_text import written


@dataclass(frozen=True, slots=True)
class NewDisk:
    """An image to create on the host, at `path`, from the checkpoint's disk `number`."""

    number: int
    path: Path


@dataclass(frozen=True, slots=True)
class PlannedRestore:
    """A VM to create; its QEMU is not started yet."""

    vm: Vm
    facts: CheckpointFacts
    disks: tuple[NewDisk, ...]
    # The UEFI variable store to copy, for a copy, so that the file exists. When the guest runs, the
    # firmware writes its own state, which has the variables, into it.
    variables: Path | None = None
    # Disks that must not exist yet, even in place.
    made_new: frozenset[Path] = frozenset()
    # Disks that the host's VM of this name writes now.
    current: frozenset[Path] = frozenset()

    @property
    def spec(self) -> Spec:
        """The VM's spec."""
        return self.vm.spec

    @property
    def own_variables(self) -> Path | None:
        """The path of a copy's variable store."""
        firmware = self.spec.firmware
        return firmware.vars if firmware is not None and self.variables is not None else None


class CheckpointStanding(NamedTuple):
    """How far this host trusts a checkpoint: see `checkpoint/origin.py` and `foreign.py`.

    `own` is the spec of the host's VM of the same name.
    """

    checkpoint: str
    is_foreign: bool
    is_trusted: bool
    own: Spec | None

    def admit(self, spec: Spec, *, plugged: bool) -> None:
        """Raises RefusedError if it is foreign, untrusted, and asks for more than a safe guest."""
        if self.is_foreign and not self.is_trusted:
            require_safe(spec, self.own, plugged=plugged)


async def standing_of(
    manifest: Manifest, host: Host, *, known: str, is_foreign: bool
) -> CheckpointStanding:
    """The checkpoint's standing; `known` is the digest of what the operator inspected.

    Raises RefusedError if it is a different checkpoint now.
    """
    if known and known != digest(manifest):
        raise RefusedError(
            f"checkpoint {manifest.id[:12]} has changed",
            why="its store now has a different one with that id",
            remedy="find out who writes to the store: vmckpt checkpoint show",
        )
    found = await read_vm(host, check_name(manifest.vm, "VM"))
    own = found.spec if found is not None else None
    return CheckpointStanding(manifest.id, is_foreign or not known, bool(known), own)


def plan_itself(
    facts: CheckpointFacts, host: Host, standing: CheckpointStanding, *, plugged: bool = True
) -> PlannedRestore:
    """The VM itself, with its name, disk paths and MACs, but a new generation ID.

    What was isolated stays isolated; unless `plugged`, all of it is.
    """
    base = vm_dir(host.state_dir, "-").path
    spec = parse_spec(facts.spec, "the checkpoint's spec", base)
    standing.admit(spec, plugged=plugged)
    before, made_new = spec, frozenset[Path]()
    if standing.is_foreign:
        spec = confined(spec, standing.own, standing.checkpoint)
        pairs = zip(before.disks, spec.disks, strict=True)
        made_new = frozenset(now.on(host.state_dir) for was, now in pairs if was.path != now.path)
    if not plugged:
        spec = _isolated(spec, isolated=True)
    spec = changed(before, adopted.with_new_images(_renewed(spec)))
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
    """A copy: with its own name, disks in the host's `images/`, MACs and generation ID.

    It has no network, now or later, unless `plugged`. With `overlays` its disks are qcow2, whatever
    format the checkpoint's had.
    """
    base = vm_dir(host.state_dir, "-").path
    spec = parse_spec(facts.spec, "the checkpoint's spec", base)
    standing.admit(spec, plugged=plugged)
    _require_copyable(spec, name, plugged=plugged)
    # A copy first has the original's address: at that address the original would answer.
    devices = tuple(device._replace(ssh=None) for device in spec.passthrough)
    nics = tuple(
        nic._replace(mac=facts.macs[number] if keep_macs and spec.adopted is None else None)
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
        autostart=False,
        passthrough=devices,
    )
    new = [
        NewDisk(number, disk.on(host.state_dir))
        for number, disk in enumerate(disks)
        if not disk.read_only
    ]
    copy = adopted.with_new_images(adopted.as_copy(copy, keep_macs=keep_macs))
    copy = changed(spec, _renewed(_isolated(copy, isolated=not plugged)))
    planned = _planned(copy, facts, host, new)
    return replace(planned, variables=spec.firmware.vars if spec.firmware else None)


def _require_copyable(spec: Spec, name: str, *, plugged: bool) -> None:
    """Raises RefusedError."""
    adopted.require_copyable(spec, name, plugged=plugged)
    if any(device.ssh for device in spec.passthrough) and not spec.guest_agent:
        raise RefusedError(
            f"the checkpoint cannot become '{name}'",
            why="its hooks are reached only over SSH, at the original VM's address",
            remedy="restore the VM itself, or give it the guest agent before a checkpoint is taken",
        )


def changed(before: Spec, spec: Spec) -> Spec:
    """The spec with a text of its own, unless it is as before."""
    return spec if spec == before else spec._replace(text=written(spec))


def _isolated(spec: Spec, *, isolated: bool) -> Spec:
    return spec._replace(nics=tuple(nic._replace(isolated=isolated) for nic in spec.nics))


def overcommitted(planned: PlannedRestore) -> PlannedRestore:
    """The same plan, to start however little memory is left."""
    vm = planned.vm
    spec = vm.spec._replace(overcommit=True)
    return replace(planned, vm=vm._replace(spec=spec._replace(text=written(spec))))


def _own(disk: Disk, name: str, number: int, facts: CheckpointFacts, kind: str) -> Disk:
    image = Path(IMAGES) / f"{name}-{number}.{kind}"
    return disk._replace(path=image, format=kind, size_bytes=facts.disks[number].size_bytes)


def _renewed(spec: Spec) -> Spec:
    """The spec with a new VM generation ID, if it has one: the guest sees that time went back."""
    devices = tuple(
        {**device, "guid": str(uuid.uuid4())} if device["driver"] == "vmgenid" else device
        for device in spec.devices
    )
    return adopted.with_new_generation(spec._replace(devices=devices))


def _planned(
    spec: Spec, facts: CheckpointFacts, host: Host, disks: Sequence[NewDisk]
) -> PlannedRestore:
    directory = vm_dir(host.state_dir, spec.name)
    platform = Platform(**facts.platform)
    qemu = Qemu(directory.qemu(new_qemu_id()), ProcessId(0, 0), platform)
    return PlannedRestore(Vm(spec, host, directory, qemu), facts, tuple(disks))


def copy_variables(planned: PlannedRestore, path: Path) -> None:
    """Make a copy's UEFI variable store at `path`. Blocking. Raises OSError."""
    if planned.variables is not None:
        make_dir_durably(path.parent)
        shutil.copyfile(planned.variables, path)
        sync_file(path)


def replaced_file(path: Path) -> Path:
    """The file at `path` that gets new content; a link to it stays.

    Raises RefusedError: another user has led there.
    """
    try:
        return followed(path)
    except FileNotFoundError:
        return path
    except OSError as exc:
        raise RefusedError(
            f"{path} cannot be replaced",
            why=exc.strerror or str(exc),
            remedy="put the image itself there; or make a copy: --as NAME",
        ) from exc


def replacement_path(path: Path) -> Path:
    """The path where new content for the file at `path` is prepared: no link."""
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
    """All findings for and against the restore; changes nothing. Raises HostDownError."""
    facts, images = planned.facts, images_of(planned, in_place=in_place)
    wanted = Wanted(planned.vm, images, planned.variables, facts.firmware, facts.taken_unix_s)
    return await restore_checks(wanted, in_place=in_place, lazy=lazy, plugged=plugged)


def cannot_become(name: str, host: Host) -> str:
    """The error text for a checkpoint that fails the checks."""
    return f"the checkpoint cannot become '{name}' on {host.name}"
