"""The store of records: a register per VM that changes only over a version that was seen."""

from dataclasses import dataclass
from typing import Protocol

from vmckpt.errors import HostDownError
from vmckpt.lease.record import LeaseRecord

# The version of a VM that has no record yet.
NONE_YET = 0


@dataclass(frozen=True, slots=True)
class Versioned:
    """A stored record. Versions only grow, and each belongs to one write."""

    record: LeaseRecord
    version: int


class ArbiterDownError(HostDownError):
    """The store does not answer, or has no quorum: nothing is granted, nothing was changed."""


class RecordStore(Protocol):
    """A store of records. Every request ends within the store's time limit.

    It needs no clock: a claimant waits by its own (see `rule`), so a store that was restarted, or
    elected another leader, cannot grant too early.
    """

    async def read(self, vm: str) -> Versioned | None:
        """The current record; None: no term of this VM was ever granted.

        Raises ArbiterDownError, StorageError (the record cannot be understood).
        """

    async def replace(self, vm: str, record: LeaseRecord, *, over: int) -> Versioned:
        """Put `record` over version `over` (NONE_YET: if there is none), durably.

        Returns what is stored afterwards: `record` if this call put it there, otherwise what
        another process has put there first. Raises ArbiterDownError (nothing was changed),
        OutcomeUnknownError (it may yet be, at any later time, until something else is put there),
        StorageError.
        """
