"""A drain beside scripted guests: what goes wrong with one VM is told, and the others go on."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

from vmckpt.drivers.driver import Driver, VmInfo
from vmckpt.errors import (
    BusyError,
    CancelledByUserError,
    HostDownError,
    JobHeldError,
    NotFoundError,
    OperationFailedError,
    OutcomeUnknownError,
    RefusedError,
    StorageError,
    VmckptError,
    VmLostError,
)
from vmckpt.events.types import Emit, PhaseBegan
from vmckpt.fleet.drain import drain as drains
from vmckpt.fleet.drain import record as records
from vmckpt.fleet.drain.drain import drain, undrain
from vmckpt.fleet.drain.events import DrainEvent, Ended, Noted
from vmckpt.fleet.drain.plan import DrainOptions
from vmckpt.fleet.drain.record import DrainRecord
from vmckpt.fleet.drain.result import DrainResult
from vmckpt.fleet.drain.view import DrainTools, HostLimits
from vmckpt.forecast.measure.dirty_rate import DirtyRate
from vmckpt.hosts.every import Answers, Arrival, Unread
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory.drained import close, is_closed
from vmckpt.hosts.local import LocalHost
from vmckpt.migrate.elsewhere.watch import WatchedNoLongerError
from vmckpt.migrate.report import MigrationReport
from vmckpt.options.migration import MigrationOptions
from vmckpt.preflight.finding import REFUSE, WARN, Examined, Finding
from vmckpt.state import documents
from vmckpt.vm.lifecycle import owner
from vmckpt.vm.paths import lock_path, vm_dir
from vmckpt.vm.spec.spec import Placement

pytestmark = pytest.mark.contract

Fault = Callable[[], VmckptError]


def error(kind: type[VmckptError], what: str = "it went wrong") -> VmckptError:
    return kind(what, why="the script says so", remedy="ask another script")


class Scripted(LocalHost):
    """A host that gives no answer while it is `DOWN`."""

    async def exists(self, path: Path) -> bool:
        await self.require_up()
        return await super().exists(path)

    async def require_up(self) -> None:
        if self.name in DOWN:
            raise error(HostDownError, f"{self.name} is down")

    async def read_text(self, path: Path) -> str | None:
        return SAYS.get((self.name, str(path))) or await super().read_text(path)


def info(
    name: str, host: str, state: str, words: Mapping[str, tuple[str, ...]] | None = None
) -> VmInfo:
    return VmInfo(
        name, host, "qemu", state, None, False, "vmckpt", (), None, False, False, 1, 1 << 20,
        "q35", "tcg", "qemu64", Placement(**(words or {})),
    )  # fmt: skip


DOWN = set[str]()
# What hosts have in a file of theirs.
SAYS = dict[tuple[str, str], str]()


@dataclass
class World:
    """VMs that are a name and a place. `faults`: what a VM's moves to a host come to, in turn."""

    state: Path
    where: dict[str, str]
    faults: dict[tuple[str, str], list[Fault]] = field(default_factory=dict)
    refused: dict[tuple[str, str], Finding] = field(default_factory=dict)
    words: dict[str, dict[str, tuple[str, ...]]] = field(default_factory=dict)
    stopped: set[str] = field(default_factory=set)
    down: set[str] = field(default_factory=lambda: DOWN)
    under_way: list[str] = field(default_factory=list)
    most_under_way: int = 0
    told: list[DrainEvent] = field(default_factory=list)
    moving: asyncio.Event = field(default_factory=asyncio.Event)
    held: bool = False
    recovering: int = 0
    cut_off: str = ""
    # Hosts whose VMs cannot be read, and which answer all else.
    unread: set[str] = field(default_factory=set)

    def host(self, name: str) -> LocalHost:
        return Scripted(name, self.state / name, "127.0.0.1")

    def hosts(self) -> Sequence[Host]:
        return [self.host(name) for name in "abc"]

    async def inspect(self) -> Answers[VmInfo]:
        seen = [
            info(name, host, "stopped" if name in self.stopped else "running", self.words.get(name))
            for name, host in self.where.items()
        ]
        unanswered = sorted(self.down | self.unread)
        silent = [error(HostDownError, f"{name} is down") for name in unanswered]
        given = [vm for vm in seen if vm.host not in unanswered]
        return Answers(given, silent, tuple(unanswered))

    async def find(self, name: str, tell: Callable[[str], None]) -> Driver:
        if self.recovering:
            self.recovering -= 1
            raise error(BusyError, "its recovery is under way")
        if name not in self.where:
            raise error(NotFoundError)
        if name == self.cut_off:
            tell(f"{name}: ended what was interrupted")
            self.cut_off = ""
        return cast("Driver", Guest(self, name))

    async def is_worked_on(self, name: str) -> bool:
        return False

    @property
    def tools(self) -> DrainTools:
        return DrainTools(self.inspect, self.find, self.is_worked_on, self.hosts)

    def drain(self, **asked: Any) -> DrainResult:
        return asyncio.run(self.drained(**asked))

    async def drained(self, *, dry_run: bool = False, **asked: Any) -> DrainResult:
        wanted = DrainOptions(measure_s=0.0, **asked)
        return await drain(
            self.host("a"), wanted, self.told.append, dry_run=dry_run, tools=self.tools
        )

    def undrain(self, name: str = "a", *, dry_run: bool = False, **asked: Any) -> DrainResult:
        wanted, host = DrainOptions(measure_s=0.0, **asked), self.host(name)
        return asyncio.run(
            undrain(host, wanted, self.told.append, dry_run=dry_run, tools=self.tools)
        )

    def closed(self, name: str) -> bool:
        return asyncio.run(is_closed(LocalHost(name, self.state / name, "127.0.0.1")))


