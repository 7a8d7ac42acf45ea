"""How fast a domain dirties its memory: tracked in its QEMU, or sampled by QEMU through libvirt.

Tracking changes nothing that libvirt could see (`vm/domains/process.py`).
"""

import asyncio
import errno
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from vmckpt.errors import HostDownError, RefusedError
from vmckpt.forecast.measure.dirty_rate import (
    FREE_POLL_S,
    DirtyRate,
    measure,
    moved_on,
    sampled,
    track,
    track_there,
    while_free,
)
from vmckpt.forecast.measure.there import OBSERVE_DOMAIN
from vmckpt.hosts.lock import read_owner
from vmckpt.sequence.in_thread import in_thread
from vmckpt.vm.domains.faults import LibvirtRefusedError
from vmckpt.vm.domains.flags import DomainState
from vmckpt.vm.domains.inventory import Domain, seen_again
from vmckpt.vm.domains.libvirtd import Libvirtd
from vmckpt.vm.domains.process import find_qemu, find_ram
from vmckpt.vm.domains.sessions import libvirtd
from vmckpt.vm.paths import lock_path

SAMPLING = "libvirt-page-sampling"
# libvirt cannot set the number of pages to sample; QEMU's default is 512 per GiB.
ACCURACY = "libvirt has QEMU sample 512 pages of each GiB: accurate to about 40 %"
POLL_S, PATIENCE = 0.2, 50


async def measure_domain(domain: Domain, for_s: float) -> DirtyRate:
    """Measure a running domain for up to `for_s` seconds; see `measure`."""
    async with libvirtd(domain.host) as session:
        return await measure(MeasuredDomain(domain, session), for_s)


class MeasuredDomain:
    """One domain, as `Measurable`, and a session with its libvirtd."""

    def __init__(self, domain: Domain, session: Libvirtd) -> None:
        self.domain, self.session = domain, session

    @property
    def name(self) -> str:
        """Its name."""
        return self.domain.name

    @property
    def vcpus(self) -> int:
        """Its number of processors."""
        return self.domain.description.vcpus

    async def require_measurable(self) -> None:
        """Raises BusyError when an operation holds the domain, RefusedError when it does not
        run.
        """
        self.domain = await seen_again(self.domain, self.session)
        if self.domain.seen.state is not DomainState.RUNNING:
            raise RefusedError(
                f"'{self.name}' does not run",
                why=f"it is {self.domain.state}: it dirties no memory",
                remedy="start it, and measure then",
            )
        await self._require_free()

    async def processor_s(self) -> float:
        """Processor time that its QEMU has used."""
        return await self.session.processor_s(self.domain.uuid)

    async def track(self, for_s: float) -> DirtyRate:
        """Track its pages. Raises BusyError: an operation began; OSError: it cannot be tracked."""
        domain, host = self.domain, self.domain.host
        if domain.description.huge_pages:
            raise OSError(errno.EOPNOTSUPP, "its memory is in huge pages, which are tracked whole")
        blocks, lock = domain.description.ram_blocks, lock_path(host.state_dir, domain.name)
        if host.is_this_machine:

            async def is_free() -> bool:
                return read_owner(lock) is None

            tracking = track_domain(domain.uuid, blocks, for_s, is_free)
        else:
            sizes = ",".join(map(str, blocks))
            words = [str(word) for word in (domain.uuid, sizes, for_s, lock)]
            tracking = track_there(host, words, for_s, OBSERVE_DOMAIN)
        found = await self._undisturbed(tracking)
        if found is None:
            await self._require_free()
            raise moved_on(self.name, "an operation")
        return found

    async def _undisturbed(self, tracking: Awaitable[DirtyRate | None]) -> DirtyRate | None:
        """Its result; ended as soon as a job of libvirt's begins, which holds no lock of ours."""
        task = asyncio.ensure_future(tracking)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=FREE_POLL_S)
                if not task.done():
                    await self._require_free()
            return task.result()
        finally:
            task.cancel()
            await asyncio.wait({task})
            if not task.cancelled():
                task.exception()  # libvirt's job, or a cancellation, came first

    async def sample(self, for_s: float, why: str) -> DirtyRate:
        """Have its QEMU sample its pages. Raises RefusedError too: its QEMU does not."""
        ram_bytes = self.domain.description.memory_bytes
        return await sampled(self._rate, for_s, ram_bytes, SAMPLING, f"{why}; {ACCURACY}")

    async def _rate(self, seconds: int) -> float:
        uuid = self.domain.uuid
        await self._require_free()
        try:
            await self.session.begin_dirty_rate(uuid, seconds)
        except LibvirtRefusedError as exc:
            raise RefusedError(
                f"the dirty rate of '{self.name}' cannot be measured",
                why=exc.why,
                remedy="if another measurement is under way, wait for its end",
            ) from exc
        await while_free(seconds, self._require_free)
        for _ in range(PATIENCE):
            if (rate := await self.session.dirty_rate(uuid)) is not None:
                return rate
            await while_free(POLL_S, self._require_free)
        raise HostDownError(
            f"libvirt reports no dirty rate of '{self.name}'",
            why=f"it was asked for {seconds} s, and {PATIENCE * POLL_S:g} s later there was none",
            remedy="check the domain's QEMU process",
        )

    async def _require_free(self) -> None:
        domain = self.domain
        held = await domain.host.lock_owner(lock_path(domain.host.state_dir, domain.name))
        if held is None and not (await self.session.job(domain.uuid)).active:
            return
        who = f"{held.action} (run {held.run}, pid {held.pid})" if held else "a job of libvirt's"
        raise moved_on(domain.name, who)


async def track_domain(
    uuid: str, blocks: Sequence[int], for_s: float, is_free: Callable[[], Awaitable[bool]]
) -> DirtyRate | None:
    """As `track`, for a domain of this machine. Raises OSError as that, `find_qemu`, `find_ram`."""
    pid = await in_thread(partial(find_qemu, uuid))
    return await track(pid, find_ram(pid, blocks), sum(blocks), for_s, is_free)
