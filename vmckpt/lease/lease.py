"""One process's requests to the arbiter about one VM: look, take, renew, record, give up."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass

from vmckpt.errors import RefusedError, StorageError
from vmckpt.lease import rule
from vmckpt.lease.clock import boottime_s
from vmckpt.lease.primary import ReplicaStanding
from vmckpt.lease.record import LeaseRecord, LeaseSpan
from vmckpt.lease.rule import Claimant, Holding, SeenRecord
from vmckpt.lease.store import NONE_YET, ArbiterDownError, RecordStore, Versioned

Change = Callable[[LeaseRecord, int], LeaseRecord]


@dataclass(frozen=True, slots=True)
class HeldTerm:
    """A term that the arbiter confirmed as ours, and when our lease of it ends by our clock."""

    term: int
    until_s: float


class Lease:
    """What `claimant` knows of a VM's record, and the term it holds.

    All properties are as of the last answer. A request that got no answer, or whose caller was
    cancelled, counts as not granted *and* as possibly done. Calls queue up: there is one request at
    a time. Each raises what `RecordStore.read` and `RecordStore.replace` raise, and RefusedError
    when the record went back in time: its arbiter has forgotten what it granted.
    """

    def __init__(
        self,
        store: RecordStore,
        vm: str,
        claimant: Claimant,
        span: LeaseSpan,
        *,
        clock: Callable[[], float] = boottime_s,
    ) -> None:
        self.vm, self.claimant, self.span = vm, claimant, span
        self._store, self._clock = store, clock
        self._seen: SeenRecord | None = None
        self._held: HeldTerm | None = None
        self._is_given_up = False
        self._replaced: SeenRecord | None = None
        # Sent and not answered, each with the time before it was sent.
        self._pending: list[tuple[LeaseRecord, float]] = []
        self._attempt = 0
        self._one_at_a_time = asyncio.Lock()

    @property
    def seen(self) -> SeenRecord | None:
        """The record as last seen; None: no term was ever granted, or it was not read yet."""
        return self._seen

    @property
    def held(self) -> HeldTerm | None:
        """The term that is ours until its end, which may be past; None: we hold none."""
        return self._held

    @property
    def has_requested(self) -> bool:
        """Whether a term was ever requested, granted or not."""
        return self._attempt > 0

    @property
    def is_in_doubt(self) -> bool:
        """Whether a request may yet be executed: it has no answer, and no later write."""
        return bool(self._pending)

    @property
    def replaced(self) -> SeenRecord | None:
        """The record that our term replaced, and since when we had seen it unchanged.

        Its holder may still act until `rule.wait_s` of it is over.
        """
        return self._replaced

    @property
    def held_until_s(self) -> float:
        """When our lease ends; long ago if we have none."""
        return self._held.until_s if self._held else -math.inf

    @property
    def renew_from_s(self) -> float:
        """When a third of our lease is over."""
        if self._held is None or self._seen is None:
            return -math.inf
        return self._held.until_s - self._seen.now.record.span.holder_s * 2 / 3

    @property
    def highest_term(self) -> int:
        """The highest term that was seen granted; 0: none."""
        return self._seen.now.record.term if self._seen else 0

    @property
    def standing(self) -> ReplicaStanding:
        """Whether a replica may take over from us; UNSETTLED also if the term is not ours."""
        if self._held is None or self._seen is None:
            return ReplicaStanding.UNSETTLED
        possible = {self._seen.now.record.in_sync, *(record.in_sync for record, _ in self._pending)}
        if len(possible) > 1:
            return ReplicaStanding.UNSETTLED
        return ReplicaStanding.SOLO if possible == {None} else ReplicaStanding.IN_SYNC

    async def read(self) -> SeenRecord | None:
        """The current record, and since when we have seen it unchanged."""
        async with self._one_at_a_time:
            await self._read()
            return self._seen

    async def take(self, dead: Holding | None = None) -> HeldTerm:
        """Take the next term, as an entitled claimant, from a holder that can no longer act.

        `dead`: a holder that was proved dead. Renews a term that is already ours. Raises
        RefusedError (we are not entitled, the holder's lease may still run, another was faster).
        """
        return await self._take(lambda seen: self._require_free(seen, dead))

    async def claim(self) -> HeldTerm:
        """Claim the next term from a holder that may still act; raises as `take` does.

        From here on that holder can no longer record anything, least of all that it continues
        alone: so it may be fenced. The guest may run here once `wait_s` of `replaced` is over, not
        before.
        """
        return await self._take(self._require_entitled)

    async def _take(self, require: Callable[[SeenRecord], None]) -> HeldTerm:
        async with self._one_at_a_time:
            await self._read()
            self._is_given_up = False
            while True:
                record, over = self._next_term(require)
                held = await self._put(record, over=over)
                if held is not None:
                    return held

    async def renew(self) -> HeldTerm:
        """Hold the term for another span. Raises RefusedError when it is no longer ours."""
        return await self._rewrite(rule.renewed)

    async def record_in_sync(self, replica: str) -> HeldTerm:
        """`replica` may take over from now on. Also renews; raises as `renew` does.

        Call it only after the last output that `replica` has not seen has left; then no other
        output leaves unacknowledged until `record_solo` has returned.
        """
        return await self._rewrite(
            lambda record, attempt: rule.with_in_sync(record, replica, attempt)
        )

    async def record_solo(self) -> HeldTerm:
        """From now on no replica may take over. Also renews; raises as `renew` does.

        Output may leave unacknowledged once this has returned, not before.
        """
        return await self._rewrite(lambda record, attempt: rule.with_in_sync(record, None, attempt))

    async def give_up(self) -> None:
        """The guest is stopped here: the replica in sync may take the term at once.

        If there is none, any claimant may. From the call on the term counts as not ours. Raises as
        `renew`.
        """
        async with self._one_at_a_time:
            try:
                now = await self._ours()
            finally:
                # Whatever is answered from here on, even to an earlier request.
                self._held, self._is_given_up = None, True
            await self._put(rule.given_up(now.record, self._next()), over=now.version)

    def again(self) -> "Lease":
        """For the same guest, after `give_up`: take the term again unless another has it.

        The arbiter must not have forgotten then what was seen by now.
        """
        name = self.claimant.name
        claimant = Claimant(f"{name}/again", succeeds=name)
        again = Lease(self._store, self.vm, claimant, self.span, clock=self._clock)
        again._seen = self._seen
        return again

    async def _rewrite(self, change: Change) -> HeldTerm:
        async with self._one_at_a_time:
            # Again if an earlier request of ours was executed after all, and so came between.
            while True:
                now = await self._ours()
                held = await self._put(change(now.record, self._next()), over=now.version)
                if held is not None:
                    return held

    def _next_term(self, require: Callable[[SeenRecord], None]) -> tuple[LeaseRecord, int]:
        if self._seen is None:
            return rule.first(self.claimant, self.span, attempt=self._next()), NONE_YET
        now = self._seen.now
        if self._held is not None:
            return rule.renewed(now.record, self._next()), now.version
        require(self._seen)
        record = rule.taken(now.record, self.claimant, self.span, attempt=self._next())
        return record, now.version

    async def _ours(self) -> Versioned:
        """The record to write over. It is read again if a request has no answer yet, or our lease
        has ended: the record of its version may by now be another's, over an older copy.
        """
        if self._pending or (self._held is not None and self._held.until_s <= self._clock()):
            await self._read()
        if self._held is None or self._seen is None:
            holder = self._seen.now.record.holder if self._seen else "no host"
            raise RefusedError(
                f"the term of VM '{self.vm}' is not held here",
                why=f"the arbiter's last record names {holder}",
                remedy="stop the guest here; protect it again from where it runs",
            )
        return self._seen.now

    async def _read(self) -> None:
        found = await self._store.read(self.vm)
        if found is not None:
            self._note(found)
        elif self._seen is not None:
            raise _forgotten(self.vm, self._seen.now, "nothing")

    async def _put(self, record: LeaseRecord, *, over: int) -> HeldTerm | None:
        """Write it over that version; None if something else is stored there."""
        before_s = self._clock()
        question = (record, before_s)
        self._pending.append(question)
        try:
            found = await self._store.replace(self.vm, record, over=over)
        except (ArbiterDownError, StorageError):  # certainly not done
            self._pending.remove(question)
            raise
        self._note(found)
        if found.record != record:
            return None
        return HeldTerm(record.term, before_s + record.span.holder_s)

    def _note(self, found: Versioned) -> None:
        """Process an answer: the current record, and so which of our requests were executed."""
        answered_s, before = self._clock(), self._seen
        if self._seen is None:
            self._seen = SeenRecord(found, answered_s)
        elif found == self._seen.now:
            return
        elif found.version <= self._seen.now.version or found.record.term < self.highest_term:
            raise _forgotten(self.vm, self._seen.now, f"term {found.record.term}")
        else:
            self._seen = SeenRecord(found, answered_s)
        self._held = None
        for record, before_s in self._pending:
            if record == found.record and not (record.released or self._is_given_up):
                self._held = HeldTerm(record.term, before_s + record.span.holder_s)
                if before is not None and before.now.record.term < record.term:
                    self._replaced = before
        self._pending.clear()  # each was to replace an older version: it never will

    def _require_entitled(self, seen: SeenRecord) -> None:
        record = seen.now.record
        if not rule.is_entitled(record, self.claimant):
            raise RefusedError(
                f"term {record.term + 1} of VM '{self.vm}' is not for {self.claimant.name}",
                why=f"in sync with {record.holder} (term {record.term}) is "
                f"{record.in_sync or 'no replica: it runs alone'}",
                remedy="let the primary bring the replica up to date first",
            )

    def _require_free(self, seen: SeenRecord, dead: Holding | None) -> None:
        self._require_entitled(seen)
        record = seen.now.record
        wait_s = rule.wait_s(seen, now_s=self._clock(), dead=dead)
        if wait_s > 0:
            raise RefusedError(
                f"term {record.term} of VM '{self.vm}' may still be held",
                why=f"the lease of {record.holder} may run for another {wait_s:.3f} s",
                remedy="wait, or fence the primary",
            )

    def _next(self) -> int:
        self._attempt += 1
        return self._attempt


def _forgotten(vm: str, seen: Versioned, found: str) -> RefusedError:
    return RefusedError(
        f"the arbiter has forgotten what it granted for VM '{vm}'",
        why=f"it had term {seen.record.term} (version {seen.version}), now it has {found}: it "
        "was restored from an older copy, or the record was removed",
        remedy="stop every protection of the VM, make sure that it runs only once, and protect it "
        "again",
    )
