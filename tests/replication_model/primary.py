"""The primary's service: its life and its endings, as replicate/{primary,protection}.py."""

import math
from typing import TYPE_CHECKING

from tests.replication_model.epochs import EPOCH_S, Epochs, StandbyLostError
from tests.replication_model.machine import Files, Home, Host, Said
from tests.replication_model.process import POLL_S, Wire
from tests.replication_model.qemu import Guard, QemuLostError
from tests.replication_model.recovery import Recovery, ask_about
from tests.replication_model.world import sleep, wait
from vmckpt.errors import VmckptError
from vmckpt.lease.rule import Claimant, Holding, Right
from vmckpt.replicate.channel import ALONE, GUEST_OFF, PATIENCE_S, STOPPED, YOURS
from vmckpt.replicate.control import GO_ALONE, GO_ALONE_UNLESS_TAKEN
from vmckpt.replicate.primary.ending import ProtectionEnding
from vmckpt.replicate.primary.keeper import GIVEN_UP_S, RETRY_S, TermKeeper
from vmckpt.replicate.primary.protection import TAKING_S
from vmckpt.replicate.status import COPYING, PROTECTED

if TYPE_CHECKING:
    from tests.replication_model.standby import Standby

COPY_S, CONNECT_S, HELLO_S = 0.5, 2.0, 10.0


class NotBegunError(Exception):
    """The service cannot begin."""


async def rest(seconds: float) -> None:
    """The Keeper's sleep, on a coarser grid."""
    await sleep(max(seconds, POLL_S))


