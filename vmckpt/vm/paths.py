"""The paths of a VM's files on its host."""

import os
from pathlib import Path
from typing import NamedTuple

from vmckpt.errors import UsageError
from vmckpt.hosts.grants import OWN_DIRECTORY

QEMU_PREFIX = "qemu-"
# A new disk at PATH has a second name, PATH + this + the run's id, until it belongs to the VM.
PROOF_SUFFIX = ".vmckpt-"
IN_MEMORY = Path("/dev/shm")
MOST_NAME_BYTES = 200


class VmDir(NamedTuple):
    """state_dir/vms/NAME: exists as long as the VM is on this host."""

    path: Path

    @property
    def spec(self) -> Path:
        """The spec, TOML."""
        return self.path / "spec.toml"

    @property
    def current(self) -> Path:
        """Which QEMU runs the VM here (JSON); missing until a migration to here is complete."""
        return self.path / "vm.json"

    @property
    def domain(self) -> Path:
        """Which QEMU of a libvirt domain is replicated from here, or was taken over (JSON, as
        `current`); libvirt has the domain.
        """
        return self.path / "domain.json"

    @property
    def awaited_domain(self) -> Path:
        """Exists while a QEMU of a libvirt domain waits here for its takeover: what becomes
        `domain` then.
        """
        return self.path / ".domain.json.ready"

    @property
    def undefined(self) -> Path:
        """Exists as long as the replication of a libvirt domain may have its only definition."""
        return self.path / "undefined"

    @property
    def journal(self) -> Path:
        """The migration in progress or interrupted (JSON)."""
        return self.path / "migration.json"

    @property
    def identity(self) -> Path:
        """The VM's UUID; see vm/identity.py. It moves with the VM."""
        return self.path / "identity"

    @property
    def point(self) -> Path:
        """Which checkpoint it was last taken or restored as, and where it has others (JSON).

        It moves with the VM.
        """
        return self.path / "checkpoint"

    @property
    def restoring(self) -> Path:
        """The restore or fork in progress, or interrupted (JSON)."""
        return self.path / "restore.json"

    @property
    def saving(self) -> Path:
        """Exists while the guest is paused to be saved as a whole: recovery must resume it."""
        return self.path / "saving"

    @property
    def overlays(self) -> Path:
        """Overlays of shared disks during a replication; see `replicate/disks`."""
        return self.path / "aside"

    @property
    def overlays_request(self) -> Path:
        """Exists while there are overlays: their replication (JSON)."""
        return self.overlays / "request.json"

    @property
    def claim(self) -> Path:
        """Exists while a standby may have the right to run the guest (JSON): which term ran here,
        and which arbiter knows who may run it now; see `replicate/primary/claim.py`.
        """
        return self.path / "claim.json"

    @property
    def gone_replica(self) -> Path:
        """The arbiter's name of a replica that may take over according to it, but no longer
        exists. It moves with the VM.
        """
        return self.path / "gone-replica"

    @property
    def listed_replica(self) -> Path:
        """The arbiter's name of a replica that may take over according to it, for which a
        protection was refused: if the operator declares it gone, it becomes `gone_replica`.
        """
        return self.path / "listed-replica"

    @property
    def taken_over(self) -> Path:
        """The run of the replication by whose standby the VM came here, or will. It stays as long
        as the VM does.
        """
        return self.path / "taken-over"

    @property
    def away(self) -> Path:
        """Exists while its devices are unplugged for a checkpoint: the step that was begun."""
        return self.path / "devices-away"

    @property
    def about_it(self) -> tuple[Path, ...]:
        """What is true of this VM alone, not of another one of its name."""
        replicas = self.gone_replica, self.listed_replica, self.taken_over
        replicated = self.domain, self.undefined, self.claim, self.overlays, *replicas
        return self.current, self.identity, self.point, self.saving, self.away, *replicated

    def qemu(self, qemu_id: str) -> "QemuDir":
        """The files of one QEMU process."""
        return QemuDir(self.path / f"{QEMU_PREFIX}{qemu_id}", self.path.name, qemu_id)


def new_qemu_id() -> str:
    """A permanently unique name for one QEMU process: 8 hex digits."""
    return os.urandom(4).hex()


