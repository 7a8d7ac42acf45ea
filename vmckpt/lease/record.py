"""The arbiter's record of one VM: the term, its holder, and which replica may take over."""

import json
from dataclasses import asdict, dataclass, fields

from vmckpt.codec import convert
from vmckpt.errors import StorageError, UsageError
from vmckpt.foreign import MalformedError, parse

FORMAT = 1


@dataclass(frozen=True, slots=True)
class LeaseSpan:
    """How long a lease lasts, and how far two clocks may diverge in that time.

    `drift` is a rate: clocks of holder and claimant each run at 1 +- `drift` of true time.
    """

    duration_s: float
    drift: float = 0.01

    def __post_init__(self) -> None:
        if not (0.0 < self.duration_s < 86400.0 and 0.0 <= self.drift < 0.5):
            raise UsageError(
                f"a lease cannot last {self.duration_s} s with a drift of {self.drift}",
                why="the duration is above 0 and below a day, the drift from 0 to below 0.5",
                remedy="give e.g. a duration of 1 s and a drift of 0.01",
            )

    @property
    def holder_s(self) -> float:
        """What its holder may rely on, counted from the moment before its request."""
        return self.duration_s * (1.0 - self.drift)

    @property
    def claimant_s(self) -> float:
        """How long a claimant waits, from the moment it saw the last renewal."""
        return self.duration_s * (1.0 + self.drift)


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """One state of a VM's record. No two writes of it are alike: `attempt` counts its holder's.

    `holder` names one run of one process. `in_sync` is the replica that may take over; None: there
    is none ("solo, standby stale"). `released`: the holder stopped the guest and gave the term up.
    """

    term: int
    holder: str
    attempt: int
    span: LeaseSpan
    in_sync: str | None = None
    released: bool = False

    def __post_init__(self) -> None:
        if self.term <= 0:
            raise ValueError(f"no term is {self.term}")


def encode(record: LeaseRecord) -> str:
    """The record as text (JSON)."""
    return json.dumps({"format": FORMAT, **asdict(record)}, separators=(",", ":"))


def decode(data: bytes | str, where: str) -> LeaseRecord:
    """Decode what `encode` wrote. Raises StorageError, which says `where` it was stored."""
    try:
        value = parse(data)
        if not isinstance(value, dict) or value.pop("format", None) != FORMAT:
            raise MalformedError("it has the format of another version of vmckpt")
        # Never guess a term: unlike other records it has no field too few or too many.
        if value.keys() != {field.name for field in fields(LeaseRecord)}:
            raise MalformedError("fields are missing or unknown")
        return convert(LeaseRecord, value)
    except (MalformedError, UsageError) as exc:
        raise StorageError(
            f"{where} holds no lease",
            why=str(exc),
            remedy="install the same vmckpt everywhere; if the record was damaged, stop every "
            "protection of the VM, make sure that it runs only once, and remove the record",
        ) from exc
