"""A VM, for commands, fleet jobs and programs, independent of what runs its QEMU."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from vmckpt.events.types import Emit
from vmckpt.hosts.host import Host

if TYPE_CHECKING:
    from pathlib import Path

    from vmckpt.forecast.measure.dirty_rate import DirtyRate
    from vmckpt.forecast.model.choose import Intent
    from vmckpt.forecast.planner import MigrationPlan
    from vmckpt.migrate.outcome.recover import Recovery
    from vmckpt.migrate.report import MigrationReport
    from vmckpt.options.migration import MigrationOptions
    from vmckpt.preflight.finding import Examined
    from vmckpt.vm.spec.spec import Placement

# States of a VM that takes no memory; the last two are libvirt's.
_OFF = ("stopped", "crashed", "nostate")


class VmInfo(NamedTuple):
    """A VM at one moment. `state`: QEMU's run state or libvirt's word; "stopped", "unreachable".

    `driver`: qemu or libvirt. `ended`: how its QEMU ended if it was not asked to. `cannot`: the
    operations that its QEMU rules out. `operation` holds it now. None: the driver does not tell.
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
    guest_agent: bool | None
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

    @property
    def is_on(self) -> bool:
        """Whether it takes memory where it is."""
        return self.state not in _OFF

    def to_json(self) -> dict[str, Any]:
        """For programs; without what only the other driver tells."""
        lists = {"cannot": list(self.cannot), "disks": list(self.disks)}
        facts = self._asdict() | lists | {"placement": self.placement._asdict()}
        of_one_driver = ("guest_agent", "uuid", "persistent")
        return {k: v for k, v in facts.items() if v is not None or k not in of_one_driver}


class Started(NamedTuple):
    """A VM that has been started, and what as. `pid` is None where libvirt keeps its process."""

    pid: int | None
    accel: str
    machine: str
    cpu: str


class RemovedVm(NamedTuple):
    """A VM that is forgotten: its images, which stay, and the QEMU that goes on without vmckpt.

    `tpm`: where what its TPM holds stays. `kept`: why images stay that were to be removed.
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
        """Where it is."""

    async def look(self) -> VmInfo:
        """How it is now."""

    async def console(self) -> "Path":
        """The socket of its serial console, on its host. Raises RefusedError: it has none."""

    async def start(self) -> Started:
        """Start it where it is."""

    async def stop(self, *, force: bool, timeout_s: float) -> None:
        """Press its power button and wait until it is off; with `force` end it at once."""

    async def remove(self, *, with_state: bool = False) -> RemovedVm:
        """Forget it; what stays. `with_state`: not what its TPM holds."""

    def own_images(self) -> "list[Path]":
        """Where the disks are that it writes."""

    async def examine(self, target: Host, options: "MigrationOptions") -> "Examined":
        """All that is for and against moving it, and what would be copied; changes nothing."""

    async def plan(
        self,
        target: Host,
        options: "MigrationOptions",
        intent: "Intent",
        *,
        began_s: float,
        for_s: float | None = None,
    ) -> "MigrationPlan":
        """Every way of moving it and the one that keeps the intent; see `forecast.planner`."""

    async def migrate(
        self,
        target: Host,
        options: "MigrationOptions",
        emit: Emit,
        forecast: Mapping[str, Any] | None = None,
    ) -> "MigrationReport | Recovery":
        """Move it while it runs; a Recovery when it had to be ended by one."""

    async def measure(self, for_s: float) -> "DirtyRate":
        """How fast it dirties its memory, looked at for so long."""

    async def save(self, name: str, emit: Emit) -> VmSnapshot:
        """Take a snapshot."""

    async def load(self, name: str, emit: Emit) -> VmSnapshot:
        """Go back to a snapshot."""

    async def snapshots(self) -> list[VmSnapshot]:
        """Its snapshots, oldest first."""

    async def delete(self, name: str, emit: Emit) -> None:
        """Delete a snapshot."""


async def remove_with_disks(vm: Driver) -> RemovedVm:
    """Forget a VM with the images that it writes, unless something else uses them."""
    from vmckpt.vm.images import remove_own

    own = vm.own_images()
    gone = await vm.remove(with_state=True)
    if gone.goes_on_as_pid is not None:
        return gone
    removed, kept = await remove_own(vm.host, own)
    disks = [path for path in gone.disks if path not in removed]
    return gone._replace(disks=disks, removed_disks=removed, kept=kept)


async def examined(vm: Driver, target: Host, options: "MigrationOptions") -> "Examined":
    """As `vm.examine`; an error is a refusal, so that other targets are asked all the same."""
    from vmckpt.errors import HostDownError, VmckptError
    from vmckpt.preflight.finding import REFUSE, Examined, Finding

    try:
        return await vm.examine(target, options)
    except VmckptError as exc:
        code = "reachable" if isinstance(exc, HostDownError) else exc.kind
        return Examined((Finding(code, REFUSE, f"{exc.what}: {exc.why}", exc.remedy),), 0)


async def wait_for_calm_in_time(
    vm: Driver, target: Host, options: "MigrationOptions", intent: "Intent", *,
    began_s: float, for_s: float, tell: Callable[[str], None],
) -> None:  # fmt: skip
    """Wait until the guest dirties little, at most `for_s`, and no longer than leaves the migration
    the time that it takes. `tell` hears how it was.
    """
    from vmckpt.forecast import calm

    if intent.finish_within_s is not None:
        made = await vm.plan(target, options, intent, began_s=began_s)
        for_s = min(for_s, made.spare_s)
    await calm.wait_for_calm(vm.name, vm.measure, for_s, tell)
