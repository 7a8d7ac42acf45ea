"""Hold a domain's QEMU back from the switchover while the destination is busy, by libvirt.

QEMU stops the guest when the rest fits the downtime at the speed that it assumes, and at the end of
the first pass the destination may be far behind (see migrate/steps/switchover.py). libvirt sets
that speed only when a migration begins, but the downtime at any time. So the speed is set to almost
nothing, and once all memory has been sent the downtime is raised until the product is right.
"""

import asyncio
from contextlib import suppress

from vmckpt.errors import HostDownError, NotFoundError, OutcomeUnknownError
from vmckpt.hosts.host import Host
from vmckpt.migrate.domains.journal import DomainJournal
from vmckpt.options.reading import UNLIMITED_DOWNTIME_MS
from vmckpt.units import MIB
from vmckpt.vm.domains.faults import LibvirtRefusedError
from vmckpt.vm.domains.job import DomainJob
from vmckpt.vm.domains.sessions import libvirtd

# libvirt's typed parameter, MiB/s.
PARAMETER = "bandwidth.avail.switchover"
# What the error of a QEMU that lacks it mentions.
IN_QEMU = "avail-switchover-bandwidth"
# In the second pass all memory has been sent once.
WHOLE_SENT_PASS = 2
# A smaller relative change of the downtime does not justify a call.
SAME_WITHIN = 0.2
RELEASE_EVERY_S = 1.0


class Hold:
    """The downtime to request from libvirt, so that QEMU allows the intended one.

    `mib_per_s`: the speed that QEMU was given; `limit_bytes_per_s`: the bandwidth limit (0: none).
    """

    def __init__(self, mib_per_s: int, limit_bytes_per_s: int = 0) -> None:
        self._held_bytes_per_s = mib_per_s * MIB
        self.limit_bytes_per_s = limit_bytes_per_s
        self._best_bytes_per_s = 0.0
        self._given_ms = 0

    @property
    def is_on(self) -> bool:
        """Whether QEMU is still held back."""
        return self._given_ms == 0

    def see(self, job: DomainJob) -> None:
        """Remember the best speed."""
        self._best_bytes_per_s = max(self._best_bytes_per_s, job.throughput_bytes_per_s)

    def give(self, wanted_ms: int) -> int:
        """The value for libvirt with which QEMU allows `wanted_ms` at the best speed."""
        self._given_ms = self._needed_ms(wanted_ms)
        return self._given_ms

    def order(self, job: DomainJob, wanted_ms: int) -> int | None:
        """The value to set in libvirt now; None while the guest is held, or if it is set
        already.
        """
        if job.round < WHOLE_SENT_PASS or not self._best_bytes_per_s:
            return None
        if abs(self._needed_ms(wanted_ms) - self._given_ms) <= SAME_WITHIN * self._given_ms:
            return None
        return self.give(wanted_ms)

    def _needed_ms(self, wanted_ms: int) -> int:
        speed = self._best_bytes_per_s
        if self.limit_bytes_per_s:
            speed = min(speed, self.limit_bytes_per_s)
        return min(UNLIMITED_DOWNTIME_MS, max(1, int(wanted_ms * speed / self._held_bytes_per_s)))


async def restore_downtime_limit(journal: DomainJournal, source: Host) -> None:
    """Until cancelled: give QEMU its normal downtime limit, because the migration is not watched.

    Failures are ignored: others check whether it still migrates.
    """
    while journal.held_mib_per_s:
        with suppress(HostDownError, NotFoundError, OutcomeUnknownError, LibvirtRefusedError):
            async with libvirtd(source) as session:
                if (job := await session.job(journal.uuid)).round:
                    hold = Hold(journal.held_mib_per_s)
                    hold.see(job)
                    downtime_ms = hold.give(journal.max_downtime_ms)
                    await session.set_max_downtime(journal.uuid, downtime_ms)
        await asyncio.sleep(RELEASE_EVERY_S)
