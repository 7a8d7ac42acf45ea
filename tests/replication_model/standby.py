"""The standby's service: replicate/{standby,following,takeover}.py.

Its Lease and its `decide` are the product's own.
"""

import math
from contextlib import suppress
from typing import TYPE_CHECKING

from tests.replication_model.machine import Files, Home, Host, Said
from tests.replication_model.process import POLL_S, Proc, Task, Wire
from tests.replication_model.qemu import Qemu
from tests.replication_model.recovery import Abandon, give_up_term
from tests.replication_model.world import Signal, State, sleep, wait
from vmckpt.errors import RefusedError, VmckptError
from vmckpt.lease.rule import Claimant, Holding
from vmckpt.lease.standby import Fencing, StandbyMove, StandbyView, decide, is_left_to
from vmckpt.replicate.channel import ALONE, GUEST_OFF, STOPPED, TAKEN
from vmckpt.replicate.control import TIMEOUT_S
from vmckpt.replicate.primary.keeper import GIVEN_UP_S
from vmckpt.replicate.standby.following import LOST
from vmckpt.replicate.standby.takeover import COPY_SILENCE_S, MARGIN_S, SILENCE_S
from vmckpt.replicate.status import PROMOTED

if TYPE_CHECKING:
    from tests.replication_model.primary import Primary

NOT_LOADED = "a standby cannot load the guest"
LOOK_S, TICK_S, COME_S, FENCE_S = 0.5, 0.1, 60.0, 1.0


