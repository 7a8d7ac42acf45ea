"""Options and result of taking a checkpoint."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from vmckpt.checkpoint.facts import EPOCH, CheckpointFacts
from vmckpt.store.files.naming import IfTaken


@dataclass(frozen=True, slots=True)
class TakeOptions:
    """Options of a checkpoint.

    `id`, if given, makes the request idempotent: one checkpoint of that id is taken, however often
    it is requested. `if_taken`: what to do if the name is in use in the store (`IfTaken`).
    """

    name: str
    tags: Mapping[str, str]
    trigger: str
    max_pause_s: float
    kind: str = EPOCH
    id: str = ""
    if_taken: str = IfTaken.REFUSE.value
    site_key: str = ""


@dataclass(frozen=True, slots=True)
class TakenCheckpoint:
    """A committed checkpoint."""

    id: str
    facts: CheckpointFacts
    stored_bytes: int
    parent: str | None
    # Its previous checkpoint is in another store, so nothing of this one could be reused.
    apart: bool
    # Why this one reuses nothing of its parent: the store has lost part of it.
    damaged: str | None
    # Checkpoints of the same name that it replaced, and why one of them was not removed.
    replaced: tuple[str, ...] = ()
    not_replaced: str | None = None
    # What could not be removed from QEMU again after the checkpoint, or recorded for the VM.
    not_ended: str | None = None

    def to_json(self) -> dict[str, Any]:
        """As JSON, for the caller."""
        fields: dict[str, Any] = {"stored": self.stored_bytes, "parent": self.parent}
        fields |= {"apart": self.apart, "damaged": self.damaged}
        fields |= {"replaced": list(self.replaced), "not_replaced": self.not_replaced}
        fields["not_ended"] = self.not_ended
        facts = asdict(self.facts)
        if self.facts.domain is None:
            del facts["domain"]
        else:
            facts["domain"] = self.facts.shown()["domain"]
        return {"id": self.id, **fields, **facts}
