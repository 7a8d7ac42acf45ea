"""A VM, for commands, fleet jobs and programs, independent of what runs its QEMU."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from vmckpt.hosts.host import Host

if TYPE_CHECKING:
    from pathlib import Path

    from vmckpt.checkpoint.jobs import Take
    from vmckpt.checkpoint.operate import StoreJob
    from vmckpt.checkpoint.requests import TakenCheckpoint, TakeOptions
    from vmckpt.events.types import Emit
    from vmckpt.forecast.measure.dirty_rate import DirtyRate
    from vmckpt.forecast.model.choose import Intent
    from vmckpt.forecast.planner import MigrationPlan
    from vmckpt.migrate.outcome.recover import Recovery
    from vmckpt.migrate.report import MigrationReport
    from vmckpt.options.migration import MigrationOptions
    from vmckpt.options.replication import ReplicationOptions
    from vmckpt.preflight.finding import Examined
    from vmckpt.qemu.agent import GuestAgent
    from vmckpt.replicate.status import ReplicationOutcome
    from vmckpt.store.sealing.keys import KeySource
    from vmckpt.vm.inventory import Vm
    from vmckpt.vm.spec.spec import Placement

# States of a VM that uses no memory; the last two are libvirt's.
_OFF = ("stopped", "crashed", "nostate")


class VmInfo(NamedTuple):
    """A VM at one moment. `state`: QEMU's run state or libvirt's term; "stopped", "unreachable".

    `driver`: qemu or libvirt. `ended`: how its QEMU ended, if not on request. `cannot`: the
    operations that its QEMU rules out. `operation`: the one that holds it now. None: the driver
    does not know.
    """

    name: str
    host: str
    driver: str
    state: str
    ended: str | None
    adopted: bool
    started_by: str
    cannot: tuple[str, ...]
    operation: str | None
    migration_cut_off: bool
    guest_agent: bool
    vcpus: int
    memory_bytes: int
    machine: str
    accel: str
    cpu: str
    placement: "Placement"
    pid: int | None = None
    disks: tuple[str, ...] = ()
    console_log: str | None = None
    qmp_socket: str | None = None
    uuid: str | None = None
    persistent: bool | None = None
    autostart: bool | None = None

    @property
    def is_on(self) -> bool:
        """Whether it uses memory on its host."""
        return self.state not in _OFF

    def to_json(self) -> dict[str, Any]:
        """For programs; without the fields that only the other driver fills."""
        lists = {"cannot": list(self.cannot), "disks": list(self.disks)}
        facts = self._asdict() | lists | {"placement": self.placement._asdict()}
        of_one_driver = ("uuid", "persistent", "autostart")
        return {k: v for k, v in facts.items() if v is not None or k not in of_one_driver}


class Started(NamedTuple):
    """A VM that was started, and how. `pid` is None if libvirt manages its process."""

    pid: int | None
    accel: str
    machine: str
    cpu: str


class RemovedVm(NamedTuple):
    """A forgotten VM: its images, which remain, and the QEMU that continues without vmckpt.

    `tpm`: the path of its TPM's state, which remains. `kept`: why images remain that were to be
    removed.
    """

    disks: list[str]
    goes_on_as_pid: int | None = None
    tpm: str | None = None
    removed_disks: Sequence[str] = ()
    kept: Mapping[str, str] = MappingProxyType({})


class VmSnapshot(NamedTuple):
    """A snapshot in an image. `state_bytes` and `guest_clock_s`: None if not known.

    `facts`: all details from its driver, for programs.
    """

    name: str
    taken_unix_s: int
    state_bytes: int | None
    guest_clock_s: float | None
    facts: dict[str, Any]


class Driver(Protocol):
    """One VM. Errors are VmckptErrors."""

    @property
    def name(self) -> str:
        """The VM's name."""

    @property
    def host(self) -> Host:
        """The host that it is on."""

    async def inspect(self) -> VmInfo:
        """Its current state."""

    async def console(self) -> "Path":
        """The socket of its serial console, on its host. Raises RefusedError: it has none."""

    def agent(self) -> "AbstractAsyncContextManager[GuestAgent]":
        """A session with the agent in its guest, for a block. Raises AgentSilentError."""

    async def start(self) -> Started:
        """Start it on its host."""

    async def pause(self) -> None:
        """Pause its guest; one that is paused is left alone. Raises RefusedError if it is off."""

    async def resume(self) -> None:
        """Resume its guest; one that runs is left alone. Raises RefusedError if it is off."""

    async def reboot(self, *, force: bool, timeout_s: float) -> None:
        """Power it off by its button and start it again; with `force` reset it at once."""

    async def stop(self, *, force: bool, timeout_s: float) -> None:
        """Press its power button and wait until it is off; with `force` end it at once."""

    async def remove(self, *, with_state: bool = False) -> RemovedVm:
        """Forget it; return what remains. `with_state` does not cover its TPM's state."""

    def own_images(self) -> "list[Path]":
        """The paths of the images that it writes, and that remain when it is removed."""

    async def examine(self, destination: Host, options: "MigrationOptions") -> "Examined":
        """Check whether it can be migrated, and what would be copied; changes nothing."""

    async def plan(
        self,
        destination: Host,
        options: "MigrationOptions",
        intent: "Intent",
        *,
        began_s: float,
        for_s: float | None = None,
    ) -> "MigrationPlan":
        """Every migration method, and the one that meets the intent; see `forecast.planner`."""

    async def migrate(
        self,
        destination: Host,
        options: "MigrationOptions",
        emit: "Emit",
        forecast: Mapping[str, Any] | None = None,
    ) -> "MigrationReport | Recovery":
        """Migrate it live; returns a Recovery if a recovery had to end the migration."""

    async def measure(self, for_s: float) -> "DirtyRate":
        """How fast it dirties its memory, measured for that long."""

    async def checkpoint(
        self,
        store: str | None,
        options: "TakeOptions",
        tell: Callable[[str], None],
        key: "KeySource | None",
    ) -> "TakenCheckpoint":
        """Take a checkpoint while it runs, into that store or its host's own."""

    async def taking(
        self, store: str | None, options: "TakeOptions", key: "KeySource | None"
    ) -> "StoreJob[Take, TakenCheckpoint]":
        """The job that takes a checkpoint, for a group."""

    async def replicate(
        self, standby: Host, options: "ReplicationOptions", run: str
    ) -> "ReplicationOutcome":
        """Have `standby` protect it; returns once it does."""

    async def home(self) -> "Vm":
        """Its record on its host, which says what it was taken over from. Raises NotFoundError:
        there is none of a domain that is not replicated, and was not taken over.
        """

    def group_notes(self) -> list[str]:
        """What to know of it before it takes part in a group, in words."""

    async def require_replaceable(self, what: str) -> None:
        """Return if a restore may put a checkpoint of it in its place, with nothing lost.

        Raises RefusedError with `what`.
        """

    async def restore_is_cut_off(self) -> bool:
        """Whether a restore or a checkpoint of it was interrupted, and is not settled yet."""

    async def save(self, name: str, emit: "Emit") -> VmSnapshot:
        """Take a snapshot."""

    async def load(self, name: str, emit: "Emit") -> VmSnapshot:
        """Return to a snapshot."""

    async def snapshots(self) -> list[VmSnapshot]:
        """Its snapshots, oldest first."""

    async def delete(self, name: str, emit: "Emit") -> None:
        """Delete a snapshot."""


