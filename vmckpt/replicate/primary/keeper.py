"""Maintains the primary's right to run its VM: renews the lease, informs the guard, records
solo or in sync.

`lease/primary.py` decides. Once a replica may take over, the guard (epoch/guard.py) stops the guest
when the lease ends unrenewed, whatever this process is doing then.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import suppress

from vmckpt.epoch.load import LOAD_TIMEOUT_S
from vmckpt.errors import (
    OperationFailedError,
    OutcomeUnknownError,
    RefusedError,
    StorageError,
    VmckptError,
)
from vmckpt.lease.clock import boottime_s
from vmckpt.lease.lease import HeldTerm, Lease
from vmckpt.lease.primary import PrimaryMove, PrimaryView, decide, may_release, may_run
from vmckpt.lease.rule import Holding
from vmckpt.lease.store import ArbiterDownError
from vmckpt.replicate.channel import PATIENCE_S
from vmckpt.replicate.fencing.agent import TIMEOUT_S

# How long stopping the guest may take: the guard does it this long before the lease ends.
MARGIN_S = 0.25
RETRY_S, CHECK_S, TELL_S = 0.1, 0.05, 0.5
# By this time a standby that took the term and could not run the guest has given it up: it has
# fenced the primary or waited for its lease, tried to load the guest, and told the arbiter.
GIVEN_UP_S = TIMEOUT_S + LOAD_TIMEOUT_S + 5.0


class TermKeeper:
    """Until when the guest may run, and which of its output may leave."""

    def __init__(
        self,
        lease: Lease,
        tell_guard: Callable[[str], None],
        *,
        clock: Callable[[], float] = boottime_s,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._lease, self._tell_guard = lease, tell_guard
        self._clock, self._sleep = clock, sleep
        # One for all of `take_back`: a request that got no answer may have been executed.
        self._again: Lease | None = None
        self._term = 0
        # While no replica is entitled to the term the guest may run, with or without a lease.
        self._is_free, self._is_still = True, False
        # Whether a replica was ever entitled to it, or may have been.
        self.had_replica = False
        self._guard_died, self._told_s = "", clock()
        # What the operator has said: that no standby has the guest, and whether all hosts say so.
        self._is_said_alone = self._is_certain = False
        # Why the arbiter does not answer; "": it does.
        self.arbiter_fails = ""
        self.replaced = asyncio.Event()
        self.unanswered_since_s: float | None = None
        self.acknowledged = -1

    @property
    def term(self) -> int:
        """The term that is held."""
        return self._term

    @property
    def taken_by(self) -> str:
        """Which other service took the term over, as the arbiter last showed; "": none has it."""
        known = [lease for lease in (self._lease, self._again) if lease is not None]
        seen = [lease.seen.now for lease in known if lease.seen is not None]
        if not seen:
            return ""
        record = max(seen, key=lambda one: one.version).record
        is_ours = record.holder in {lease.claimant.name for lease in known}
        return "" if is_ours or record.released else record.holder

    @property
    def is_refuted(self) -> bool:
        """Whether the operator has said that no standby has the guest, and one took the term."""
        return self._is_said_alone and not self._is_certain and bool(self.taken_by)

    @property
    def _is_alone(self) -> bool:
        return self._is_said_alone and not self.is_refuted

    def view(self) -> PrimaryView:
        """The input of its decisions."""
        return PrimaryView(
            term=self._term,
            highest_term=self._lease.highest_term,
            held_until_s=self._lease.held_until_s,
            renew_from_s=self._lease.renew_from_s,
            standing=self._lease.standing,
            unanswered_since_s=self.unanswered_since_s,
            acknowledged=self.acknowledged,
        )

    async def take(self, dead: Holding | None) -> None:
        """Take the VM's next term. Raises as `Lease.take` does.

        No standby may take over yet: the guard learns of the lease from `in_sync` on.
        """
        held = await self._lease.take(dead)
        self._term = held.term

    async def keep(self) -> None:
        """Renew the lease until another was granted a higher term.

        Raises OperationFailedError when the guard has died.
        """
        while not self.replaced.is_set():
            if self._guard_died:
                raise OperationFailedError(
                    "the guard beside the VM has died, or is frozen",
                    why=f"{self._guard_died}; it would not stop the guest at the lease's end",
                    remedy="protect the VM again",
                )
            move = decide(
                self.view(), now_s=self._clock(), margin_s=MARGIN_S, patience_s=PATIENCE_S
            )
            if move is PrimaryMove.STAND_DOWN:
                self.replaced.set()
            elif move in (PrimaryMove.RENEW, PrimaryMove.STOP_GUEST):
                await self._renew()
            else:
                await self._sleep(CHECK_S)
            if self._clock() - self._told_s > TELL_S:
                self._tell()  # also to see that the guard answers

    async def _renew(self) -> None:
        try:
            await self._lease.renew()
            self.arbiter_fails = ""
            self._tell()
        except RefusedError:
            await self._settle()
        except (ArbiterDownError, OutcomeUnknownError, StorageError) as exc:
            await self._try_again(exc)

    async def _settle(self) -> None:
        """The term no longer seems to be ours: find out whose it is. An arbiter that was reset to
        an older state has forgotten that, and fails.
        """
        try:
            await self._lease.read()
        except VmckptError as exc:
            await self._try_again(exc)
            return
        if self._lease.highest_term > self._term or self._lease.held is None:
            self.replaced.set()

    async def in_sync(self, replica: str) -> bool:
        """`replica` may take over from now on; tries until the arbiter answers, or
        `continue_alone`.

        False when another has taken the term: this guest must not run again.
        """
        self._is_free = False
        self._tell()
        return await self._recorded(lambda: self._in_sync(replica))

    async def _in_sync(self, replica: str) -> HeldTerm:
        try:
            held = await self._lease.record_in_sync(replica)
        finally:  # without an answer it may have been recorded
            self.had_replica |= self._lease.is_in_doubt
        self.had_replica = True
        return held

    async def solo(self) -> bool:
        """From now on no replica may take over; like `in_sync`."""
        return await self._recorded(self._lease.record_solo)

    async def _recorded(self, record: Callable[[], Awaitable[HeldTerm]]) -> bool:
        while not (self.replaced.is_set() or self._is_said_alone):
            try:
                await record()
            except RefusedError:
                await self._settle()
            except (ArbiterDownError, OutcomeUnknownError, StorageError) as exc:
                await self._try_again(exc)
            else:
                self.arbiter_fails = ""
                self._tell()
                return True
        return self._is_alone

    async def _try_again(self, exc: VmckptError) -> None:
        self.arbiter_fails = f"{exc.what}: {exc.why}"
        await self._sleep(RETRY_S)

    def continue_alone(self, *, is_certain: bool) -> None:
        """No standby has the guest, or will have it: waits for the arbiter end.

        `is_certain`: all hosts say so. If not, the operator says so, which does not count once
        another took the term (`is_refuted`): what is here is older then, and does not run again. If
        it counts, no term is needed, and the guard releases a QEMU that it has held
        since the lease ended.
        """
        self._is_said_alone, self._is_certain = True, is_certain or self._is_certain
        if self._is_alone and not self._is_still:
            self.free()

    async def give_up(self) -> None:
        """The guest is dead here: a replica in sync may take over. Raises as `Lease.give_up`."""
        await self._lease.give_up()

    async def hand_over(self) -> None:
        """Release the term: the guest stays paused until `take_back`; a replica in sync may take
        it.

        If the arbiter does not answer, the replica gets it when the lease has expired.
        """
        self._is_still = True
        self._tell()
        with suppress(VmckptError):
            await self._lease.give_up()

    async def take_back(self, is_standbys: Callable[[str], bool]) -> bool:
        """After `hand_over`: hold the term again, no replica in sync, or need none
        (`continue_alone`).

        Tries until the arbiter answers. False when another has it: this guest must not run again.
        Nor may it if any other than its own standby gave the term up: that one had the guest from a
        host that came after us. An arbiter that knows of no term has forgotten ours, or is not
        mounted: wait for it.
        """
        again = self._again = self._again or self._lease.again()
        ours = (self._lease.claimant.name, again.claimant.name)
        while not self._is_said_alone:
            try:
                seen = await again.read()
                if seen is None:
                    self.arbiter_fails = "the arbiter has no record of a term"
                    await self._sleep(RETRY_S)
                    continue
                self.arbiter_fails = ""
                holder = seen.now.record.holder
                if holder not in ours and not is_standbys(holder):
                    return False
                self._term = (await again.take()).term
            except RefusedError as exc:
                if again.seen is None or again.seen.now.record.holder not in ours:
                    return False
                # The arbiter has no record yet, and our lease may still run, or it has lost the
                # record.
                await self._try_again(exc)
            except (ArbiterDownError, OutcomeUnknownError, StorageError) as exc:
                await self._try_again(exc)
            else:
                self._lease, self._is_still = again, False
                return True
        if self.is_refuted:
            return False
        self._is_still = False
        return True

    def is_silent(self) -> bool:
        """Whether the standby has left an epoch unanswered for too long."""
        since_s = self.unanswered_since_s
        return since_s is not None and self._clock() - since_s > PATIENCE_S

    def may_run(self) -> bool:
        """Whether the guest's vCPUs may run now."""
        return may_run(self.view(), now_s=self._clock(), margin_s=MARGIN_S)

    @property
    def has_guard(self) -> bool:
        """Whether the guard listens and answers, as far as is known."""
        return not self._guard_died

    def must_stop(self) -> bool:
        """Whether a replica may take over, and the lease, or the term, is gone."""
        return not (self._is_free or self.may_run())

    def may_release(self, epoch: int) -> bool:
        """Whether the output of `epoch` may leave now."""
        return may_release(self.view(), epoch, now_s=self._clock(), margin_s=0.0)

    def free(self) -> None:
        """The guest may run without limit: no replica may take over."""
        self._is_free = True
        self._tell()

    def _tell(self) -> None:
        until_s = math.inf if self._is_free else self._lease.held_until_s - MARGIN_S
        if self._is_still:
            until_s = 0.0
        self._told_s = self._clock()
        try:
            self._tell_guard(f"{until_s:.3f}")
        except OSError as exc:
            self._guard_died = exc.strerror or str(exc)
