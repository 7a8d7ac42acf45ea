"""How fast a running VM dirties its memory, from the cheapest exact source available.

Page tracking from outside QEMU (`memory`), on the host that runs the VM. If the kernel or missing
permissions do not allow it: QEMU's own page sampling. `own.py` and `domains.py` provide both for
the two kinds of VMs.
"""

import asyncio
import errno
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any, Protocol, Self

from vmckpt.codec import builtins, convert
from vmckpt.errors import BusyError
from vmckpt.forecast.measure.answer import Answer
from vmckpt.forecast.measure.there import OBSERVE, observe_there
from vmckpt.forecast.model.dirtying import DirtyCurve
from vmckpt.foreign import MalformedError
from vmckpt.hosts.host import Host
from vmckpt.memory.content import Content, Piece
from vmckpt.memory.observe import FAULT_S, DirtyWindow, Observation, observe
from vmckpt.memory.private.guest_ram import GuestRam
from vmckpt.memory.ram_file import PAGE_BYTES
from vmckpt.memory.windows import DirtyHistory

TRACKING = "page-tracking"
# QEMU's own limits.
SHORTEST_SAMPLING_S, LONGEST_SAMPLING_S = 1, 60
LEAST_BUSY = 0.01
# While QEMU samples: how often to check whether an operation has begun.
FREE_POLL_S = 0.5
NOT_SEEN = DirtyHistory((), (), ())
_NOT_ALLOWED = {
    errno.EPERM: "this user may not trace QEMU",
    errno.EACCES: "this user may not trace QEMU",
    errno.EINVAL: "the kernel has no asynchronous write protection (Linux 6.7 has)",
    errno.ENOTTY: "the kernel has no PAGEMAP_SCAN (Linux 6.7 has)",
    errno.ENOSYS: "the kernel has no userfaultfd",
}


@dataclass(frozen=True, slots=True)
class DirtyRate:
    """One measurement of `took_s` seconds.

    `source` is "page-tracking", "qemu-page-sampling" or, for a domain, "libvirt-page-sampling";
    `why` is the reason if it is not the first. Values that page sampling does not provide are None.
    `faults` is how often the guest paid for being watched, `busy` the used fraction of its
    processors' time, at most 1. `layout` says where memory is zero, in equal pieces, `course` when
    pages were dirtied; both are empty for sampling.
    """

    source: str
    why: str
    took_s: float
    ram_bytes: int
    curve: DirtyCurve
    windows: tuple[DirtyWindow, ...]
    faults: int
    ram: Content | None
    dirtied: Content | None
    busy: float = 1.0
    layout: tuple[Piece, ...] = ()
    course: DirtyHistory = NOT_SEEN
    ended_unix_s: float = 0.0

    @property
    def bytes_per_s(self) -> float:
        """Distinct bytes dirtied within a second: what later rounds of a pre-copy have to send."""
        return self.curve.within(1.0) * PAGE_BYTES

    @property
    def working_set_bytes(self) -> int:
        """Distinct bytes, in whole pages, dirtied during the whole measurement."""
        return round(self.curve.working_set_pages) * PAGE_BYTES

    @property
    def cost(self) -> float:
        """The fraction of one processor's time that watching may have cost the guest."""
        return self.faults * FAULT_S / self.took_s if self.took_s else 0.0

    def to_json(self) -> dict[str, Any]:
        """For `--json` and run records."""
        return {
            "source": self.source,
            "why": self.why,
            "took_s": round(self.took_s, 3),
            "ram_bytes": self.ram_bytes,
            "working_set_bytes": self.working_set_bytes,
            "curve": builtins(self.curve),
            "windows": [[round(w.at_s, 4), round(w.length_s, 4), w.pages] for w in self.windows],
            "faults_per_s": round(self.faults / self.took_s, 1) if self.took_s else 0.0,
            "cost": round(self.cost, 4),
            "ram": builtins(self.ram),
            "dirtied": builtins(self.dirtied),
            "busy": round(self.busy, 3),
            "ended_unix_s": round(self.ended_unix_s, 3),
            "layout": [
                [round(part, 4) for part in (piece.hole, *astuple(piece.content))]
                for piece in self.layout
            ],
            "course": {
                "ends_s": [round(end_s, 4) for end_s in self.course.ends_s],
                "pages": self.course.pages,
                "counts": [
                    [[round(t_s, 4), pages] for t_s, pages in counts]
                    for counts in self.course.counts
                ],
            },
        }

    @classmethod
    def from_json(cls, data: object) -> Self:
        """The inverse of `to_json`, up to rounding. Raises MalformedError."""
        answer = convert(Answer, data)
        return cls(
            source=answer.source,
            why=answer.why,
            took_s=answer.took_s,
            ram_bytes=answer.ram_bytes,
            curve=answer.curve,
            windows=answer.windows,
            faults=round(answer.faults_per_s * answer.took_s),
            ram=answer.ram,
            dirtied=answer.dirtied,
            busy=answer.busy,
            ended_unix_s=answer.ended_unix_s,
            layout=tuple(Piece(hole, Content(*parts)) for hole, *parts in answer.layout),
            course=answer.course or NOT_SEEN,
        )