async def remove_with_disks(vm: Driver) -> RemovedVm:
    """Forget a VM and remove the images that it writes, unless something else uses them."""
    from vmckpt.vm.disks.images import remove_own

    own = vm.own_images()
    gone = await vm.remove(with_state=True)
    if gone.goes_on_as_pid is not None:
        return gone
    removed, kept = await remove_own(vm.host, own)
    disks = [path for path in gone.disks if path not in removed]
    return gone._replace(disks=disks, removed_disks=removed, kept=kept)


async def examined(vm: Driver, destination: Host, options: "MigrationOptions") -> "Examined":
    """As `vm.examine`; an error counts as a refusal, so that other hosts are asked too."""
    from vmckpt.errors import HostDownError, VmckptError
    from vmckpt.preflight.finding import REFUSE, Examined, Finding

    try:
        return await vm.examine(destination, options)
    except VmckptError as exc:
        code = "reachable" if isinstance(exc, HostDownError) else exc.kind
        return Examined((Finding(code, REFUSE, f"{exc.what}: {exc.why}", exc.remedy),), 0)


async def wait_for_calm_in_time(
    vm: Driver, destination: Host, options: "MigrationOptions", intent: "Intent", *,
    began_s: float, for_s: float, tell: Callable[[str], None],
) -> None:  # fmt: skip
    """Wait until the guest dirties little, at most `for_s`, and leave the migration enough time.
    Reports the result through `tell`.
    """
    from vmckpt.forecast import calm

    if intent.finish_within_s is not None:
        made = await vm.plan(destination, options, intent, began_s=began_s)
        for_s = min(for_s, made.spare_s)
    await calm.wait_for_calm(vm.name, vm.measure, for_s, tell)