@dataclass
class Guest:
    world: World
    name: str

    @property
    def host(self) -> Host:
        return self.world.host(self.world.where[self.name])

    async def examine(self, target: Host, options: MigrationOptions) -> Examined:
        against = self.world.refused.get((self.name, target.name))
        return Examined((against,) if against else (), 0)

    async def measure(self, for_s: float) -> DirtyRate:
        raise error(BusyError)

    async def migrate(
        self,
        target: Host,
        options: MigrationOptions,
        emit: Emit,
        forecast: Mapping[str, Any] | None = None,
    ) -> MigrationReport:
        world = self.world
        assert options.in_turn
        assert any(self.name in stands.moving for stands in records.load_all())
        world.under_way.append(self.name)
        world.most_under_way = max(world.most_under_way, len(world.under_way))
        emit(PhaseBegan(0.0, "prepare"))
        try:
            world.moving.set()
            # Others begin meanwhile.
            await asyncio.sleep(3600 if world.held else 0.001)
        except asyncio.CancelledError as exc:
            raise error(CancelledByUserError) from exc
        finally:
            world.under_way.remove(self.name)
        if faults := world.faults.get((self.name, target.name)):
            raise faults.pop(0)()
        world.where[self.name] = target.name
        return MigrationReport(**{name: None for name in MigrationReport.__dataclass_fields__}  # type: ignore[arg-type]
                      | {"vm": self.name, "target": target.name})  # fmt: skip


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(drains, "BUSY_WAIT_S", 0.0)
    DOWN.clear()
    return World(tmp_path, {f"vm{number}": "a" for number in range(5)} | {"other": "b"})


def at(world: World, host: str) -> list[str]:
    return sorted(name for name, where in world.where.items() if where == host)


def stays(result: DrainResult) -> dict[str, str]:
    return {one.vm: one.why for one in result.stay}


def test_what_is_ended_of_a_vm_when_it_is_found_is_told(world: World) -> None:
    world.cut_off = "vm3"
    assert world.drain().exit_code == 0
    assert Noted("vm3: ended what was interrupted") in world.told


def test_all_leave_and_come_back_and_the_host_is_closed_meanwhile(world: World) -> None:
    result = world.drain()
    assert (result.exit_code, result.stay, len(result.moved)) == (0, (), 5)
    assert at(world, "a") == []
    # Alike hosts get alike numbers, those that they had already counted by what they take.
    assert {host: len(at(world, host)) for host in "bc"} in ({"b": 3, "c": 3}, {"b": 4, "c": 2})
    assert world.closed("a")
    world.where["new"] = "b"
    # Another drain puts nothing there.
    assert (
        asyncio.run(
            drain(
                world.host("b"), DrainOptions(measure_s=0.0), world.told.append, tools=world.tools
            )
        ).exit_code
        == 0
    )
    assert at(world, "a") == []
    back = world.undrain()
    assert (back.exit_code, len(back.moved)) == (0, 5)
    assert at(world, "a") == [f"vm{number}" for number in range(5)]
    assert not world.closed("a")
    assert records.load("a") is None
    # Those that came home are no longer among what the other host gave away.
    assert world.undrain("b").exit_code == 0
    assert at(world, "b") == ["new", "other"]
    assert records.load_all() == []


