"""Where records are kept: a register per VM that changes only over a version that was seen."""

from dataclasses import dataclass
from typing import Protocol

from vmckpt.errors import HostDownError
from vmckpt.lease.record import LeaseRecord

# The version of a VM that has no record yet.
NONE_YET = 0


@dataclass(frozen=True, slots=True)
class Versioned:
    """A record as it stands in the store. Versions only grow, and each is of one write."""

    record: LeaseRecord
    version: int


class ArbiterDownError(HostDownError):
    """The store gives no answer, or has no quorum: nothing is granted, nothing was changed."""


class RecordStore(Protocol):
    """A store of records. Every question ends within the store's time limit.

    It need have no clock: a claimant waits by its own (see `rule`), so that a store that was
    restarted, or elected another leader, cannot grant too early.
    """

    async def read(self, vm: str) -> Versioned | None:
        """What stands there now; None: no term of this VM was ever granted.

        Raises ArbiterDownError, StorageError (it stands there, but cannot be understood).
        """

    async def replace(self, vm: str, record: LeaseRecord, *, over: int) -> Versioned:
        """Put `record` where version `over` stands (NONE_YET: where nothing does), durably.

        Returns what stands there afterwards: `record` if it was put there, by this call, else what
        another has put there first. Raises ArbiterDownError (nothing was changed),
        OutcomeUnknownError (it may yet be, at any later time, until something else is put there),
        StorageError.
        """
