"""An epoch: all changes in a VM since the previous epoch, as of one moment."""

from dataclasses import dataclass
from typing import NamedTuple

from vmckpt.memory.ram_file import PAGE_BYTES, Span


@dataclass(frozen=True, slots=True)
class Pages:
    """Pages of the RAM file: spans, and their contents in sequence."""

    spans: tuple[Span, ...]
    data: bytes

    @property
    def count(self) -> int:
        """How many pages."""
        return len(self.data) // PAGE_BYTES


class Pause(NamedTuple):
    """The pause of the guest, and its parts."""

    total_s: float
    stop_s: float
    scan_s: float
    copy_s: float


@dataclass(frozen=True, slots=True)
class Epoch:
    """The VM as of one moment, as the difference to its predecessor.

    `device_base` and `device_state` are what a waiting QEMU reads, in this order; an unchanged base
    is the same object as in the previous epoch. `pages` come after all that was copied early: a
    page that is in both counts as it is here. `early_pages` of them were copied while the guest
    ran, in `early_pauses_s` short stops.
    """

    number: int
    pages: Pages
    device_base: bytes
    device_state: bytes
    pause: Pause
    early_pages: int = 0
    early_pauses_s: tuple[float, ...] = ()
