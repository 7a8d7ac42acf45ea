"""The lease rule: who may take a VM's term, when, and until when it is held. No I/O, no clock.

A holder notes the time s *before* it asks; if the arbiter accepted its write, the lease ends at
s + D(1-e) by the holder's clock. A claimant counts D(1+e) by its own clock from the moment it first
*saw* the record in its current version, and then asks for the next term over exactly that version.
So the arbiter's clock plays no part: any store with compare-and-swap will do, and a claimant that
was restarted counts from the start again, which is the wait that the rule requires after a restart.
Only positive proof that the holder is dead, or the holder's own release of the term, shortens it.

All times are `clock.boottime_s` of the deciding host.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from vmckpt.lease.record import LeaseRecord, LeaseSpan
from vmckpt.lease.store import Versioned


class Holding(NamedTuple):
    """A term, and the one run of one process that holds it: what a fencing agent proves dead."""

    term: int
    holder: str


@dataclass(frozen=True, slots=True)
class SeenRecord:
    """The arbiter's record, and since when the claimant has seen it unchanged."""

    now: Versioned
    since_s: float


@dataclass(frozen=True, slots=True)
class Claimant:
    """A process that asks for terms. `name` belongs to one run of one process, never used again.

    `replica`: what it has of the guest, if the record names it as in sync. `succeeds`: the holder
    whose guest it took over where it runs, on the same host (a service that was restarted).
    """

    name: str
    replica: str | None = None
    succeeds: str | None = None


def is_entitled(record: LeaseRecord, claimant: Claimant) -> bool:
    """Whether `claimant` may have the next term at all: it has all that clients have seen."""
    if record.in_sync is not None and record.in_sync == claimant.replica:
        return True
    if claimant.succeeds is not None and record.holder == claimant.succeeds:
        return True
    return record.released and record.in_sync is None


def wait_s(seen: SeenRecord, *, now_s: float, dead: Holding | None = None) -> float:
    """How long the holder may still believe that it holds the term; 0: it no longer can.

    `dead` is positive proof: that process will never act again.
    """
    record = seen.now.record
    if record.released or dead == Holding(record.term, record.holder):
        return 0.0
    return max(0.0, seen.since_s + record.span.claimant_s - now_s)


class Right(StrEnum):
    """Whether a guest that stopped on its former primary may run there again."""

    OURS = "the term is this host's, or its standby gave it up, and no replica may take over"
    PENDING = "a replica may take over at any moment"
    ELSEWHERE = "another host took the term"
    FORGOTTEN = "the arbiter has no record of the VM"


def right_of(record: LeaseRecord | None, holder: str, standby: str) -> Right:
    """The right of `holder` (the primary's service), and of what acts for it after its death.

    If its own `standby` released the term, the guest never ran there. If another service did, the
    guest has run elsewhere since.
    """
    if record is None:
        return Right.FORGOTTEN
    is_given_up = record.released and acts_for(standby, record.holder)
    if not (acts_for(holder, record.holder) or is_given_up):
        return Right.ELSEWHERE
    return Right.OURS if record.in_sync is None else Right.PENDING


def acts_for(service: str, holder: str) -> bool:
    """Whether that is the service, or what acts for it after its death."""
    return holder == service or holder.startswith(f"{service}/")


def first(claimant: Claimant, span: LeaseSpan, *, attempt: int) -> LeaseRecord:
    """The record of a VM whose term was never granted."""
    return LeaseRecord(term=1, holder=claimant.name, attempt=attempt, span=span)


def taken(record: LeaseRecord, claimant: Claimant, span: LeaseSpan, *, attempt: int) -> LeaseRecord:
    """The record of the next term, `claimant`'s, without a replica in sync."""
    return LeaseRecord(term=record.term + 1, holder=claimant.name, attempt=attempt, span=span)


def renewed(record: LeaseRecord, attempt: int) -> LeaseRecord:
    """The same record, written again: all count from here."""
    return replace(record, attempt=attempt)


def with_in_sync(record: LeaseRecord, replica: str | None, attempt: int) -> LeaseRecord:
    """The same record with another replica that may take over; None: "solo, standby stale"."""
    return replace(record, attempt=attempt, in_sync=replica)


def given_up(record: LeaseRecord, attempt: int) -> LeaseRecord:
    """The same record, released: any entitled claimant may take the next term at once."""
    return replace(record, attempt=attempt, released=True)