def test_nothing_is_changed_by_a_dry_run(world: World) -> None:
    result = world.drain(dry_run=True)
    assert (len(result.plan.table.moves), result.moved, result.took_s) == (5, {}, None)
    assert len(at(world, "a")) == 5
    assert not world.closed("a")
    assert records.load_all() == []


def test_no_more_at_once_than_asked_for(world: World) -> None:
    assert world.drain(max_parallel=2).exit_code == 0
    assert world.most_under_way <= 2


def test_one_that_cannot_move_is_named_and_the_others_go_on(world: World) -> None:
    no_cpu = Finding("cpu-model", REFUSE, "no such CPU", "another CPU")
    world.refused = {("vm1", host): no_cpu for host in "bc"}
    world.stopped = {"vm2"}
    planned = world.drain(dry_run=True)
    assert (planned.exit_code, planned.moved, list(stays(planned))) == (1, {}, ["vm1"])
    result = world.drain()
    assert result.exit_code == 1
    assert stays(result) == {"vm1": "b, c: [cpu-model] no such CPU"}
    assert "vmckpt check vm1" in result.stay[0].remedy
    # Nothing runs in it: it does not keep the host from being drained.
    assert result.plan.stopped == ("vm2",)
    assert at(world, "a") == ["vm1", "vm2"]


def test_a_host_that_could_not_send_it_back_gets_none(world: World) -> None:
    world.refused = {(f"vm{n}", "b"): Finding("way-back", WARN, "older QEMU") for n in range(5)}
    assert world.drain().exit_code == 0
    assert len(at(world, "c")) == 5
    world.undrain()
    world.refused = {
        (f"vm{n}", h): Finding("way-back", WARN, "older") for n in range(5) for h in "bc"
    }
    refused = world.drain()
    assert (refused.exit_code, len(refused.stay), refused.closed) == (4, 5, False)
    assert not world.closed("a")  # nothing was changed
    assert records.load("a") is None
    assert world.drain(one_way=True).exit_code == 0


