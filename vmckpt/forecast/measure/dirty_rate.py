"""How fast a running VM dirties its memory, from the cheapest exact source available.

Page tracking from outside QEMU (`memory`), on the host that runs the VM. If the kernel or missing
permissions do not allow it: QEMU's own page sampling, over QMP.
"""

import asyncio
import errno
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from vmckpt.codec import builtins, convert
from vmckpt.errors import BusyError, HostDownError, RefusedError
from vmckpt.forecast.measure.there import observe_there
from vmckpt.forecast.model.dirtying import DirtyCurve
from vmckpt.foreign import MalformedError
from vmckpt.hosts.lock import Owner
from vmckpt.memory.content import Content, Piece
from vmckpt.memory.observe import FAULT_S, DirtyWindow, Observation, observe
from vmckpt.memory.ram_file import PAGE_BYTES
from vmckpt.memory.windows import DirtyHistory
from vmckpt.qemu import commands
from vmckpt.qemu.monitor import CommandRefusedError, session
from vmckpt.vm.inventory import Vm, require_alive
from vmckpt.vm.paths import lock_path

TRACKING, SAMPLING = "page-tracking", "qemu-page-sampling"
SAMPLE_PAGES = 8192
# QEMU's own limits.
SHORTEST_SAMPLING_S, LONGEST_SAMPLING_S = 1, 60
LEAST_BUSY = 0.01
# While QEMU samples: how often to check whether an operation has begun; then, for the result.
FREE_POLL_S, POLL_S, PATIENCE = 0.5, 0.1, 100
NOT_SEEN = DirtyHistory((), (), ())
_NOT_ALLOWED = {
    errno.EPERM: "this user may not trace QEMU",
    errno.EACCES: "this user may not trace QEMU",
    errno.EINVAL: "the kernel has no asynchronous write protection (Linux 6.7 has)",
    errno.ENOTTY: "the kernel has no PAGEMAP_SCAN (Linux 6.7 has)",
    errno.ENOSYS: "the kernel has no userfaultfd",
    errno.ENOENT: "its RAM is not in a file of its own",
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
        answer = convert(_Answer, data)
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


@dataclass(frozen=True, slots=True)
class _Answer:
    """`DirtyRate` as JSON; a piece of `layout` is its hole, then the fields of its content."""

    source: str
    why: str
    took_s: float
    ram_bytes: int
    curve: DirtyCurve
    windows: tuple[DirtyWindow, ...]
    faults_per_s: float
    ram: Content | None
    dirtied: Content | None
    busy: float = 1.0
    ended_unix_s: float = 0.0
    layout: tuple[tuple[float, float, float, float, float], ...] = ()
    course: DirtyHistory | None = None


async def measure(vm: Vm, for_s: float) -> DirtyRate:
    """Watch the running `vm` for `for_s` seconds. Every other operation takes precedence.

    Raises BusyError when one holds the VM or begins meanwhile (measuring would slow a migration,
    and would measure the migration), RefusedError when the VM does not run.
    """
    await require_measurable(vm)
    used_s, began_s = await _processor_s(vm), time.monotonic()
    found = await _measured(vm, for_s)
    share = (await _processor_s(vm) - used_s) / (time.monotonic() - began_s) / vm.spec.vcpus
    return replace(found, busy=min(max(share, LEAST_BUSY), 1.0), ended_unix_s=time.time())


async def require_measurable(vm: Vm) -> None:
    """Raises BusyError when an operation holds the VM, RefusedError when it does not run."""
    await require_alive(vm)
    await _require_free(vm)
    await _require_running(vm)


async def _processor_s(vm: Vm) -> float:
    """Processor time that its QEMU has used."""
    stat = await vm.host.read_text(Path(f"/proc/{vm.qemu.process.pid}/stat"))
    if stat is None:
        await require_alive(vm)
        raise HostDownError(
            f"QEMU of '{vm.name}' cannot be inspected",
            why=f"{vm.host.name} does not show process {vm.qemu.process.pid}",
            remedy="look at /proc there",
        )
    words = stat.rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


async def _measured(vm: Vm, for_s: float) -> DirtyRate:
    try:
        return await _track(vm, for_s)
    except OSError as exc:
        if exc.errno == errno.EBUSY:
            raise BusyError(
                f"the memory of '{vm.name}' is being tracked",
                why=exc.strerror or str(exc),
                remedy="wait for the other measurement or checkpoint to end",
            ) from exc
        await require_alive(vm)
        why = _NOT_ALLOWED.get(exc.errno or 0, exc.strerror or str(exc))
    return await _sample(vm, for_s, why)


async def _track(vm: Vm, for_s: float) -> DirtyRate:
    async def is_free() -> bool:
        return await _other_owner(vm) is None

    pid, ram_file = vm.qemu.process.pid, vm.qemu.files.ram(vm.spec.ram_dir)
    ram_bytes = vm.spec.memory_bytes
    if vm.host.is_this_machine:
        found = await track(pid, ram_file, ram_bytes, for_s, is_free)
    else:
        lock = lock_path(vm.host.state_dir, vm.name)
        words = [str(word) for word in (pid, ram_file, ram_bytes, for_s, lock)]
        answer = await observe_there(vm.host, words, for_s)
        try:
            found = DirtyRate.from_json(answer) if answer else None
        except MalformedError as exc:
            raise OSError(errno.ENOTSUP, f"its vmckpt reports another measurement: {exc}") from exc
    if found is None:
        await _require_free(vm)
        raise _moved_on(vm, "an operation")
    return found


async def track(
    pid: int, ram_file: Path, ram_bytes: int, for_s: float, is_free: Callable[[], Awaitable[bool]]
) -> DirtyRate | None:
    """Track the pages that a local QEMU dirties; None as soon as the VM is no longer free.

    Raises OSError as `observe` does.
    """
    seen = await observe(pid, ram_file, for_s, is_free, ram_bytes)
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


async def _sample(vm: Vm, for_s: float, why: str) -> DirtyRate:
    found = await sampled(partial(_sampled_rate, vm), for_s, vm.spec.memory_bytes)
    return replace(found, why=why)


async def sampled(
    rate: Callable[[int], Awaitable[float]], for_s: float, ram_bytes: int
) -> DirtyRate:
    """Estimate longer and longer spans from `rate`, bytes per second over that many seconds."""
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
        source=SAMPLING,
        why="",
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


async def _sampled_rate(vm: Vm, length_s: int) -> float:
    async with session(await vm.host.connect(vm.qemu.files.onlooker), vm.name) as monitor:
        try:
            await commands.calc_dirty_rate(monitor, length_s, SAMPLE_PAGES)
        except CommandRefusedError as exc:
            raise BusyError(
                f"QEMU does not measure the dirty rate of '{vm.name}' now",
                why=exc.why,
                remedy="wait for the other measurement to end",
            ) from exc
    # Meanwhile the monitor is free for other clients.
    require_free = partial(_require_free, vm)
    await while_free(length_s, require_free)
    for _ in range(PATIENCE):
        async with session(await vm.host.connect(vm.qemu.files.onlooker), vm.name) as monitor:
            rate = await commands.query_dirty_rate(monitor)
        if rate is not None:
            return rate
        await while_free(POLL_S, require_free)
    raise HostDownError(
        f"QEMU reports no dirty rate of '{vm.name}'",
        why=f"it was asked for {length_s} s, and {PATIENCE * POLL_S:g} s later there was none",
        remedy="look at the QEMU process",
    )


async def _require_running(vm: Vm) -> None:
    async with session(await vm.host.connect(vm.qemu.files.onlooker), vm.name) as monitor:
        state = await commands.query_status(monitor)
    if not state.running:
        raise RefusedError(
            f"'{vm.name}' does not run",
            why=f"its state is '{state.status}': it dirties nothing",
            remedy="start it, and measure then",
        )


async def _other_owner(vm: Vm) -> Owner | None:
    held = await vm.host.lock_owner(lock_path(vm.host.state_dir, vm.name))
    return None if held is not None and held.pid == os.getpid() else held


async def _require_free(vm: Vm) -> None:
    if (held := await _other_owner(vm)) is not None:
        raise _moved_on(vm, f"{held.action} (run {held.run}, pid {held.pid})")


def _moved_on(vm: Vm, who: str) -> BusyError:
    return BusyError(
        f"'{vm.name}' is busy",
        why=f"held by {who}: the dirty rate is not measured meanwhile",
        remedy="wait for it to end",
    )