class Primary(Epochs):
    """One protection's service on the VM's host."""

    def __init__(self, host: Host, files: Files) -> None:
        super().__init__(host, files)
        self._ending: ProtectionEnding | None = None
        self.has_ear = self._is_armed = self._is_ending = self._is_handing_over = False
        self._guard: Guard | None = None
        self._main = self.begin(self._serve())

    # -- its life --------------------------------------------------------------------------------

    async def _serve(self) -> None:
        try:
            home = await self._begin()
        except (NotBegunError, VmckptError) as exc:
            if self.host.home is not None and self.host.home.claim == self.name:
                self.host.home.claim = None
            self.world.note(f"{self} does not begin: {exc}")
            self._end_well()
            return
        await self._run(home)

    def _end_well(self) -> None:
        self._is_armed = False
        if self._guard is not None:
            self._guard.end()
        self.end()

    def gone(self) -> None:
        if self._wire is not None:
            self._wire.close(self)
        if self._guard is not None and self.host.is_up:
            self._guard.arrives(("ended",))

    def killed(self) -> None:
        self.world.note(f"{self} was killed")
        if self._is_armed:
            Recovery(self.host, self.files)

    def terminate(self) -> None:
        if not self.has_ear:  # it is cancelled, and undoes what it has begun
            if self.host.home is not None and self.host.home.claim == self.name:
                self.host.home.claim = None
            self._end_well()
        elif "R2" in self.world.without:
            if not self._is_ending:
                self._main.cancel()
                self._main = self.begin(self._ended_by_signal())
        else:
            self.later(0.0, self._hand_over_if_not_asked)

    def _hand_over_if_not_asked(self) -> None:
        if self._asked is None:
            self._asked = ProtectionEnding.YOURS
            self._woken.set()

    async def _ended_by_signal(self) -> None:
        """As it was before R2 was fixed."""
        await self._conclude(await self._settled(await self._go_on_alone()))

    async def _begin(self) -> Home:
        host, world = self.host, self.world
        if not self.has_lock(host):
            raise NotBegunError("another works on the VM")
        home = host.home
        qemu = host.qemu_of(home)
        if home is None or qemu is None:
            raise NotBegunError("it does not run here")
        if qemu.id != self.files.primary_id:
            raise NotBegunError("it has another QEMU now")
        self.qemu, self._guard = qemu, Guard(qemu)
        if home.claim is not None:
            answer = await ask_about(host, home)
            if answer is not Right.OURS:
                raise NotBegunError(f"{answer}")
            home.claim = None
        found = await host.read("web")
        claimant, dead = Claimant(self.name), None
        if found is not None:
            record = found.record
            if record.in_sync is not None and record.in_sync != home.gone_replica:
                home.listed_replica = record.in_sync
                raise NotBegunError(f"{record.in_sync} may take over from {record.holder}")
            claimant = Claimant(self.name, succeeds=record.holder)
            dead = Holding(record.term, record.holder)
        lease = host.lease(claimant)
        self._keeper = TermKeeper(lease, self._guard.tell, clock=host.clock, sleep=rest)
        await self._keeper.take(dead)
        home.gone_replica = home.listed_replica = None
        home.claim, self._is_armed = self.name, True
        self.term = self._keeper.term
        standby = self._standby()
        if standby is None or world.now_s < world.paths_up_from_s[0]:
            await sleep(CONNECT_S)
            raise NotBegunError("the standby cannot be reached")
        self._peer, self._wire = standby, Wire((self, standby))
        standby.came(self._wire, self)
        self._wire.send(self, "hello", self.term)
        until_s = world.now_s + HELLO_S
        while not self._replica:
            if self._lost_why or world.now_s > until_s or not qemu.lives:
                raise NotBegunError(self._lost_why or "it is not welcomed")
            await wait(self._woken, POLL_S)
        self.has_ear = True
        return home

    def _standby(self) -> "Standby | None":
        from tests.replication_model.standby import Standby

        files = self.files.standby.files
        if files is not None and files.run == self.files.run and files.service is not None:
            standby = files.service
            if isinstance(standby, Standby) and standby.is_alive and standby.awaits:
                return standby
        return None

    async def _run(self, home: Home) -> None:
        self._keeping = self.begin(self._keep())
        background = [self._keeping, self.begin(self._beat()), self.begin(self._enforce())]
        self.begin(self._wake_when_qemu_ends())
        try:
            ending = await self._protect()
        except StandbyLostError as exc:
            self.world.note(f"{self}: {exc}")
            ending = await self._go_on_alone()
        ending = await self._settled(ending)
        for task in background:
            task.cancel()
        await self._conclude(ending)

    async def _settled(self, ending: ProtectionEnding) -> ProtectionEnding:
        if ending is not ProtectionEnding.REPLACED:
            return ending
        if not self._keeper.had_replica:
            self.world.count("another took the term in the first copy")
            return await self._go_on_here()
        if await self._has_term_back():
            return await self._go_on_here()
        self.qemu.end()
        return ending

    async def _conclude(self, ending: ProtectionEnding) -> None:
        home = self.host.home
        if ending.is_settled and home is not None and home.claim is not None:
            home.claim = None
        self._ending = ending
        self.world.count(f"{self} ends: {ending.name}")
        self.files.word = self.status()
        await sleep(0.01)
        self._end_well()

    async def _protect(self) -> ProtectionEnding:
        try:
            await sleep(COPY_S)
            if self._is_asked() or self.is_lost():
                raise StandbyLostError("the first copy did not come to its end")
            if self.world.holds_output:
                await self._ask(lambda: self.qemu.set(is_held=True))
            while not self._is_asked():
                if self._keeper.replaced.is_set():
                    return ProtectionEnding.REPLACED
                if self.is_lost() or self._keeping.is_done:
                    raise StandbyLostError(self._lost_why or "nothing keeps the lease")
                if await self._epoch():
                    await wait(self._woken, EPOCH_S)
            if self._asked is ProtectionEnding.YOURS:
                return await self._hand_over()
            return await self._stop()
        except QemuLostError:
            return await self._qemu_gone(is_off=self.qemu.is_off)

    def _is_asked(self) -> bool:
        return self._asked is not None

    # -- endings: protection.Protection's --------------------------------------------------------

    async def _hand_over(self) -> ProtectionEnding:
        while not await self._epoch(resume_guest=False):
            if self._keeping.is_done and not self._keeper.replaced.is_set():
                raise StandbyLostError("nothing keeps the lease")
            if self._keeper.replaced.is_set():
                return ProtectionEnding.REPLACED
            if self._asked is not ProtectionEnding.YOURS:
                return await self._stop()
        self._is_handing_over = True
        await self._keeper.hand_over()
        self._send("fail", YOURS)
        until_s = self.world.now_s + TAKING_S
        while not self.is_lost() and self.world.now_s < until_s:
            patient_s = self.world.now_s + PATIENCE_S
            while not self.is_lost() and self.world.now_s < patient_s:
                await wait(self._woken, PATIENCE_S)
            is_gone = not self.qemu.lives and "gone" not in self.world.without
            if self.is_lost() or is_gone:
                continue
            if await self._takes_back():
                return await self._go_on_here()
        return await self._handed_over()

    async def _handed_over(self) -> ProtectionEnding:
        if not self._is_taken and await self._has_term_back():
            return await self._go_on_here()
        self.qemu.end()
        return ProtectionEnding.YOURS

    async def _has_term_back(self) -> bool:
        until_s = math.inf
        while self.world.now_s < until_s and self.qemu.lives:
            if self._is_taken or self._keeper.is_refuted:
                return False
            if await self._takes_back():
                return True
            until_s = min(until_s, self.world.now_s + GIVEN_UP_S)
            await rest(RETRY_S)
        return False

    async def _takes_back(self) -> bool:
        said: list[bool] = []

        async def take_back() -> None:
            said.append(await self._keeper.take_back(self.files.is_standbys))

        taking = self.begin(take_back())
        while not taking.is_done:
            is_gone = not self.qemu.lives and "gone" not in self.world.without
            if self._is_taken or is_gone:
                taking.cancel()
                return False
            await rest(RETRY_S)
        return said[0]

    async def _go_on_here(self) -> ProtectionEnding:
        self._send("fail", ALONE)
        self._abort()
        await self._release_guest()
        return ProtectionEnding.ALONE

    async def _qemu_gone(self, *, is_off: bool) -> ProtectionEnding:
        if is_off:
            if not await self._keeper.solo():
                return ProtectionEnding.REPLACED
            self._send("fail", GUEST_OFF)
            return ProtectionEnding.GUEST_OFF
        if not self.is_safe:
            await self._keeper.solo()
            self._send("fail", STOPPED)
            return ProtectionEnding.LOST
        return await self._dead_here()

    async def _dead_here(self) -> ProtectionEnding:
        self.qemu.end()
        try:
            await self._keeper.give_up()
        except VmckptError as exc:
            self.world.note(f"{self}: {exc.what}")
        self._send("fail", YOURS)
        return ProtectionEnding.YOURS

    async def _stop(self) -> ProtectionEnding:
        if ending := await self._not_solo():
            return ending
        self._send("fail", STOPPED)
        await self._release_guest()
        return ProtectionEnding.STOPPED

    async def _go_on_alone(self) -> ProtectionEnding:
        self._is_ending = True
        if self._is_handing_over:
            return await self._handed_over()
        if "solo" not in self.world.without and (ending := await self._not_solo()):
            return ending
        self._send("fail", ALONE)
        self._abort()
        await self._release_guest()
        return ProtectionEnding.ALONE

    async def _not_solo(self) -> ProtectionEnding | None:
        said: list[bool] = []

        async def solo() -> None:
            said.append(await self._keeper.solo())

        recording = self.begin(solo())
        while not recording.is_done:
            if self.is_safe and not self.qemu.lives:
                recording.cancel()
                return await self._dead_here()
            await rest(RETRY_S)
        return None if said[0] else ProtectionEnding.REPLACED

    async def _release_guest(self) -> None:
        self._keeper.free()
        qemu = self.qemu
        try:
            await qemu.ask(lambda: qemu.set(is_held=False, runs=True))
        except QemuLostError:
            return

    def _abort(self) -> None:
        if self._wire is not None:
            self._wire.abort(self)

    # -- what it is asked ------------------------------------------------------------------------

    def answer(self, word: str) -> None:
        """What the words that end it begin; it is done when the service has ended."""
        self._asked = ProtectionEnding.YOURS if word == "failover" else ProtectionEnding.STOPPED
        if word in (GO_ALONE, GO_ALONE_UNLESS_TAKEN):
            if self.host.home is not None:
                self.host.home.gone_replica = self._replica
            self._keeper.continue_alone(is_certain=word == GO_ALONE)
        self._woken.set()

    def status(self) -> Said:
        if self._ending is not None:
            return self.files.say("ended", ending=self._ending.name.lower())
        stage = PROTECTED if self.is_safe else COPYING
        fails = bool(self._keeper.arbiter_fails)
        return self.files.say(
            "alone" if self._is_ending else stage, answers=True, arbiter_fails=fails
        )