class QemuDir(NamedTuple):
    """vms/NAME/qemu-ID: the files of one QEMU process.

    A monitor serves one client at a time, so there are three: for the operation that holds the VM's
    lock, for observers, and for a rescue when the first is stuck. `is_loose`: it was started by a
    vmckpt that put files in memory directly into the RAM directory. `as_user`: the paths as a QEMU
    with its own user sees them; its own files are then in `own`, with links to them.
    """

    path: Path
    vm_name: str
    qemu_id: str
    is_loose: bool = False
    as_user: bool = False

    @property
    def state_dir(self) -> Path:
        """The state directory of its host."""
        return self.path.parents[2]

    @property
    def operator(self) -> Path:
        """QMP, for the operation that holds the VM's lock."""
        return self._socket("qmp.sock")

    @property
    def onlooker(self) -> Path:
        """QMP, for short questions."""
        return self._socket("watch.sock")

    @property
    def rescue(self) -> Path:
        """QMP, reserved for out-of-band commands."""
        return self._socket("rescue.sock")

    @property
    def pid(self) -> Path:
        """Written by QEMU."""
        return self.path / "pid"

    @property
    def stderr(self) -> Path:
        """QEMU's stderr; only here does a destination's QEMU give its reasons."""
        return self.path / "stderr.log"

    @property
    def console(self) -> Path:
        """The guest's first serial port, a stream socket."""
        return self._socket("console.sock")

    @property
    def console_log(self) -> Path:
        """All that the guest wrote to the console."""
        return self.path / "console.log"

    @property
    def agent(self) -> Path:
        """The QEMU guest agent's port, a stream socket."""
        return self._socket("agent.sock")

    @property
    def own(self) -> Path:
        """All that a QEMU with its own user may write here, besides files given to it."""
        return self.path / OWN_DIRECTORY

    @property
    def user(self) -> Path:
        """The QEMU's user (JSON), if it has its own; see vm/users/users.py."""
        return self.path / "user.json"

    @property
    def mark(self) -> str:
        """Two arguments that only this QEMU's command line has, in the format of /proc."""
        return f"-pidfile\0{self.pid}"

    @property
    def process(self) -> Path:
        """The process (JSON), of an adopted QEMU only."""
        return self.path / "process.json"

    @property
    def given(self) -> Path:
        """Which host functions its devices have (JSON); see vm/passthrough/cards.py."""
        return self.path / "devices.json"

    @property
    def missing(self) -> Path:
        """Exists while pages of its memory are being loaded from a checkpoint (JSON), and names the
        pager.
        """
        return self.path / "missing.json"

    @property
    def mirrors(self) -> Path:
        """The mirrors of its disks to the service that replicates it."""
        return self.path / "mirrors.sock"

    @property
    def key(self) -> Path:
        """The secret of the encrypted store from which pages are being loaded; in memory, like
        them.
        """
        return self._in(IN_MEMORY, "key")

    def saved_file(self, *, in_memory: bool) -> Path:
        """The file of a guest saved as a whole, on its way to or from a store."""
        if in_memory:
            return self._in(IN_MEMORY, "saved")
        return self.path / "saved-state"

    def old_blocks(self, number: int) -> Path:
        """The previous content of disk blocks, while the disk is put into a checkpoint."""
        return self.path / f"old-blocks-{number}"

    def ram(self, ram_dir: Path) -> Path:
        """The file that is the guest's RAM."""
        return self._in(ram_dir, "ram")

    def memory(self, ram_dir: Path) -> Path:
        """This QEMU's own directory (mode 0700) in `ram_dir`, which others may write to.

        Created by `Host.make_private_dir` before anything is put there.
        """
        return ram_dir / f"vmckpt-{self.vm_name}-{self.qemu_id}"

    @property
    def promised(self) -> Path:
        """The memory reserved for it; see hosts/processes/promises.py."""
        return self.memory(IN_MEMORY) / "promised"

    def _socket(self, name: str) -> Path:
        return self.own / name if self.as_user else self.path / name

    def _in(self, ram_dir: Path, kind: str) -> Path:
        if self.is_loose:
            return ram_dir / f"vmckpt-{self.vm_name}-{self.qemu_id}.{kind}"
        return self.memory(ram_dir) / kind

    def tap(self, number: int) -> str:
        """The name of NIC `number`'s tap (15 characters at most)."""
        return f"vk{self.qemu_id}{number}"


IMAGES = "images"


def vms_dir(state_dir: Path) -> Path:
    """The directory of a host's VMs."""
    return state_dir / "vms"


def vm_dir(state_dir: Path, name: str) -> VmDir:
    """The directory of one VM. Raises UsageError if the name leads elsewhere."""
    return VmDir(vms_dir(state_dir) / file_name(name, "VM"))


def images_dir(state_dir: Path) -> Path:
    """The directory of a host's own images."""
    return state_dir / IMAGES


def adoption_lock_path(state_dir: Path, pid: int) -> Path:
    """The lock of a process that is being adopted, under whatever name."""
    return state_dir / "adoptions" / str(pid)


def card_lock_path(state_dir: Path) -> Path:
    """The lock for assigning a host's cards to VMs."""
    return state_dir / "cards.lock"


def lock_path(state_dir: Path, name: str) -> Path:
    """The lock of one VM on a host. Raises UsageError if the name leads elsewhere."""
    return state_dir / "locks" / file_name(name, "VM")


def left_file(name: str, run: str) -> str:
    """The name of a run's record in `left/` about a VM."""
    return f"{name}.{run}.json"


def left_vm(file: str) -> str:
    """The VM that a file in `left/` is about. A VM's name may have dots, a run's id has none."""
    return file.removesuffix(".json").rpartition(".")[0]


def file_name(name: str, what: str) -> str:
    """Validate `name` as the name of a file in a directory of vmckpt's.

    Raises UsageError if it would lead out of that directory, or is not a valid file name.
    """
    if name in (".", "..") or "/" in name or "\0" in name or not _fits(name):
        raise UsageError(
            f"'{name[:80]}' is not a name for a {what}",
            why=f"it is empty, a path, or longer than {MOST_NAME_BYTES} bytes",
            remedy=f"write the name of the {what} alone",
        )
    return name


def _fits(name: str) -> bool:
    try:
        return 0 < len(os.fsencode(name)) <= MOST_NAME_BYTES
    except UnicodeEncodeError:
        return False
