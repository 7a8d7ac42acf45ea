"""A store that was opened: what all that works on it shares."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from vmckpt.store.backends.backend import Backend
from vmckpt.store.checkpoint_file import Files
from vmckpt.store.damage.elsewhere import Elsewhere
from vmckpt.store.damage.records import DamageRecords
from vmckpt.store.pack import Packs
from vmckpt.store.sealing.seal import Sealer


@dataclass(frozen=True, slots=True)
class Opened:
    """`pool` is for what lets go of Python's lock: compressing, and reading."""

    secret: bytes
    backend: Backend
    sealer: Sealer
    files: Files
    packs: Packs
    records: DamageRecords
    elsewhere: Elsewhere
    pool: ThreadPoolExecutor
