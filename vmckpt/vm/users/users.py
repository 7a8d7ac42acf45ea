"""Run each VM's QEMU as its own user, on hosts with uids for VMs (`HostEntry.vm_uids`).

The uid follows from the VM's identity, so it is the same on all hosts with the same range: hosts
that share an image agree on its owner. The VM's own group has the same number. The first and the
last number of the range are groups of all VMs of the host: for files that they all read, and for
the host's devices. QEMU is started as the user, with no capability. Its records belong to root;
what QEMU writes (images, RAM, sockets) belongs to the user. Those files stay the user's after it
has ended, mode 0600, and root handles them as before.
"""

import hashlib
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Self, TypedDict

from vmckpt.errors import OperationFailedError, RefusedError
from vmckpt.hosts.grants import Grant, GrantKind, grant
from vmckpt.hosts.host import Host
from vmckpt.hosts.processes.other_user import become
from vmckpt.hosts.uids import Uids, make_uids
from vmckpt.state.documents import Schema
from vmckpt.units import whole_number
from vmckpt.vm.disks.backing import backing_of, names_layered
from vmckpt.vm.identity import identity_of, read_identity
from vmckpt.vm.paths import QemuDir, VmDir, images_dir, vm_dir, vms_dir
from vmckpt.vm.spec.spec import Spec

KVM, TUN, USERFAULTFD = Path("/dev/kvm"), Path("/dev/net/tun"), Path("/dev/userfaultfd")
_MOST_UID = (1 << 32) - 2
# Drivers that need root for a host's devices, or access more than a file.
_HOST_DRIVERS = ("vfio-", "usb-host", "vhost-", "pvrdma")


class VmUser(NamedTuple):
    """The user of a QEMU: user and group have one number. `taps` were created for it."""

    uid: int
    uids: Uids
    groups: tuple[int, ...] = ()
    taps: tuple[str, ...] = ()

    @property
    def shared_group(self) -> int:
        """The group of all VMs of the host, for files."""
        return self.uids.first

    @property
    def device_group(self) -> int:
        """The same for devices; it gives a VM of another range, which joins it, nothing else."""
        return self.uids.last

    def command(self, argv: Iterable[str]) -> list[str]:
        """The command by which root permanently becomes the user and runs `argv`, with the same
        pid.
        """
        return become(self.uid, (self.shared_group, self.device_group, *self.groups), argv)

    def to_json(self) -> str:
        """The content of user.json."""
        return _SCHEMA.encode({"uid": self.uid, "uids": self.uids, "taps": self.taps})

    @classmethod
    def from_json(cls, text: str, path: Path) -> Self:
        """The inverse of `to_json`, without the groups. Raises StorageError on a damaged file."""
        found = _SCHEMA.decode(text, path)
        try:
            return cls(found["uid"], make_uids(*found["uids"]), taps=found["taps"])
        except ValueError as exc:
            raise _SCHEMA.damaged(path, str(exc)) from exc


class _UserRecord(TypedDict):
    """user.json."""

    uid: int
    uids: Uids
    taps: tuple[str, ...]


_SCHEMA = Schema(_UserRecord, "end the VM's QEMU by hand, and start the VM again")


def uid_of(identity: str, uids: Uids) -> int:
    """The VM's uid, the same on all hosts with the same range. Pure."""
    number = int.from_bytes(hashlib.sha256(identity.encode()).digest()[:8])
    return uids.first + 1 + number % (uids.last - uids.first - 1)


