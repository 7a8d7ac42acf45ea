"""What a VM has with it of its checkpoints, wherever it moves: `vms/VM/checkpoint` on its host."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Self

from vmckpt.checkpoint.catalogue.place import StoreLocation, own, parse_place
from vmckpt.codec import convert, require_within
from vmckpt.errors import NotFoundError, UsageError
from vmckpt.foreign import MalformedError, parse
from vmckpt.hosts.host import Host
from vmckpt.store.backends.locations import is_url
from vmckpt.store.files.manifest import MOST_SEQUENCE


@dataclass(frozen=True, slots=True)
class History:
    """`last`: what it was last taken or restored as, the next one's parent.

    `sequence` is the largest number that a checkpoint of it has (`store.manifest`).
    `stores` are those that it was taken into besides hosts' own: `s3://...`, or `HOST:DIRECTORY`.
    """

    last: str | None = None
    stores: tuple[str, ...] = ()
    sequence: int = 0

    def __post_init__(self) -> None:
        require_within("sequence", self.sequence, MOST_SEQUENCE)

    @classmethod
    def parse(cls, text: str | None) -> Self:
        """Of its file, which may be missing, or damaged: then nothing is known."""
        try:
            found = parse(text or "")
            history = convert(cls, found)
            return history if "stores" in found else cls()
        except MalformedError:
            return cls()

    @property
    def text(self) -> str:
        """For its file."""
        return json.dumps(asdict(self))

    def then(
        self, checkpoint_id: str, host: Host, place: str, sequence: int | None = None
    ) -> "History":
        """After a checkpoint was taken, or restored, by `host` from the store at `place`."""
        largest = max(self.sequence, sequence or 0)
        name = place
        if not is_url(place):
            if place == own(host).path:
                return History(checkpoint_id, self.stores, largest)
            name = f"{host.name}:{place}"
        others = tuple(one for one in self.stores if one != name)
        return History(checkpoint_id, (*others, name), largest)

    def places(self, home: Host) -> Sequence[StoreLocation]:
        """Where to look, for a VM that is on `home` now: a directory may be one that it shares."""
        found: list[StoreLocation] = []
        for text in self.stores:
            try:
                place = parse_place(text)
                found.append(place)
            except NotFoundError:  # the inventory has no such host any more
                place = StoreLocation(home, text.partition(":")[2])
            except UsageError:  # a host wrote what is no store
                continue
            if place.host is not None:
                found.append(StoreLocation(home, place.path))
        return found
