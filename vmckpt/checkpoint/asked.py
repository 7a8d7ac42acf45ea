"""What is asked of a checkpoint, and what there is afterwards."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from vmckpt.checkpoint.facts import EPOCH, CheckpointFacts
from vmckpt.store.files.naming import IfTaken


@dataclass(frozen=True, slots=True)
class TakeOptions:
    """What is asked of a checkpoint.

    `id`, if given, is what it is to be called for good: then it is taken once, however often and by
    whomever it is asked for. `if_taken`: what is done when another of the VM's in the store has the
    name (`IfTaken`).
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
    """A checkpoint that is there now."""

    id: str
    facts: CheckpointFacts
    stored_bytes: int
    parent: str | None
    # Its last checkpoint is in another store: nothing of this one was there already.
    apart: bool
    # Why nothing of this one rests on its parent, whose store has lost some of it.
    damaged: str | None
    # Checkpoints of its name that went for it, and why one that was to go did not.
    replaced: tuple[str, ...] = ()
    not_replaced: str | None = None
    # What could not be taken away again of what QEMU was given for it.
    not_ended: str | None = None

    def to_json(self) -> dict[str, Any]:
        """For the one who asked."""
        told: dict[str, Any] = {"stored": self.stored_bytes, "parent": self.parent}
        told |= {"apart": self.apart, "damaged": self.damaged}
        told |= {"replaced": list(self.replaced), "not_replaced": self.not_replaced}
        told["not_ended"] = self.not_ended
        return {"id": self.id, **told, **asdict(self.facts)}
