"""What a primary's service does epoch by epoch, and beside: replicate/{epochs,stream}.py.

The Keeper is the product's own.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.replication_model.machine import Files, Host
from tests.replication_model.process import ENFORCE_POLL_S, POLL_S, Proc, Task, Wire
from tests.replication_model.qemu import Qemu, QemuLostError
from tests.replication_model.world import Signal, State, sleep, wait
from vmckpt.errors import OperationFailedError
from vmckpt.replicate.channel import HEARTBEAT_S, TAKEN
from vmckpt.replicate.primary.ending import ProtectionEnding
from vmckpt.replicate.primary.epochs import DOUBT_S, PROBE_S, PROBES
from vmckpt.replicate.primary.keeper import TermKeeper

if TYPE_CHECKING:
    from tests.replication_model.standby import Standby

EPOCH_S, PAUSE_S = 0.6, 0.01
SILENT_S = DOUBT_S + PROBES * PROBE_S


class StandbyLostError(Exception):
    """As the product's."""


class Epochs(Proc):
    """A primary's service while it protects. `_lost_why`: how the connection was lost."""

    enforces = True
    qemu: Qemu
    _keeper: TermKeeper
    _keeping: Task

    def __init__(self, host: Host, files: Files) -> None:
        super().__init__(host)
        self.files, self.name = files, f"{host.name}/{files.run}"
        files.service = self
        self._asked: ProtectionEnding | None = None
        self.is_safe = self._is_taken = False
        self._lost_why = self._replica = ""
        self._number = self._acknowledged = 0
        self._woken = Signal()
        self._wire: Wire | None = None
        self._peer: Standby | None = None

    # -- in the background -----------------------------------------------------------------------

    async def _keep(self) -> None:
        try:
            await self._keeper.keep()
        except OperationFailedError as exc:
            self.world.note(f"{self}: {exc.why}")
        self._woken.set()

    async def _beat(self) -> None:
        while True:
            await sleep(HEARTBEAT_S)
            if self._peer is not None and self._peer.is_alive:
                self._peer.hear_beat()

    async def _wake_when_qemu_ends(self) -> None:
        await wait(self.qemu.ended, math.inf)
        self._woken.set()

    async def _enforce(self) -> None:
        """Protection._stop_without_right"""
        keeper, qemu = self._keeper, self.qemu
        while "R6" not in self.world.without:
            await sleep(ENFORCE_POLL_S)
            if not (qemu.lives and keeper.must_stop()):
                if qemu.is_sigstopped and not keeper.has_guard:
                    qemu.set(is_sigstopped=False)
                continue
            if qemu.answers:
                if qemu.runs:
                    qemu.stop()
            else:
                await sleep(1.0)
                if not self._is_answered() and not keeper.has_guard and keeper.must_stop():
                    qemu.end()

    def _is_answered(self) -> bool:
        return self.qemu.answers

    async def _epoch(self, *, resume_guest: bool = True) -> bool:
        """Epochs.one"""
        keeper, qemu = self._keeper, self.qemu
        if not qemu.lives:
            raise QemuLostError
        if not keeper.may_run():
            await sleep(POLL_S)
            return False
        if qemu.answers and not qemu.runs:
            await self._ask(qemu.cont)
            await sleep(0.02)
            return False
        await self._ask(self._pause)
        await sleep(PAUSE_S)
        if not qemu.lives:
            raise QemuLostError
        state = qemu.state
        if resume_guest:
            await self._ask(qemu.cont)
        self._number += 1
        number = self._number
        if keeper.unanswered_since_s is None:
            keeper.unanswered_since_s = self.host.clock()
        self._send("epoch", number, state, qemu.life)
        if "ack" in self.world.without:
            self._let_out(state)
        await self._until_acknowledged(number)
        if not self.is_safe:
            if not await keeper.in_sync(self._replica):
                return False
            self.is_safe = True
            self.world.count("in sync")
        if keeper.may_release(number) and qemu.is_held:
            await self._ask(lambda: self._let_out(state))
        return True

    def _pause(self) -> None:
        self.qemu.step()
        self.qemu.stop()

    def _let_out(self, state: State) -> None:
        if self.qemu.lives:
            self.world.release(self.qemu, state)

    async def _until_acknowledged(self, number: int) -> None:
        while self._acknowledged < number:
            if self._lost_why:
                raise StandbyLostError(self._lost_why)
            if self._keeper.is_silent():
                raise StandbyLostError("the standby is silent")
            if not self.qemu.lives and self._asked is None:
                raise QemuLostError
            await wait(self._woken, POLL_S)

    async def _ask(self, do: Callable[[], None]) -> None:
        """Have QEMU do it; one that is silent for too long is killed, if a standby could go on."""
        qemu, silent_s = self.qemu, 0.0
        if not qemu.lives:
            raise QemuLostError
        done = qemu.queue(do)
        while not done:
            await sleep(POLL_S)
            if not qemu.lives:
                raise QemuLostError
            is_lost = bool(self._lost_why) or self._keeper.is_silent()
            is_wanted = self.is_safe and (self._keeper.replaced.is_set() or not is_lost)
            silent_s = silent_s + POLL_S if is_wanted else 0.0
            if silent_s > SILENT_S and not done:
                self.world.note(f"{self} kills a QEMU that does not answer")
                qemu.end()

    # -- the connection --------------------------------------------------------------------------

    def is_lost(self) -> bool:
        """Whether the standby is, or has said its last word."""
        return bool(self._lost_why)

    def _send(self, kind: str, *what: object) -> None:
        if self._wire is not None:
            self._wire.send(self, kind, *what)

    def hear(self, kind: str, *what: object) -> None:
        match kind, *what:
            case "ack", int(number):
                self._acknowledged = self._keeper.acknowledged = number
                is_all = number == self._number
                self._keeper.unanswered_since_s = None if is_all else self.host.clock()
            case "welcome", str(replica):
                self._replica = replica
            case "fail", str(why):
                self._lost_why = self._lost_why or why
                self._is_taken = self._is_taken or why == TAKEN
            case _:
                self._lost_why = self._lost_why or "the connection has ended"
        self._woken.set()