class Standby(Proc):
    """One protection's service on the host that may take over."""

    def __init__(self, host: Host, files: Files) -> None:
        super().__init__(host)
        self.files = files
        files.service = self
        self.name = f"{host.name}/{files.run}"
        self._lease = host.lease(Claimant(self.name, replica=self.name))
        self.has_ear = self.awaits = False
        self._is_dismissed = self._is_asked = self._is_promoting = self._may_have_run = False
        self._alone_until_s = -math.inf
        self._has_run = False
        self._woken = Signal()
        self._wire: Wire | None = None
        self._primary: Primary | None = None
        self._is_welcome = False
        self._receiving = ""  # how that ended
        self._term = 0
        now_s = host.clock()
        self._heard_s: list[float] = [now_s, -math.inf]
        self._epoch_s = now_s
        self.state: State | None = None
        self._life = 0
        self._fencing = Fencing.READY
        self._dead: Holding | None = None
        self._ended = ""
        self.warm: Qemu | None = None
        self._main: Task = self.begin(self._serve())

    # -- its life --------------------------------------------------------------------------------

    async def _serve(self) -> None:
        host = self.host
        if not self.has_lock(host) or host.home is not None:
            self.world.note(f"{self} does not begin: locked, or a VM is at home there")
            self.end()
            return
        for qemu in host.qemus:
            qemu.end()
        self.warm = Qemu(host, (0, 0), None)
        self.has_ear = self.awaits = True
        until_s = self.world.now_s + COME_S
        while self._primary is None and not self._is_dismissed and self.world.now_s < until_s:
            await wait(self._woken, until_s - self.world.now_s)
        if self._primary is not None:
            await self._follow(self.warm)
        await self._finish()

    def gone(self) -> None:
        if self._wire is not None:
            self._wire.close(self)

    def killed(self) -> None:
        self.world.note(f"{self} was killed")
        Abandon(self.host, self.files)

    def terminate(self) -> None:
        if not (self._is_promoting or self._ended):
            self._main.cancel()
            self._main = self.begin(self._finish())

    async def _finish(self) -> None:
        if self._may_have_run:
            self._ended = PROMOTED
        else:
            self._ended = "ended"
            if self._lease.has_requested:
                giving_up = self.begin(self._give_up_term())
                until_s = self.world.now_s + GIVEN_UP_S
                while not giving_up.is_done and self.world.now_s < until_s:
                    await wait(self.stirred, until_s - self.world.now_s)
                giving_up.cancel()
            if self.warm is not None:
                self.warm.end()
        self.files.word = self.status()
        self.world.count(f"{self} ends: {self._ended}")
        await sleep(0.01)
        self.end()

    async def _give_up_term(self) -> None:
        while self._lease.is_in_doubt and not self._is_ours():
            with suppress(VmckptError):
                await self._lease.read()
            await sleep(POLL_S)
        await give_up_term(self.host, self.files)

    def _is_ours(self) -> bool:
        seen = self._lease.seen
        return seen is not None and self.files.is_standbys(seen.now.record.holder)

    # -- what it hears ---------------------------------------------------------------------------

    def came(self, wire: Wire, primary: "Primary") -> None:
        self._wire, self._primary, self.awaits = wire, primary, False
        self._woken.set()

    def hear(self, kind: str, *what: object) -> None:
        if self._receiving:
            return
        self._heard_s[0] = self.host.clock()
        match kind, *what:
            case "epoch", int(number), (int(branch), int(step)), int(life):
                self._send("ack", number)
                if "apply" not in self.world.without or number % 2:
                    self.state, self._life = (branch, step), life
                self._epoch_s = self.host.clock()
                return
            case "hello", int(term):
                self._term = term
                self.begin(self._try())
                return
            case "fail", str(word):
                self._receiving = word
            case _:
                self._receiving = LOST
        self._woken.set()

    def hear_beat(self) -> None:
        """A heartbeat on each of the ways that are up. The primary decides nothing by one."""
        for path, up_from_s in enumerate(self.world.paths_up_from_s):
            if self.world.now_s >= up_from_s:
                self._now(self._note_heard, path)

    def _note_heard(self, path: int) -> None:
        self._heard_s[path] = self.host.clock()

    async def _try(self) -> None:
        """trial.try_means"""
        try:
            found = await self.host.read("web")
        except VmckptError:
            found = None
        primary = self._primary
        holding = (found.record.term, found.record.holder) if found else None
        if primary is None or holding != (self._term, primary.name):
            self._send("fail", "refused")
            self._receiving = ALONE
            self._woken.set()
        else:
            self._send("welcome", self.name)

    def _send(self, kind: str, *what: object) -> None:
        if self._wire is not None:
            self._wire.send(self, kind, *what)

    # -- what it does ----------------------------------------------------------------------------

    async def _follow(self, warm: Qemu) -> None:
        while True:
            await wait(self._woken, LOOK_S)
            if not warm.lives:
                self._send("fail", ALONE)
                return
            if self._receiving in (STOPPED, GUEST_OFF, ALONE):
                return
            if not self._is_due():
                continue
            if slow_s := self.world.plan.slow_s:
                await sleep(self.world.random.uniform(0.0, slow_s))
            move = await self._settled()
            if move is StandbyMove.PROMOTE:
                self._is_promoting = True
                await self._promote(warm)
            if move is not StandbyMove.FOLLOW:
                return

    def _is_due(self) -> bool:
        now_s, is_complete = self.host.clock(), self.state is not None
        patience_s = SILENCE_S if is_complete else COPY_SILENCE_S
        is_silent = now_s - self._heard_s[0] > patience_s
        is_idle = is_complete and now_s - self._epoch_s > self._lease.span.claimant_s
        return bool(self._receiving) or is_silent or is_idle or self._is_asked

    async def _settled(self) -> StandbyMove:
        while True:
            move = await self._next()
            if move in (StandbyMove.STALE, StandbyMove.STAND_DOWN):
                self.world.note(f"{self}: {move.name}")
                return move
            if move is StandbyMove.PROMOTE or (move is StandbyMove.FOLLOW and not self._receiving):
                return move
            try:
                await self._do(move)
            except VmckptError as exc:
                self.world.note(f"{self}: {move.name} failed, {exc.what}")
                await sleep(TICK_S)

    async def _next(self) -> StandbyMove:
        if self._lease.held_until_s < self.host.clock() + MARGIN_S:
            try:
                await self._lease.read()
            except VmckptError:
                return self._without_arbiter()
        held, heard_s = self._lease.held, [one for one in self._heard_s if one > -math.inf]
        view = StandbyView(
            me=self._lease.claimant,
            complete=self.state is not None,
            follows_term=self._term,
            heard_s=() if self._is_asked else tuple(heard_s),
            seen=self._lease.seen,
            fencing=self._fencing if self.world.proof else Fencing.NONE,
            dead=self._dead,
            term=held.term if held else 0,
            held_until_s=self._lease.held_until_s,
            replaced=self._lease.replaced,
        )
        return decide(view, now_s=self.host.clock(), margin_s=MARGIN_S, silence_s=SILENCE_S)

    def _without_arbiter(self) -> StandbyMove:
        """takeover.TakeOver._without_arbiter"""
        if self.state is None and "useless" not in self.world.without:
            return StandbyMove.STALE
        seen, me = self._lease.seen, self._lease.claimant
        is_heard = max(self._heard_s) > self.host.clock() - SILENCE_S
        is_stale = seen is not None and not (
            is_left_to(seen.now.record, me, self._term) or seen.now.record.holder == me.name
        )
        is_told = self.host.clock() < self._alone_until_s
        if not is_told or is_heard or is_stale or self.state is None:
            return StandbyMove.WAIT
        return StandbyMove.PROMOTE

    async def _do(self, move: StandbyMove) -> None:
        if move is StandbyMove.CLAIM:
            await self._lease.claim()
        elif move is StandbyMove.FENCE:
            self._fencing = Fencing.NONE
            await self._fence()
        elif move is StandbyMove.TAKE:
            await self._lease.take(self._dead)
        elif move is StandbyMove.RENEW:
            await self._lease.renew()
        else:
            await sleep(TICK_S)
            return
        self.world.note(f"{self}: {move.name}")

    async def _fence(self) -> None:
        replaced, primary = self._lease.replaced, self._primary
        if primary is None or replaced is None:
            return
        await sleep(FENCE_S)
        if self.world.random.random() >= self.world.proof:
            raise RefusedError("no proof", why="-", remedy="-")
        primary.kill()
        primary.qemu.end()
        self._dead = Holding(replaced.now.record.term, replaced.now.record.holder)

    async def _promote(self, warm: Qemu) -> None:
        world, host = self.world, self.host
        if self.state is None:
            raise RuntimeError("a part of an epoch was to be gone on from")
        await sleep(world.random.uniform(0.05, 0.3 + world.plan.slow_s))
        if warm.has_ended() or world.random.random() < max(world.trouble / 4, world.plan.unfit):
            world.count(NOT_LOADED)
            with suppress(VmckptError):
                await self._lease.give_up()
            return
        if await self._was_replaced():
            world.count("replaced while the guest was loaded")
            return
        warm.state = world.fork(self.state)
        warm.life = self._life
        files = self.files
        came_from = files.primary.name, files.primary_id
        host.home = warm.home = Home(warm.id, warm.state, came_from, files.run)
        if self._lease.held is None:
            host.home.gone_replica = self.name
            world.count("taken over without the arbiter")
        self._may_have_run = True
        world.count("taken over")
        await sleep(0.01)
        if warm.has_ended():
            return
        warm.cont()
        self._has_run = True
        self._send("fail", TAKEN)
        self._ended = PROMOTED
        self.files.word = self.status()

    async def _was_replaced(self) -> bool:
        """standby.Standby._was_replaced"""
        if self._lease.held is None or self.host.clock() < self._lease.held_until_s:
            return False
        with suppress(VmckptError):
            await self._lease.read()
        return self._lease.held is None

    # -- what it is asked ------------------------------------------------------------------------

    def dismiss(self) -> None:
        self._is_dismissed = True
        self._woken.set()

    def fail_over(self) -> None:
        self._is_asked = True
        self._woken.set()

    def take_alone(self) -> None:
        self._alone_until_s = self.host.clock() + TIMEOUT_S
        self.fail_over()

    def status(self) -> Said:
        qemu_id = self.warm.id if self.warm is not None else 0
        if self._ended:
            return self.files.say(self._ended, qemu_id=qemu_id, ran=self._has_run)
        return self.files.say("following", answers=True, qemu_id=qemu_id)