async def set_up(host: Host, spec: Spec, files: QemuDir, *, has_kvm: bool) -> VmUser | None:
    """Prepare the user and files of a QEMU that is about to start; None: it runs as vmckpt's user.

    The directories exist. The caller holds the VM's lock, and its identity is recorded. Raises
    RefusedError, StorageError, OperationFailedError; `take_back` undoes any part of it.
    """
    if (uids := host.vm_uids) is None:
        return None
    directory = VmDir(files.path.parent)
    if why := unfit(spec):
        raise RefusedError(
            f"'{spec.name}' cannot run as a user of its own on {host.name}",
            why=why,
            remedy="run it on a host without --vm-uids",
        )
    uid = uid_of(await identity_of(host, directory), uids)
    if other := await _same_uid(host, directory, uid, uids):
        raise RefusedError(
            f"'{spec.name}' would be the same user as '{other}' on {host.name}",
            why=f"by their identities both are uid {uid} of {uids}",
            remedy="give the hosts that share their images a larger range: vmckpt host set "
            f"{host.name} --vm-uids FIRST-LAST",
        )
    user = VmUser(uid, uids, taps=tuple(_taps(spec, files)))
    # First: recovery removes the taps by this record.
    await host.write_text(files.user, user.to_json())
    grants = [*await _directory_grants(host, files, user), *_files(spec, files, user)]
    grants += [one async for one in _images(host, spec, user)]
    grants += [
        Grant(GrantKind.DEVICE, path, user.device_group)
        for path in (USERFAULTFD, *([TUN] if user.taps else []), *([KVM] if has_kvm else []))
    ]
    groups = await host.grant(grants, uids)
    await _make_taps(host, user)
    return user._replace(groups=tuple(groups))


def unfit(spec: Spec) -> str:
    """Why a VM cannot run as its own user; "": it can. Pure."""
    if spec.adopted is not None:
        return "it was adopted: what its command line opens is not known"
    if any(device.match for device in spec.passthrough):
        return "it has a device of the host's (VFIO), which is root's"
    for device in spec.devices:
        if str(device["driver"]).startswith(_HOST_DRIVERS):
            return f"its device {device['driver']} is the host's"
    return ""


async def _same_uid(host: Host, directory: VmDir, uid: int, uids: Uids) -> str | None:
    """Another VM of the host that would have the same uid."""
    for name in await host.list_dir(vms_dir(host.state_dir)):
        if name != directory.path.name:
            theirs = await read_identity(host, vm_dir(host.state_dir, name))
            if theirs is not None and uid_of(theirs, uids) == uid:
                return name
    return None


async def _directory_grants(host: Host, files: QemuDir, user: VmUser) -> list[Grant]:
    """Grant the path to its own files, and no more."""
    # Directories of all VMs: it may not list them.
    directories = [host.state_dir, vms_dir(host.state_dir)]
    if await host.exists(images := images_dir(host.state_dir)):
        directories.append(images)
    return [
        *(Grant(GrantKind.ENTRANCE, path, user.shared_group) for path in directories),
        Grant(GrantKind.ENTRANCE, files.path.parent, user.uid),
        Grant(GrantKind.ENTRANCE, files.path, user.uid),
        Grant(GrantKind.DIRECTORY, files.own, user.uid),
    ]


def _files(spec: Spec, files: QemuDir, user: VmUser) -> list[Grant]:
    """The files that it creates, and the location of its memory."""
    made = (files.pid, files.console_log)
    sockets = [files.operator, files.onlooker, files.rescue, files.console]
    sockets += [files.agent] if spec.guest_agent else []
    memory = dict.fromkeys((files.memory(spec.ram_dir), files.promised.parent))
    return [
        *(Grant(GrantKind.MADE, path, user.uid) for path in made),
        *(Grant(GrantKind.LINK, path, user.uid) for path in sockets),
        *(Grant(GrantKind.ENTRANCE, path, user.uid) for path in memory),
    ]


async def below(host: Host, image: Path) -> AsyncIterator[Path]:
    """The backing files of a qcow2 image, as far as only root can have set them.

    A relative name is relative to the name of the image above, as QEMU has it, also of a link.
    Links at their ends are not followed: another user may have put one there.
    A guest that has broken out of QEMU can write anything into its own image, and any guest can
    into a raw one: it would get access to every file named there.
    """
    real = await host.resolve(image)
    is_layered, seen = True, {real}
    while is_layered and await owner_of(host, real) == 0:
        if not (name := await backing_of(host, real)):
            return
        is_layered = await names_layered(host, real)
        image = image.parent / name.removeprefix("file:")
        real = await host.resolve(image)
        if real in seen or not await host.exists(real):
            return  # QEMU reports it
        seen.add(real)
        yield image