@pytest.mark.parametrize("ends", ["refused", "broken off"])
def test_a_host_that_another_operator_drains_meanwhile_is_not_opened(
    world: World, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    world.refused = {(f"vm{n}", h): Finding("way-back", WARN, "-") for n in range(5) for h in "bc"}
    inspect = world.inspect

    async def and_another() -> Any:
        await close(world.host("a"), {"run": "another"})
        if ends == "broken off":
            raise error(HostDownError)
        return await inspect()

    monkeypatch.setattr(world, "inspect", and_another)
    if ends == "refused":
        assert world.drain().exit_code == 4
    else:
        with pytest.raises(HostDownError):
            world.drain()
    assert world.closed("a")


def test_a_drained_host_stays_so_when_none_of_the_rest_could_move(world: World) -> None:
    world.drain()
    world.where["late"] = "a"
    world.refused = {("late", host): Finding("cpu-model", REFUSE, "no CPU", "-") for host in "bc"}
    again = world.drain()
    assert (again.exit_code, again.closed) == (4, True)
    assert world.closed("a")
    assert records.load("a") is not None


def test_a_drain_that_moves_nothing_forgets_none_that_is_still_away(world: World) -> None:
    """The host was not opened, or `undrain` said that it was not drained."""
    world.drain()
    world.refused = {("vm0", "a"): Finding("cpu-model", REFUSE, "no CPU", "-")}
    assert world.undrain().exit_code == 1
    before = records.load("a")
    assert before is not None
    assert list(before.away) == ["vm0"]
    with pytest.raises(RefusedError, match="cannot be forecast"):
        world.drain(finish_within_s=60.0)
    assert not world.closed("a")
    assert records.load("a") == before
    no_cpu = Finding("cpu-model", REFUSE, "no CPU", "-")
    world.refused = {(f"vm{n}", host): no_cpu for n in range(5) for host in "bc"}
    refused = world.drain()
    assert (refused.exit_code, refused.closed, world.closed("a")) == (4, False, False)
    assert records.load("a") == before
    world.refused = {}
    assert world.undrain().exit_code == 0
    assert at(world, "a") == [f"vm{n}" for n in range(5)]


@pytest.mark.parametrize("kind", [RefusedError, OperationFailedError])
def test_a_host_that_has_filled_up_is_left_for_another(
    world: World, kind: type[VmckptError]
) -> None:
    world.faults = {(f"vm{n}", "b"): [lambda: error(kind, "b is full")] for n in range(5)}
    result = world.drain()
    assert result.exit_code == 0
    assert at(world, "b") == ["other"]
    assert any("tried again, to c" in one.text for one in world.told if isinstance(one, Noted))


def test_hosts_that_are_all_full_are_told_with_both_reasons(world: World) -> None:
    world.faults = {("vm1", host): [lambda: error(RefusedError, "full")] for host in "bc"}
    result = world.drain()
    assert result.exit_code == 1
    assert stays(result)["vm1"].startswith("full: the script says so; and elsewhere: ")
    assert len(result.moved) == 4


def test_a_host_that_goes_down_gets_no_more(world: World) -> None:
    def goes_down() -> VmckptError:
        world.down.add("b")
        return error(HostDownError, "b is down")

    world.faults = {(f"vm{n}", "b"): [goes_down] for n in range(5)}
    result = world.drain(max_parallel=1)
    assert result.exit_code == 0
    assert len(at(world, "c")) == 5
    # One found it out.
    failed = [one for one in world.told if isinstance(one, Ended) and one.why]
    assert sum(len(faults) for faults in world.faults.values()) == 4
    assert {one.where for one in failed} == {"a"}


def test_a_host_that_is_down_from_the_beginning_is_left_out_and_said(world: World) -> None:
    world.down.add("c")
    world.where = {f"vm{number}": "a" for number in range(3)}
    result = world.drain()
    assert (result.exit_code, len(at(world, "b"))) == (0, 3)
    assert "c is down" in result.plan.closed["c"]
    world.down.add("b")
    # Where the VMs are that b has, no one can say.
    back = world.undrain()
    assert (back.exit_code, len(back.stay)) == (4, 3)
    world.down.clear()
    assert world.undrain().exit_code == 0


@pytest.mark.parametrize("text", ["MemTotal:", "MemTotal: many kB", "MemTotal: -5 kB", "\0"])
def test_a_host_that_does_not_say_what_memory_it_has_gets_no_vm(
    world: World, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """And ends no drain: it ended all of them, vmckpt had a bug."""
    monkeypatch.setitem(SAYS, ("b", "/proc/meminfo"), text)
    result = world.drain()
    assert result.exit_code == 0
    assert at(world, "b") == ["other"]
    assert len(at(world, "c")) == 5


@pytest.mark.parametrize("text", [f"0-{'9' * 400}", "0-", "5-1", "0-3,x", "\0"])
def test_nor_does_one_that_does_not_say_what_processors_it_has(
    world: World, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setitem(SAYS, ("b", "/sys/devices/system/cpu/online"), text)
    result = world.drain()
    assert result.exit_code == 0
    assert at(world, "b") == ["other"]
    assert len(at(world, "c")) == 5


@pytest.mark.parametrize("kind", [StorageError, HostDownError])
def test_nor_does_one_whose_certificates_cannot_be_read(
    world: World, monkeypatch: pytest.MonkeyPatch, kind: type[VmckptError]
) -> None:
    """Its disk fails, or it falls silent while the costs of moves to it are found out."""
    real = Scripted.exists

    async def exists(self: Scripted, path: Path) -> bool:
        if self.name == "b" and "pki" in path.parts:
            raise error(kind)
        return await real(self, path)

    monkeypatch.setattr(Scripted, "exists", exists)
    result = world.drain()
    assert (result.exit_code, at(world, "a")) == (0, [])


def test_a_host_that_is_drained_meanwhile_gets_nothing_more(world: World) -> None:
    """Its drain had said that it is empty: VMs that were planned there before still came."""
    arrived: list[str] = []

    def tell(happening: DrainEvent) -> None:
        if isinstance(happening, Ended) and not happening.why:
            arrived.append(happening.where)
            mark = world.host("b").state_dir / "drained.json"
            mark.parent.mkdir(exist_ok=True)
            mark.write_text('{"run": "another"}')

    world.where |= {f"vm{number}": "a" for number in range(5, 12)}
    asked = DrainOptions(measure_s=0.0, max_parallel=1)
    result = asyncio.run(drain(world.host("a"), asked, tell, tools=world.tools))
    assert result.exit_code == 0
    assert len(arrived) == 12
    # One may have been under way.
    assert arrived.count("b") <= 2


@pytest.mark.parametrize(
    "action",
    ["migrate to a", "migrate --recover", "vm run", "vm start", "vm reboot", "checkpoint restore",
     "fork"],
)  # fmt: skip
def test_a_vm_that_is_on_its_way_to_the_host_is_waited_for(world: World, action: str) -> None:
    """Another drain had begun to move it there before the host was marked; or it was restored.

    Or its migration there was interrupted, and another process is about to find that it arrived.
    """
    host = world.host("a")
    if action in ("vm start", "vm reboot"):  # it is at home there
        vm_dir(host.state_dir, "late").path.mkdir(parents=True)
        vm_dir(host.state_dir, "late").current.touch()

    async def both() -> DrainResult:
        async def comes() -> None:
            async with host.lock(lock_path(host.state_dir, "late"), owner(action)):
                coming.set()
                while not any("is on its way" in str(one) for one in world.told):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                world.where["late"] = "a"

        coming = asyncio.Event()
        moving = asyncio.ensure_future(comes())
        await coming.wait()
        async with asyncio.timeout(10):
            result = await world.drained()
            await moving
        return result

    result = asyncio.run(both())
    assert result.exit_code == 0
    assert world.where["late"] != "a"


class Starting(World):
    """One in which a VM is started on the host after it was looked at, `left` times."""

    left = 1
    looked = False

    async def inspect(self) -> Answers[VmInfo]:
        if self.looked and self.left:
            self.left -= 1
            self.where["late"] = "a"
        self.looked = True
        return await super().inspect()


def test_a_vm_that_is_started_meanwhile_leaves_too(world: World) -> None:
    """Else the host is said to be empty, is switched off, and that VM is lost."""
    starting = Starting(world.state, world.where)
    result = starting.drain()
    assert (result.exit_code, result.stay) == (0, ())
    assert "late" in result.moved
    assert at(starting, "a") == []
    assert "late" in records_of("a").away


def test_a_vm_that_is_shut_down_meanwhile_does_not_stay(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing runs in it: the host was opened again, although it was empty."""
    world.where = {"vm0": "a"}

    async def examined(guest: Guest, target: Host, options: MigrationOptions) -> Examined:
        world.stopped = {"vm0"}
        return Examined((Finding("running", REFUSE, "'vm0' is stopped", "start it"),), 0)

    monkeypatch.setattr(Guest, "examine", examined)
    result = world.drain()
    assert (result.exit_code, result.stay, world.closed("a")) == (0, (), True)


@pytest.mark.parametrize("when", ["before it is examined", "before it moves"])
def test_a_vm_that_is_removed_meanwhile_does_not_stay(
    world: World, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The drain counted as incomplete; if it was the only VM, the host was not closed."""
    world.where = {"vm0": "a"}
    inspect, examine = world.inspect, Guest.examine

    async def then_removed() -> Answers[VmInfo]:
        found = await inspect()
        if when == "before it is examined":
            world.where.clear()
        return found

    async def examined(guest: Guest, target: Host, options: MigrationOptions) -> Examined:
        found = await examine(guest, target, options)
        world.where.clear()
        return found

    monkeypatch.setattr(world, "inspect", then_removed)
    if when == "before it moves":
        monkeypatch.setattr(Guest, "examine", examined)
    result = world.drain()
    assert (result.exit_code, result.stay, world.closed("a")) == (0, (), True)
    assert ("no longer exists" if when == "before it is examined" else "it went wrong") in str(
        world.told
    )


def test_one_that_is_there_again_whenever_it_was_moved_is_said_to_stay(world: World) -> None:
    starting = Starting(world.state, world.where)
    starting.left = 1000
    result = starting.drain()
    assert (result.exit_code, list(stays(result))) == (1, ["late"])
    assert result.closed


def records_of(host: str) -> DrainRecord:
    record = records.load(host)
    assert record is not None
    return record


def test_one_that_is_busy_is_tried_again_and_left_in_the_end(world: World) -> None:
    busy: list[Fault] = [lambda: error(BusyError, "busy")]
    world.faults = {("vm1", "b"): busy, ("vm1", "c"): busy}
    assert world.drain().exit_code == 0
    world.faults = {("other", "c"): [lambda: error(BusyError, "busy")] * 9}
    result = asyncio.run(
        drain(world.host("b"), DrainOptions(measure_s=0.0), world.told.append, tools=world.tools)
    )
    assert stays(result)["other"] == "busy: the script says so"


@pytest.mark.parametrize(("kind", "code"), [(OutcomeUnknownError, 9), (VmLostError, 10)])
def test_one_that_nobody_knows_of_is_not_tried_again_and_decides_the_exit_code(
    world: World, kind: type[VmckptError], code: int
) -> None:
    world.faults = {("vm1", host): [lambda: error(kind)] * 2 for host in "bc"}
    result = world.drain()
    assert result.exit_code == code
    assert sum(len(faults) for faults in world.faults.values()) == 3
    stands = records.load("a")
    assert stands is not None
    # The next command looks where it is.
    assert set(stands.moving) == {"vm1"}


def test_a_move_that_breaks_off_unforeseen_is_that_vms_alone(world: World) -> None:
    """Such as by an answer that no door has checked."""
    for host in "bc":
        world.faults["vm1", host] = [lambda: KeyError("return")]  # type: ignore[list-item,return-value]
    result = world.drain()
    assert result.exit_code == OutcomeUnknownError.exit_code
    assert "KeyError: 'return'" in stays(result)["vm1"]
    assert at(world, "a") == ["vm1"]


def test_cancelled_it_begins_no_more_and_the_same_again_goes_on(world: World) -> None:
    async def cancelled() -> None:
        world.held = True
        task = asyncio.create_task(world.drained())
        await world.moving.wait()
        task.cancel()
        with pytest.raises(CancelledByUserError, match="0 of 5"):
            await task

    asyncio.run(cancelled())
    assert world.under_way == []
    assert len(at(world, "a")) == 5
    assert world.closed("a")
    world.held = False
    assert world.drain().exit_code == 0


def test_cancelled_again_it_waits_no_longer_for_a_host_that_has_died(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The move is its source's own work; the drain could be ended by no Ctrl-C any longer."""

    async def watched(guest: Guest, *_: object) -> MigrationReport:
        world.moving.set()
        asked = 0
        while asked < 2:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                asked += 1
        raise WatchedNoLongerError("it watches no longer", why="asked again", remedy="attach")

    async def cancelled() -> None:
        task = asyncio.create_task(world.drained(max_parallel=1))
        await world.moving.wait()
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0.05)
        async with asyncio.timeout(5):
            with pytest.raises(OutcomeUnknownError, match="0 of 5") as raised:
                await task
        assert "attach" in raised.value.remedy

    monkeypatch.setattr(Guest, "migrate", watched)
    asyncio.run(cancelled())
    [stands] = records.load_all()
    assert len(stands.moving) == 1  # the same command again looks where that one is


@pytest.mark.parametrize("kind", [OutcomeUnknownError, VmLostError])
def test_cancelled_it_tells_of_one_that_is_lost_first(
    world: World, kind: type[VmckptError]
) -> None:
    world.faults = {("vm0", host): [lambda: error(kind)] for host in "bc"}

    async def cancelled() -> None:
        task = asyncio.create_task(world.drained(max_parallel=1))
        while not any(isinstance(one, Ended) and one.why for one in world.told):  # noqa: ASYNC110
            await asyncio.sleep(0)
        world.held = True
        world.moving.clear()
        await world.moving.wait()
        task.cancel()
        with pytest.raises(kind, match="cancelled: ") as raised:
            await task
        assert raised.value.why.startswith("vm0: ")

    asyncio.run(cancelled())


def test_what_was_cut_off_is_looked_at_first(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three moves that a killed drain had begun one had ended, one is undone, one VM is gone."""
    world.where["vm1"] = "c"
    moving = {"vm1": "c", "vm2": "b", "gone": "b"}
    records.save(DrainRecord("a", "r1", 1.0, {"vm0": "b"}, moving))
    world.where["vm0"] = "b"
    # The dead-man's switch is at it just then.
    world.recovering = 2
    monkeypatch.setattr(drains, "WORKED_ON_POLL_S", 0.0)
    result = world.drain()
    assert (result.exit_code, len(result.moved)) == (0, 3)
    stands = records.load("a")
    assert stands is not None
    assert sorted(stands.away) == [f"vm{number}" for number in range(5)]
    assert stands.moving == {}
    assert stands.run == "r1"
    assert world.undrain().exit_code == 0
    assert len(at(world, "a")) == 5


def test_two_at_once_on_one_host_are_refused(world: World) -> None:
    async def both() -> None:
        world.held = True
        first = asyncio.create_task(world.drained())
        await world.moving.wait()
        with pytest.raises(BusyError):
            await world.drained()
        first.cancel()
        with pytest.raises(CancelledByUserError):
            await first

    asyncio.run(both())


def test_nothing_is_begun_that_cannot_be_written_down(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise error(StorageError, f"{path} is full")

    monkeypatch.setattr(documents, "write_durably", full)
    with pytest.raises(StorageError):
        world.drain()
    assert len(at(world, "a")) == 5


def test_what_brings_nothing_back_is_said(world: World) -> None:
    with pytest.raises(RefusedError, match="is not drained"):
        world.undrain()
    world.drain()
    del world.where["vm0"]
    world.stopped = {"vm1"}
    back = world.undrain()
    assert back.exit_code == 1
    assert stays(back)["vm1"].startswith("it is stopped, on ")
    assert "vm0 no longer exists" in [one.text for one in world.told if isinstance(one, Noted)]
    world.stopped = set()
    assert world.undrain().exit_code == 0
    assert records.load_all() == []


def test_what_libvirt_still_has_of_a_domain_there_does_not_bring_it_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its definition stayed because libvirtd did not answer when it had moved: it was forgotten."""
    world.drain()
    inspect = world.inspect

    async def left() -> Answers[VmInfo]:
        found = await inspect()
        return found._replace(given=[*found.given, info("vm0", "a", "stopped")])

    monkeypatch.setattr(world, "inspect", left)
    assert world.undrain().exit_code == 0
    assert at(world, "a") == [f"vm{n}" for n in range(5)]


def test_what_cannot_be_meant_is_refused_and_leaves_the_host_open(world: World) -> None:
    with pytest.raises(NotFoundError, match="no host 'x'"):
        world.drain(to=("x",))
    with pytest.raises(RefusedError, match="cannot be drained to itself"):
        world.drain(to=("a", "b"))
    with pytest.raises(RefusedError, match="cannot be forecast"):
        world.drain(finish_within_s=60.0)
    assert not world.closed("a")
    assert len(at(world, "a")) == 5


def test_a_host_that_is_not_had_back_in_time_stays_closed(world: World) -> None:
    assert world.drain().exit_code == 0
    with pytest.raises(RefusedError, match="cannot be forecast"):
        world.undrain(finish_within_s=1.0)
    assert world.closed("a")
    shown = world.undrain(dry_run=True)  # all come back, though the mark is there still
    assert (len(shown.plan.table.moves), shown.stay) == (5, ())
    assert world.closed("a")
    assert at(world, "a") == []
    assert world.undrain().exit_code == 0
    assert not world.closed("a")


def test_words_and_limits_of_options_and_specs_are_kept(world: World) -> None:
    world.words = {"vm0": {"apart": ("web",)}, "other": {"apart": ("web",)},
                   "vm4": {"hosts": ("b",)}}  # fmt: skip
    result = world.drain(apart=(("vm1", "vm2"),), together=(("vm3", "vm4"),))
    assert result.exit_code == 0
    where = world.where
    assert where["vm0"] == "c"
    assert where["vm1"] != where["vm2"]
    assert where["vm3"] == where["vm4"] == "b"
    world.undrain()
    full = world.drain(limits=HostLimits(most_vms=2))
    assert full.exit_code == 1
    # The one that b has, one more there, two on c.
    assert (len(at(world, "b")), len(at(world, "c"))) == (2, 2)
    assert all("as many VMs as allowed" in why for why in stays(full).values())


def test_a_host_whose_vms_nobody_can_name_is_not_said_to_be_empty(world: World) -> None:
    """One damaged file of one VM is enough for that; its other questions are answered."""
    world.unread.add("a")
    with pytest.raises(HostDownError, match="what runs on a is not known"):
        world.drain()
    assert len(at(world, "a")) == 5
    world.unread.clear()
    assert world.drain().exit_code == 0
    assert at(world, "a") == []


def test_a_vm_whose_record_cannot_be_read_is_said_to_stay(world: World) -> None:
    """It may run: the drain said that all have left, and who switches the host off loses it."""
    world.where = {"web": "a"}
    damage = error(StorageError, "vm.json is damaged")

    async def inspect() -> Answers[VmInfo]:
        found = await world.inspect()
        unread = (Unread("a", "db", damage), Unread("b", "other", damage))
        return found._replace(silent=[*found.silent, damage, damage], unread=unread)

    tools = replace(world.tools, inspect=inspect)
    work = drain(world.host("a"), DrainOptions(measure_s=0.0), world.told.append, tools=tools)
    result = asyncio.run(work)
    assert result.moved == {"web": "b"}
    assert [(one.vm, one.code) for one in result.stay] == [("db", StorageError.exit_code)]
    assert result.exit_code == 1


@pytest.mark.parametrize("answers", [True, False])
def test_a_guest_that_arrived_as_its_source_died_leaves_too(world: World, *, answers: bool) -> None:
    """It is not at home on its host yet: the drain said that all have left, and it was lost."""
    world.where = {}

    async def inspect() -> Answers[VmInfo]:
        found = await world.inspect()
        arrivals = () if "web" in world.where else (Arrival("a", "web"), Arrival("b", "other"))
        return found._replace(arrivals=arrivals)

    async def find(name: str, tell: Callable[[str], None]) -> Driver:
        if not answers:
            raise error(HostDownError, "its source is down")
        world.where.setdefault(name, "a")
        return await world.find(name, tell)

    tools = replace(world.tools, inspect=inspect, find=find)
    work = drain(world.host("a"), DrainOptions(measure_s=0.0), world.told.append, tools=tools)
    result = asyncio.run(work)
    if answers:
        assert (result.moved, result.stay, result.exit_code) == ({"web": "b"}, (), 0)
    else:
        assert [(one.vm, one.code) for one in result.stay] == [("web", HostDownError.exit_code)]
        assert result.exit_code != 0


def test_a_vm_whose_job_is_held_has_moved_and_comes_back(world: World) -> None:
    """It counted as on its old host: `undrain` left it where it was, and ended with 0."""

    def held(target: str) -> Fault:
        def arrives() -> VmckptError:
            world.where["vm1"] = target
            return error(
                JobHeldError, "'vm1' is there, but jobs that used its device were not resumed"
            )

        return arrives

    world.faults = {("vm1", host): [held(host)] for host in "bc"}
    result = world.drain()
    assert (result.exit_code, result.stay, len(result.moved)) == (1, (), 5)
    assert result.moved["vm1"] == world.where["vm1"]
    [one] = result.to_json()["held"]
    assert (one["vm"], one["remedy"]) == ("vm1", "ask another script")
    # It was moved once: each move is another chance that the device does not come back.
    assert sum(len(faults) for faults in world.faults.values()) == 1
    world.faults = {}
    assert world.undrain().exit_code == 0
    assert at(world, "a") == [f"vm{number}" for number in range(5)]


def test_a_job_that_is_held_before_the_move_moves_no_vm(world: World) -> None:
    world.faults = {("vm1", host): [lambda: error(JobHeldError)] for host in "bc"}
    result = world.drain()
    assert (result.exit_code, [one.vm for one in result.stay]) == (1, ["vm1"])
    assert (result.held, at(world, "a")) == ((), ["vm1"])
