"""The checkpoint history that moves with a VM: `vms/VM/checkpoint` on its host."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Self

from vmckpt.checkpoint.catalogue.location import StoreLocation, own, parse_location
from vmckpt.codec import convert, require_within
from vmckpt.errors import NotFoundError, UsageError
from vmckpt.foreign import MalformedError, parse
from vmckpt.hosts.host import Host
from vmckpt.store.backends.locations import is_url
from vmckpt.store.files.manifest import MOST_SEQUENCE


@dataclass(frozen=True, slots=True)
class History:
    """`last`: the checkpoint last taken or restored, the parent of the next one.

    `sequence` is the largest number of any of its checkpoints (`store.manifest`). `stores` are
    those it was taken into besides hosts' own: `s3://...`, or `HOST:DIRECTORY`. `version` is the
    store's version of `last` (`Backend.versions`) if `last` was taken rather than restored; it
    reveals a checkpoint that replaced it. "": not known.
    """

    last: str | None = None
    stores: tuple[str, ...] = ()
    sequence: int = 0
    version: str = ""

    def __post_init__(self) -> None:
        require_within("sequence", self.sequence, MOST_SEQUENCE)

    @classmethod
    def parse(cls, text: str | None) -> Self:
        """Parse the file; a missing or damaged one gives an empty history."""
        try:
            found = parse(text or "")
            history = convert(cls, found)
            return history if "stores" in found else cls()
        except MalformedError:
            return cls()

    @property
    def text(self) -> str:
        """The file's content."""
        return json.dumps(asdict(self))

    def then(
        self,
        checkpoint_id: str,
        host: Host,
        location: str,
        sequence: int | None = None,
        version: str = "",
    ) -> "History":
        """The history after `host` took or restored a checkpoint in the store at `location`."""
        largest = max(self.sequence, sequence or 0)
        name = location
        if not is_url(location):
            if location == own(host).path:
                return History(checkpoint_id, self.stores, largest, version)
            name = f"{host.name}:{location}"
        others = tuple(one for one in self.stores if one != name)
        return History(checkpoint_id, (*others, name), largest, version)

    def locations(self, home: Host) -> Sequence[StoreLocation]:
        """Where to search for a VM now on `home`, which may share a directory of another host."""
        found: list[StoreLocation] = []
        for text in self.stores:
            try:
                location = parse_location(text)
                found.append(location)
            except NotFoundError:  # the host is no longer in the inventory
                location = StoreLocation(home, text.partition(":")[2])
            except UsageError:  # a host recorded an invalid location
                continue
            if location.host is not None:
                found.append(StoreLocation(home, location.path))
        return found