async def owner_of(host: Host, path: Path) -> int | None:
    """The uid of a file's owner, links followed; None: there is no file, or none that is known."""
    done = await host.run(["stat", "-L", "-c", "%u", "--", str(path)])
    return None if done.returncode else whole_number(done.stdout.strip(), _MOST_UID)


def _taps(spec: Spec, files: QemuDir) -> Iterator[str]:
    for number, nic in enumerate(spec.nics):
        if nic.network == "bridge":
            yield files.tap(number)
    for number, device in enumerate(spec.passthrough, len(spec.nics)):
        if device.netdev:
            yield files.tap(number)


async def _make_taps(host: Host, user: VmUser) -> None:
    for name in user.taps:
        # QEMU attaches to an existing tap if that belongs to its user.
        add = ["ip", "tuntap", "add", "dev", name, "mode", "tap", "user", str(user.uid)]
        done = await host.run(add)
        if done.returncode:
            raise OperationFailedError(
                f"cannot make {name} on {host.name}",
                why=done.stderr.strip() or f"ip exited with {done.returncode}",
                remedy="run vmckpt as root there, with access to /dev/net/tun",
            )


async def take_back(host: Host, files: QemuDir) -> None:
    """Undo what outlasts a QEMU of `set_up`, except files' owners: its taps.

    They go with QEMU unless its start was interrupted.
    """
    user = await user_of(host, files)
    for name in user.taps if user else ():
        await host.run(["ip", "link", "delete", "dev", name])


async def user_of(host: Host, files: QemuDir) -> VmUser | None:
    """A QEMU's own user; None: vmckpt's user. Raises StorageError on a damaged file."""
    text = await host.read_text(files.user)
    return VmUser.from_json(text, files.user) if text is not None else None


async def let_write(host: Host, files: QemuDir, *paths: Path) -> None:
    """Give a QEMU with its own user write access to these files, exclusively except for root."""
    if user := await user_of(host, files):
        await host.grant([Grant(GrantKind.OWN, path, user.uid) for path in paths], user.uids)


async def let_read(host: Host, files: QemuDir, directory: Path, names: Iterable[str]) -> None:
    """Give a QEMU read access to these files, through their directory, and to no others."""
    if user := await user_of(host, files):
        directories = [Grant(GrantKind.ENTRANCE, directory, user.uid)]
        reads = [Grant(GrantKind.READ, directory / name, user.uid) for name in names]
        await host.grant([*directories, *reads], user.uids)


def grant_write(files: QemuDir, path: Path) -> None:
    """As `let_write`, synchronously on this machine. Raises OSError, StorageError."""
    try:
        text = files.user.read_text()
    except FileNotFoundError:
        return
    user = VmUser.from_json(text, files.user)
    grant([Grant(GrantKind.OWN, path, user.uid)], user.uids)


def made_by(files: QemuDir, name: str) -> Path:
    """The path at which a QEMU of this machine can create a socket of that name."""
    return (files.own if files.own.is_dir() else files.path) / name


async def _images(host: Host, spec: Spec, user: VmUser) -> AsyncIterator[Grant]:
    variables = spec.firmware.vars if spec.firmware else None
    wanted = [(disk.on(host.state_dir), not disk.read_only) for disk in spec.disks]
    wanted += [(path, path == variables) for path in spec.files]
    layered = {disk.on(host.state_dir) for disk in spec.disks if disk.format == "qcow2"}
    for path, is_writable in wanted:
        if await host.exists(path):  # otherwise QEMU reports it
            # By their names, not where these lead: `grant` knows whose links it may follow.
            yield _image(path, user, writable=is_writable)
            # Found before it is the VM's: what that writes into it is not trusted. A raw image is
            # written entirely by its guest, so it is untrusted.
            if path in layered:
                async for base in below(host, path):
                    yield _image(base, user, writable=False)


def _image(path: Path, user: VmUser, *, writable: bool) -> Grant:
    if writable:
        return Grant(GrantKind.OWN, path, user.uid)
    return Grant(GrantKind.READ, path, user.shared_group)
