"""An open store: the state that all its operations share."""

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
# Concurrent requests.
REQUESTS = 16


@dataclass(frozen=True, slots=True)
class Opened:
    """`pool` is for work that releases Python's lock: compressing, and reading."""

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
        """Whether each read is a network request, and several may run concurrently."""
        return self.backend.is_remote

    def at_once(self, work: Callable[[T], R], each: Iterable[T]) -> list[R]:
        """The results of `work` for each, in order; run concurrently if that is faster."""
        if not self.is_remote:
            return list(map(work, each))
        with ThreadPoolExecutor(REQUESTS, thread_name_prefix="store requests") as threads:
            return list(threads.map(work, each))
