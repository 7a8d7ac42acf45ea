"""A store that was opened: what all that works on it shares."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from vmckpt.store.bundles.bundled import BundledBackend
from vmckpt.store.damage.elsewhere import Elsewhere
from vmckpt.store.damage.records import DamageRecords
from vmckpt.store.files.checkpoint_file import CheckpointFiles
from vmckpt.store.files.pack import Packs
from vmckpt.store.sealing.seal import Sealer

T = TypeVar("T")
R = TypeVar("R")
# Under way at once.
REQUESTS = 16


@dataclass(frozen=True, slots=True)
class Opened:
    """`pool` is for what lets go of Python's lock: compressing, and reading."""

    secret: bytes
    backend: BundledBackend
    sealer: Sealer
    files: CheckpointFiles
    packs: Packs
    records: DamageRecords
    elsewhere: Elsewhere
    pool: ThreadPoolExecutor

    @property
    def is_remote(self) -> bool:
        """Whether each read takes a request over a network, and several may be under way."""
        return self.backend.is_remote

    def at_once(self, work: Callable[[T], R], each: Iterable[T]) -> list[R]:
        """What `work` gives for each, in order; where that is faster, for several at once."""
        if not self.is_remote:
            return list(map(work, each))
        with ThreadPoolExecutor(REQUESTS, thread_name_prefix="store requests") as threads:
            return list(threads.map(work, each))
