"""A host: its clock, its ways to the arbiter and the operator, and what is on its disk."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.replication_model.world import SPAN, State, World, sleep
from vmckpt.errors import OutcomeUnknownError
from vmckpt.lease.lease import Lease
from vmckpt.lease.record import LeaseRecord
from vmckpt.lease.rule import Claimant
from vmckpt.lease.store import ArbiterDownError, Versioned

if TYPE_CHECKING:
    from tests.replication_model.process import Proc
    from tests.replication_model.qemu import Qemu


@dataclass
class Home:
    """A VM's directory on a host, which outlives it, and its disk there.

    `id`: of the QEMU that it last ran in. `replaces`: the host, and the QEMU there, from which it
    was taken over; `run`: of the replication by whose standby it came here.
    """

    id: int
    disk: State
    replaces: tuple[str, int] | None = None
    run: int | None = None
    claim: str | None = None
    gone_replica: str | None = None
    listed_replica: str | None = None


@dataclass(frozen=True)
class Said:
    """A service's status, as it answers or as it last wrote it down."""

    role: str
    run: int
    state: str
    primary: str
    standby: str
    primary_id: int
    answers: bool = False
    ending: str = ""
    qemu_id: int = 0
    ran: bool = False
    arbiter_fails: bool = False


class Turn:
    """`asyncio.Lock` without asyncio."""

    is_taken = False

    async def __aenter__(self) -> None:
        while self.is_taken:
            await sleep(0.02)
        self.is_taken = True

    async def __aexit__(self, *exc: object) -> None:
        self.is_taken = False


class Host:
    """A machine: its clock, its ways to the arbiter and the operator, and what is on its disk."""

    def __init__(self, world: World, name: str, drift: float = 0.0) -> None:
        self.world, self.name = world, name
        self._rate, self._offset_s = 1 + SPAN.drift * drift, world.random.uniform(0, 1000)
        self.is_up, self.is_gone = True, False
        self.to_arbiter_from_s = self.to_operator_from_s = 0.0
        self.home: Home | None = None
        self.files: Files | None = None
        self.locked_by: Proc | None = None
        self.begun_by: Proc | None = None  # the lock of a command that begins a protection
        self.procs: list[Proc] = []

    @property
    def qemus(self) -> "list[Qemu]":
        return [qemu for qemu in self.world.qemus if qemu.host is self and qemu.lives]

    def qemu_of(self, home: Home | None) -> "Qemu | None":
        """The QEMU of the VM that is at home here, while it runs."""
        if home is None:
            return None
        return next((qemu for qemu in self.qemus if qemu.id == home.id), None)

    @property
    def answers(self) -> bool:
        return self.is_up and self.world.now_s >= self.to_operator_from_s

    @property
    def has_enforcer(self) -> bool:
        """Whether anything could stop a guest here that may not run."""
        return any(proc.enforces and not proc.is_frozen for proc in self.procs)

    def clock(self) -> float:
        return self._offset_s + self._rate * self.world.now_s

    def true_s(self, local_s: float) -> float:
        """How long until the clock shows that."""
        return (local_s - self.clock()) / self._rate

    def find(self, kind: "type[Proc]") -> "list[Proc]":
        return [proc for proc in self.procs if isinstance(proc, kind)]

    def go_down(self) -> None:
        """Power off: what is on its disk stays."""
        self.is_up = False
        for proc in list(self.procs):
            proc.end()
        for qemu in self.qemus:
            qemu.end()
        for wire in self.world.wires:
            wire.forget(self)
        self.locked_by = self.begun_by = None

    def come_up(self) -> bool:
        """Whether it does."""
        if not self.is_gone:
            self.is_up, self._offset_s = True, self.world.random.uniform(0, 1000)
        return self.is_up

    # -- a store, as seen from here --------------------------------------------------------------

    async def read(self, vm: str) -> Versioned | None:
        await self._asks(vm)
        found = self.world.stands
        await sleep(0.01)
        return found

    async def replace(self, vm: str, record: LeaseRecord, *, over: int) -> Versioned:
        await self._asks(vm)
        world = self.world
        if world.random.random() < world.trouble:
            if world.random.random() < 0.6:  # done all the same, perhaps later
                late_s = world.random.choice([0.0, 0.3, 2.5]) * world.random.random()
                world.at(world.now_s + late_s, self._put_late, record, over)
            await sleep(world.random.uniform(0.05, 1.0))
            raise OutcomeUnknownError(vm, why="-", remedy="-")
        found = world.put(record, over)
        await sleep(0.01)
        if world.is_arbiter_lost or world.now_s < self.to_arbiter_from_s:
            raise OutcomeUnknownError(vm, why="-", remedy="-")
        return found

    def _put_late(self, record: LeaseRecord, over: int) -> None:
        self.world.put(record, over)

    async def _asks(self, vm: str) -> None:
        world = self.world
        await sleep(world.random.uniform(0.005, 0.03))
        is_away = world.is_arbiter_lost or world.now_s < self.to_arbiter_from_s
        if is_away or world.random.random() < world.trouble / 2:
            await sleep(0.2)
            raise ArbiterDownError(vm, why="-", remedy="-")

    def lease(self, claimant: Claimant) -> Lease:
        lease = Lease(self, "web", claimant, SPAN, clock=self.clock)
        lease._one_at_a_time = Turn()  # type: ignore[assignment]
        return lease


class Files:
    """A service's files on a host: its request, and its last word."""

    def __init__(self, role: str, run: int, ends: tuple[Host, Host], primary_id: int) -> None:
        self.role, self.run, self.primary_id = role, run, primary_id
        self.primary, self.standby = ends
        self.service: Proc | None = None
        self.word: Said | None = None
        if role == "primary":
            one, other = (f"{end.name}/{run}" for end in ends)
            # claim.Claim.other; what a standby that took over has the guest by is its inverse.
            self.primary.world.standbys |= {one: other, other: one}

    def say(self, state: str, **more: Any) -> Said:
        names = self.primary.name, self.standby.name
        return Said(self.role, self.run, state, *names, self.primary_id, **more)

    def is_standbys(self, holder: str) -> bool:
        """request.Request.is_standbys"""
        standby = f"{self.standby.name}/{self.run}"
        return holder == standby or holder.startswith(f"{standby}/")
