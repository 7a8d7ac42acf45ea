"""The standby's takeover: whether it may run the guest, what is missing, and fencing.

`lease/standby.py` decides the next step from the arbiter's records and what was heard. The standby
takes the term before it fences the primary: a primary that continued alone has recorded that, and
is not fenced; one that wants to is refused. It takes no term before its disks have all writes:
until then a primary that is well, or its recovery, continues the guest.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable

from vmckpt.deadlines import poll
from vmckpt.errors import OperationFailedError, OutcomeUnknownError, VmckptError
from vmckpt.hosts.processes.process import ProcessId
from vmckpt.lease.clock import boottime_s
from vmckpt.lease.lease import Lease
from vmckpt.lease.rule import Holding
from vmckpt.lease.standby import Fencing, StandbyMove, StandbyView, decide, is_left_to
from vmckpt.replicate.channel import PATIENCE_S
from vmckpt.replicate.control import TIMEOUT_S
from vmckpt.replicate.fencing.agent import Agent, this_machine
from vmckpt.replicate.request import ReplicationRequest
from vmckpt.replicate.standby.following import LOST, Following
from vmckpt.replicate.standby.replica import Replica
from vmckpt.replicate.standby.trial import target_of
from vmckpt.replicate.wire.messages import Hello

# Twice as long as the primary waits before it continues alone: by now it has, if it can.
SILENCE_S, MARGIN_S = 2 * PATIENCE_S, 0.05
COPY_SILENCE_S = 60.0
TICK_S = 0.02
# After these moves the primary can no longer continue: do not make them for a QEMU that cannot.
_TAKING = (StandbyMove.CLAIM, StandbyMove.FENCE, StandbyMove.TAKE)


class TakeOver:
    """A standby's takeover of its primary's term; `requested`: requested by an operator.

    `lack`: why the waiting QEMU could not run the guest; empty if it can. `why`: the last obstacle;
    `arbiter_fails`: why the arbiter does not answer.
    """

    def __init__(
        self,
        request: ReplicationRequest,
        lease: Lease,
        replica: Replica,
        primary: Following,
        requested: asyncio.Event,
        *,
        lack: Callable[[], Awaitable[str]],
    ) -> None:
        self._request, self._lease, self._lack = request, lease, lack
        self._replica, self._primary = replica, primary
        self._fencing = Fencing.READY
        self._dead: Holding | None = None
        self._requested = requested
        self._alone_until_s = -math.inf
        # Read now: when it is needed there may be no free descriptor.
        self._machine = this_machine()
        self.why = self.arbiter_fails = ""

    def is_due(self, receiving: "asyncio.Future[str]") -> bool:
        """Whether to start: the primary is gone, silent, or without epochs, or it was requested.

        A primary that is heard but takes no epochs may be cut off from the arbiter: its lease
        expires, and its guest is paused.
        """
        # Until there is anything to take over, it only has to be noticed eventually.
        patience_s = SILENCE_S if self._replica.complete else COPY_SILENCE_S
        is_silent = boottime_s() - self._primary.heard_s > patience_s
        is_idle = self._replica.complete and (
            boottime_s() - self._primary.epoch_s > self._lease.span.claimant_s
        )
        return receiving.done() or is_silent or is_idle or self._requested.is_set()

    async def settled(self, receiving: "asyncio.Future[str]") -> StandbyMove:
        """The outcome: PROMOTE (the term is held, the primary can no longer act), FOLLOW (it is
        heard again), STALE or STAND_DOWN (this standby is no longer of use).
        """
        while True:
            move = await self._next(receiving)
            if move in (StandbyMove.STALE, StandbyMove.STAND_DOWN):
                if not self._replica.disks.is_sound:
                    self.why = f"{self._how_lost(receiving)}; the copies of its disks are unusable"
                    return StandbyMove.STAND_DOWN
                self.why = f"{self._how_lost(receiving)}; {move.value}"
                return move
            if move is StandbyMove.PROMOTE or (move is StandbyMove.FOLLOW and not receiving.done()):
                return move
            if move is StandbyMove.FOLLOW:
                self.why = f"{self._how_lost(receiving)}: waiting for its lease to expire"
            try:
                if move in _TAKING and (lack := await self._lack()):
                    self.why = f"{self._how_lost(receiving)}; the QEMU that waited here {lack}"
                    return StandbyMove.STAND_DOWN
                if move in _TAKING and not (self._replica.disks.is_idle and self._replica.complete):
                    lost = self._how_lost(receiving)
                    self.why = f"{lost}: waiting until its last disk writes are applied"
                    await asyncio.sleep(TICK_S)
                    continue
                await self._do(move)
            except VmckptError as exc:
                self.why = f"{exc.what}: {exc.why}"
                await asyncio.sleep(TICK_S)

    def continue_alone(self) -> None:
        """The operator has made sure that the primary is dead: no term is needed while the command
        waits, but not later.
        """
        self._alone_until_s = boottime_s() + TIMEOUT_S

    def _how_lost(self, receiving: "asyncio.Future[str]") -> str:
        primary = self._primary
        if receiving.done() and receiving.result() != LOST:
            return primary.why  # in its last word
        return (
            f"{primary.why or 'the primary is silent'}; {primary.second.diagnosis(primary.heard_s)}"
        )

    async def _next(self, receiving: "asyncio.Future[str]") -> StandbyMove:
        if self._lease.held_until_s < boottime_s() + MARGIN_S:
            try:
                await self._lease.read()
            except VmckptError as exc:
                self.arbiter_fails = f"{exc.what}: {exc.why}"
                self.why = f"no answer from the arbiter: {exc.why}"
                return await self._without_arbiter(receiving)
            self.arbiter_fails = ""
        is_heard = not receiving.done() or await self._service_lives()
        # The guest continues only from complete epochs.
        await poll(lambda: not self._replica.is_applying, every_s=TICK_S)
        return decide(
            self._view(is_heard=is_heard),
            now_s=boottime_s(),
            margin_s=MARGIN_S,
            silence_s=SILENCE_S,
        )

    async def _without_arbiter(self, receiving: "asyncio.Future[str]") -> StandbyMove:
        """PROMOTE if the operator says that the primary is dead, and nothing says otherwise.

        STALE without a complete epoch: no answer could make that one of use.
        """
        while self._replica.is_applying:  # noqa: ASYNC110
            await asyncio.sleep(TICK_S)
        if not self._replica.complete:
            return StandbyMove.STALE
        seen, me, since_s = self._lease.seen, self._lease.claimant, boottime_s() - SILENCE_S
        is_heard = max(self._primary.heard_by_path_s()) > since_s and (
            not receiving.done() or await self._service_lives()
        )
        is_stale = seen is not None and not (
            is_left_to(seen.now.record, me, self._primary.term) or seen.now.record.holder == me.name
        )
        is_known = boottime_s() < self._alone_until_s
        if not is_known or is_heard or is_stale:
            return StandbyMove.WAIT
        return StandbyMove.WAIT if await self._lack() else StandbyMove.PROMOTE

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
            await asyncio.sleep(TICK_S)

    def _view(self, *, is_heard: bool) -> StandbyView:
        held, hello = self._lease.held, self._primary.hello
        can_fence = hello is not None and (self._request.options.fence or self._is_here(hello))
        is_heard = is_heard and not self._requested.is_set()
        return StandbyView(
            me=self._lease.claimant,
            complete=self._replica.complete,
            follows_term=self._primary.term,
            heard_s=self._primary.heard_by_path_s() if is_heard else (),
            seen=self._lease.seen,
            fencing=self._fencing if can_fence else Fencing.NONE,
            dead=self._dead,
            term=held.term if held else 0,
            held_until_s=self._lease.held_until_s,
            replaced=self._lease.replaced,
        )

    async def _service_lives(self) -> bool:
        """Whether the service that closed the connection may be alive: then it goes solo itself.

        True also when this host cannot tell: then wait for the lease, and take nothing for dead.
        """
        hello = self._primary.hello
        if hello is None or not self._is_here(hello):
            return True
        service = hello.emitters[0]
        which = ProcessId(service.pid, service.start_ticks)
        try:
            return await self._request.primary.is_alive(which)
        except OutcomeUnknownError:
            return True

    async def _fence(self) -> None:
        """Kill everything that can act for the primary, with proof. Raises OperationFailedError."""
        replaced, hello = self._lease.replaced, self._primary.hello
        if hello is None or replaced is None:
            return
        holding = Holding(replaced.now.record.term, replaced.now.record.holder)
        if not self._is_here(hello):
            target = target_of(self._request, hello, holding)
            self._dead = (await Agent(self._request.options.fence).fence(target)).holding
            return
        for emitter in hello.emitters:
            which = ProcessId(emitter.pid, emitter.start_ticks)
            if not await self._request.primary.stop_for_good(which):
                raise OperationFailedError(
                    f"process {which.pid} of the primary does not end",
                    why="it survived SIGKILL",
                    remedy="it is stuck in the kernel: the standby waits until its lease expires",
                )
        self._dead = holding

    def _is_here(self, hello: Hello) -> bool:
        """Whether this kernel can kill the primary's processes, and knows whether they are dead.

        Both the operator and the primary must say so: another host could name processes of this
        one, and have them killed.
        """
        return self._request.one_machine and hello.machine == self._machine