class Measurable(Protocol):
    """A guest whose dirty rate can be measured."""

    @property
    def name(self) -> str:
        """Its VM's name."""

    @property
    def vcpus(self) -> int:
        """Its number of processors."""

    async def require_measurable(self) -> None:
        """Raises BusyError when an operation holds the VM, RefusedError when it does not run."""

    async def processor_s(self) -> float:
        """Processor time that its QEMU has used."""

    async def track(self, for_s: float) -> DirtyRate:
        """Track its pages. Raises BusyError: an operation began; OSError: it cannot be tracked."""

    async def sample(self, for_s: float, why: str) -> DirtyRate:
        """Have QEMU sample its pages; `why` not track them. Raises BusyError, RefusedError."""


async def measure(guest: Measurable, for_s: float) -> DirtyRate:
    """Watch the running guest for `for_s` seconds. Every other operation takes precedence.

    Raises BusyError when one holds the VM or begins meanwhile (measuring would slow a migration,
    and would measure the migration), RefusedError when the VM does not run.
    """
    await guest.require_measurable()
    used_s, began_s = await guest.processor_s(), time.monotonic()
    found = await _measured(guest, for_s)
    share = (await guest.processor_s() - used_s) / (time.monotonic() - began_s) / guest.vcpus
    return replace(found, busy=min(max(share, LEAST_BUSY), 1.0), ended_unix_s=time.time())


async def _measured(guest: Measurable, for_s: float) -> DirtyRate:
    try:
        return await guest.track(for_s)
    except OSError as exc:
        if exc.errno == errno.EBUSY:
            raise BusyError(
                f"the memory of '{guest.name}' is being tracked",
                why=exc.strerror or str(exc),
                remedy="wait for the other measurement or checkpoint to end",
            ) from exc
        await guest.require_measurable()
        why = _NOT_ALLOWED.get(exc.errno or 0, exc.strerror or str(exc))
    return await guest.sample(for_s, why)


async def track_there(
    host: Host, words: Sequence[str], for_s: float, command: str = OBSERVE
) -> DirtyRate | None:
    """As `track`, on the host, by its `vmckpt observe`. Raises OSError, HostDownError."""
    answer = await observe_there(host, words, for_s, command)
    try:
        return DirtyRate.from_json(answer) if answer else None
    except MalformedError as exc:
        raise OSError(errno.ENOTSUP, f"its vmckpt reports another measurement: {exc}") from exc


async def track(
    pid: int, ram: GuestRam, ram_bytes: int, for_s: float, is_free: Callable[[], Awaitable[bool]]
) -> DirtyRate | None:
    """Track the pages that a local QEMU dirties; None as soon as the VM is no longer free.

    Raises OSError as `observe` does.
    """
    seen = await observe(pid, ram, for_s, is_free, ram_bytes)
    return None if seen is None else _tracked(ram_bytes, seen)


def _tracked(ram_bytes: int, seen: Observation) -> DirtyRate:
    total_pages = ram_bytes // PAGE_BYTES
    return DirtyRate(
        source=TRACKING,
        why="",
        took_s=seen.took_s,
        ram_bytes=ram_bytes,
        curve=DirtyCurve.measured(seen.samples.values(), total_pages),
        windows=seen.windows,
        faults=seen.faults,
        ram=seen.ram,
        dirtied=seen.dirtied,
        layout=seen.layout,
        course=seen.course,
    )


async def sampled(
    rate: Callable[[int], Awaitable[float]], for_s: float, ram_bytes: int, source: str, why: str
) -> DirtyRate:
    """Estimate longer and longer spans from `rate`, bytes per second over that many seconds.

    `source` and `why` as in `DirtyRate`.
    """
    total_pages = ram_bytes // PAGE_BYTES
    groups: list[list[tuple[float, float]]] = []
    windows: list[DirtyWindow] = []
    took_s, length_s = 0.0, SHORTEST_SAMPLING_S
    while length_s <= LONGEST_SAMPLING_S and (not groups or took_s + length_s <= for_s):
        rate_bytes_per_s = await rate(length_s)
        pages = min(rate_bytes_per_s * length_s / PAGE_BYTES, total_pages)
        groups.append([(float(length_s), pages)])
        windows.append(DirtyWindow(took_s, length_s, round(pages)))
        took_s += length_s
        length_s *= 2
    return DirtyRate(
        source=source,
        why=why,
        took_s=took_s,
        ram_bytes=ram_bytes,
        curve=DirtyCurve.measured(groups, total_pages),
        windows=tuple(windows),
        faults=0,
        ram=None,
        dirtied=None,
    )


async def while_free(length_s: float, require_free: Callable[[], Awaitable[None]]) -> None:
    """Wait that long; raises what `require_free` raises, as soon as it does."""
    clock = asyncio.get_running_loop().time
    until_s = clock() + length_s
    while (left_s := until_s - clock()) > 0:
        await asyncio.sleep(min(left_s, FREE_POLL_S))
        await require_free()


def moved_on(name: str, who: str) -> BusyError:
    """The error for a guest that another operation holds."""
    return BusyError(
        f"'{name}' is busy",
        why=f"held by {who}: the dirty rate is not measured meanwhile",
        remedy="wait for it to end",
    )
