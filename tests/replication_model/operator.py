"""The operator's commands: `vm start`, `replicate start`, `failover` and `stop`."""

from tests.replication_model.asking import (
    FAILOVER,
    FAILOVER_DEAD,
    PROTECT,
    START,
    STOP,
    STOP_GONE,
    WAIT,
    RefusedError,
    Side,
    SilentError,
    boot,
    dismiss,
    has_left,
    is_at_home,
    is_of_home,
    others_of,
    refused,
    runs,
    tell_primary,
)
from tests.replication_model.machine import Files, Home, Host, Said
from tests.replication_model.primary import Primary
from tests.replication_model.process import POLL_S
from tests.replication_model.qemu import Qemu
from tests.replication_model.recovery import (
    Recovery,
    end_waiting,
    holder_of,
    remove_stale_home,
    take_anew,
    took_over,
)
from tests.replication_model.standby import Standby
from tests.replication_model.stopping import Stopping
from tests.replication_model.world import sleep
from vmckpt.errors import VmckptError
from vmckpt.lease.rule import Right
from vmckpt.replicate.control import TIMEOUT_S
from vmckpt.replicate.status import COPYING, DEAD, ENDED, PROMOTED


class Command(Stopping):
    """One command."""

    def __init__(self, desk: Host, hosts: tuple[Host, ...]) -> None:
        super().__init__(desk, hosts)
        self.is_done = False
        self.error: RefusedError | None = None

    def run(self, kind: str, on: Host | None = None) -> "Command":
        """Begin it; `is_done` when it has ended, `error` when it was refused."""
        self.world.note(f"operator: {kind}")
        self.begin(self._run(kind, on))
        return self

    async def _run(self, kind: str, on: Host | None) -> None:
        try:
            match kind:
                case "start":
                    await self._start_vm()
                case "protect":
                    await self._protect(on)
                case "failover":
                    await self._failover()
                case "failover, primary is dead":
                    await self._failover(is_dead=True)
                case "stop":
                    await self._stop(is_dead=False)
                case "move":
                    await self._move(on)
                case _:
                    await self._stop(is_dead=True)
        except RefusedError as exc:
            self.error = exc
            self.world.note(f"operator: {kind} refused, {exc} -> {', '.join(exc.remedies)}")
        else:
            self.world.count(f"operator: {kind} done")
        self.is_done = True
        self.end()

    def gone(self) -> None:
        self.is_done = True

    # -- vm start ----------------------------------------------------------------------------------

    async def _start_vm(self) -> None:
        host = await self._find()
        await self._require_decided(host)
        if not self.has_lock(host):
            raise RefusedError("another works on it")
        await self._reach(host)
        home = host.home
        if home is None:
            raise RefusedError("it is no longer there", START)
        qemu = host.qemu_of(home)
        if qemu is not None:
            if qemu.runs:
                raise RefusedError("it runs already")
            await qemu.ask(qemu.cont)
            return
        if home.claim is not None and "R1" not in self.world.without:
            raise RefusedError("another host may run it", START)
        for left in host.qemus:
            left.end()
        await sleep(0.2)
        if not host.is_up:
            raise SilentError("it went down")
        boot(host)

    async def _move(self, on: Host | None) -> None:
        """drivers.direct.DirectVm.migrate: the guest goes on elsewhere, or is off there."""
        host = await self._find()
        there = on if on not in (None, host) else others_of(self._hosts, host)[0]
        if not runs(host):
            await self._require_decided(host)
        await self._reach(there)
        if not (self.has_lock(host) and self.has_lock(there)):
            raise RefusedError("another works on it")
        await sleep(0.3)
        await self._reach(host)
        await self._reach(there)
        home = host.home
        if home is None or there.home is not None:
            raise RefusedError("it is no longer there, or another is", START)
        if home.claim is not None:
            raise RefusedError("another host may run it", START)
        old = host.qemu_of(home)
        for left in there.qemus:
            left.end()
        there.home = Home(next(self.world.ids), home.disk, gone_replica=home.gone_replica)
        if old is not None:
            was_running = old.runs
            old.home = None
            old.end()
            new = Qemu(there, old.state, there.home)
            new.life, there.home.id = old.life, new.id
            if was_running:
                new.cont()
        host.home = None
        self.world.count("moved")

    async def _require_decided(self, host: Host) -> None:
        """operate.require_decided"""
        said, home = await self._side_of(host), host.home
        if home is None:
            return
        is_over = said is None or said.role != "primary" or said.state in ENDED
        if "R1" in self.world.without:  # as it was before that was fixed
            if said is None or said.role != "primary":
                return
            if said.state in ENDED and said.ending != "yours":
                return
        elif (home.claim is not None or took_over(host)) and is_over:
            await self._require_right(host)
            return
        elif said is None or (is_over and not has_left(said)) or not self._is_its(host):
            return
        files = host.files
        if said.state == DEAD and files is not None and await self._is_its_own(host):
            release = Recovery(host, files, at_any_rate=True)
            await self._while(lambda: release.is_alive, "not taken back", WAIT, STOP_GONE)
            if files.word is None:
                raise RefusedError("the term was not taken back", WAIT, STOP_GONE)
            await self._require_right(host)
            self.world.count("operator: start of what was its own")
            return
        raise RefusedError("a standby may be about to take over with it", FAILOVER, STOP)

    def _is_its(self, host: Host) -> bool:
        return is_of_home(host) or "back" in self.world.without

    async def _is_its_own(self, host: Host) -> bool:
        """operate._is_its_own"""
        home = host.home
        if home is None or home.claim is None or host.qemu_of(home) is not None:
            return False
        try:
            return await self._ask_about(host) is Right.OURS
        except RefusedError:
            return False

    async def _require_right(self, host: Host) -> None:
        """claim.require_right"""
        home = host.home
        if home is None or holder_of(host, home) is None:
            return
        before = home.claim
        right = await self._ask_about(host)
        if right is not Right.OURS:
            raise refused(right)
        if home.claim == before:
            home.claim = None

    async def _protect(self, on: Host | None, at: Host | None = None) -> None:
        """begin.start, of a VM that was found `at` that host"""
        host = at or await self._find()
        standby = on if on not in (None, host) else others_of(self._hosts, host)[0]
        if host.begun_by is not None:
            raise RefusedError("another command begins to protect it")
        host.begun_by = self
        try:
            await self._begun(host, standby)
        finally:
            if host.begun_by is self:
                host.begun_by = None

    async def _begun(self, host: Host, standby: Host) -> None:
        home = host.home
        if home is None or (qemu := host.qemu_of(home)) is None:
            raise RefusedError("it does not run", START)
        if took_over(host):
            await self._require_right(host)
        await self._reach(standby)
        if home.replaces is not None and home.replaces[0] == standby.name:
            remove_stale_home(standby, home.replaces[1])
        await self._require_new(host, standby)
        run, ends = next(self.world.runs), (host, standby)
        ours, theirs = Files("primary", run, ends, qemu.id), Files("standby", run, ends, qemu.id)
        try:
            standby.files = theirs
            Standby(standby, theirs)
            await sleep(0.3)
            await self._reach(standby)
            await self._reach(host)
            host.files = ours
            service = Primary(host, ours)
            while service.is_alive:
                await sleep(POLL_S)
                await self._reach(host)
                if service.has_ear and not service.is_frozen and service.is_safe:
                    return
            raise RefusedError("it could not be protected")
        except RefusedError:
            await self._undo(ours, theirs)
            raise

    async def _undo(self, ours: Files, theirs: Files) -> None:
        host, standby, is_over = ours.primary, ours.standby, False
        try:
            if host.files is ours:
                await self._until_gone(host, lambda service: tell_primary(service, "stop"))
                await self._while(lambda: bool(host.find(Recovery)), "recovery goes on")
                host.files = None
                is_over = True
        except RefusedError as exc:
            self.world.note(f"operator: undo, {exc}")
        try:
            await self._until_gone(standby, dismiss)
            if not await end_waiting(self, standby):
                return
            said = theirs.word
            if standby.home is not None or (said is not None and said.state == PROMOTED):
                return
            if standby.files is theirs:
                standby.files = None
            if is_over and host.home is not None:
                host.home.claim = None
        except RefusedError as exc:
            self.world.note(f"operator: undo, {exc}")

    async def _require_new(self, host: Host, standby: Host) -> None:
        home = host.home
        if home is None:
            raise RefusedError("it is no longer there", START)
        old = home.replaces[0] if home.replaces else None
        found = [
            (one, said) for one in (host, standby) if (said := await self._side_of(one)) is not None
        ]
        is_its_own = home.claim is not None or is_of_home(host)
        has_ended = {
            said.run
            for _, said in found
            if said.role == "primary" and said.state in ENDED and not has_left(said)
        }
        for one, said in found:
            is_dead = said.state == DEAD
            was_replaced = is_dead and said.role == "primary" and one.name == old
            was_lost = is_dead and said.role == "standby" and said.run in has_ended
            is_left = one is host and has_left(said) and is_its_own
            is_over = said.state in ENDED and not is_left
            if said.answers or not (was_replaced or was_lost or is_over):
                raise RefusedError("it is being replicated", STOP)
            if was_lost:
                await end_waiting(self, one)
            if one is host and took_over(host) and "anew" not in self.world.without:
                try:
                    await take_anew(host)
                except VmckptError as exc:
                    raise RefusedError("it cannot be protected", WAIT) from exc
            one.files = None

    # -- replicate failover ----------------------------------------------------------------------

    async def _failover(self, *, is_dead: bool = False) -> None:
        """operate.failover"""
        found = await self._sides()
        host, said = self._standby_of(found)
        if said.state != PROMOTED and not _died_in_it(host, said):
            said = await self._taken_over(host, said, found, is_dead=is_dead)
        try:
            await self._settle()
        except SilentError as exc:
            self.world.note(f"operator: {exc}")
        if not said.ran and not runs(host):
            raise RefusedError("the guest is there, and does not run", START)

    def _standby_of(self, found: list[Side]) -> Side:
        of_now = [
            side
            for side in found
            if side[1].role == "standby"
            if side[1].state != PROMOTED or is_at_home(*side)
        ]
        primaries = [said for _, said in found if said.answers and said.role == "primary"]
        if primaries:
            of_now = [side for side in of_now if side[1].run in {said.run for said in primaries}]
            if not of_now:
                raise RefusedError("its standby says nothing of it")
        if not of_now:
            raise RefusedError("it is not replicated", PROTECT)
        return min(of_now, key=lambda side: (side[1].state != PROMOTED, not side[1].answers))

    @staticmethod
    def _require_dead(primary: Host) -> None:
        """operate._take_alone"""
        word = primary.files.word if primary.files is not None else None
        is_newer = word is not None and word.role == "primary" and not has_left(word)
        if primary.answers and (is_newer or primary.qemu_of(primary.home) is not None):
            raise RefusedError("the primary is not dead", STOP)

    async def _taken_over(
        self, standby: Host, said: Said, found: list[Side], *, is_dead: bool
    ) -> Said:
        for host, one in found:
            if one.answers and one.role == "primary" and one.run == said.run:
                if one.state == COPYING:
                    raise RefusedError("it is still being copied")
                await self._ask_primary(host, "failover", TIMEOUT_S)
        if is_dead:
            for other in others_of(self._hosts, standby):
                self._require_dead(other)
        await self._reach(standby)
        for service in self._services(standby):
            if isinstance(service, Standby) and service.has_ear:
                service.later(0.0, service.take_alone if is_dead else service.fail_over)
        await self._while(
            lambda: self.sees(standby) and bool(self._services(standby)),
            "it has not taken over yet", WAIT, STOP, FAILOVER_DEAD,
        )  # fmt: skip
        await self._reach(standby)
        word = standby.files.word if standby.files is not None else None
        if word is None or word.state != PROMOTED:
            raise RefusedError("the standby did not take it over")
        return word


def _died_in_it(host: Host, said: Said) -> bool:
    """operate._died_in_it"""
    home, files = host.home, host.files
    if said.answers or home is None or files is None or files.role != "standby":
        return False
    return home.replaces == (files.primary.name, files.primary_id)
