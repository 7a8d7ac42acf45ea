"""The progress of a migration by libvirt: its job's figures, as values."""

from collections.abc import Mapping
from typing import Any, NamedTuple

_NO_JOB = 0


class DomainJob(NamedTuple):
    """A domain's job at one moment (virDomainGetJobStats). Missing figures are zero.

    `downtime_ms` is QEMU's estimate while the job runs and QEMU's figure afterwards; None while
    unknown. `normal_pages` and `zero_pages` were sent so far. The disks' bytes are those of copied
    disks.
    """

    active: bool
    round: int = 0
    total_bytes: int = 0
    remaining_bytes: int = 0
    transferred_bytes: int = 0
    throughput_bytes_per_s: float = 0.0
    dirty_rate_bytes_per_s: float = 0.0
    throttle_percent: int = 0
    postcopy_requests: int = 0
    downtime_ms: int | None = None
    normal_pages: int = 0
    zero_pages: int = 0
    disk_total_bytes: int = 0
    disk_remaining_bytes: int = 0
    disk_throughput_bytes_per_s: float = 0.0

    @property
    def copies_disks(self) -> bool:
        """Whether disks are being copied, before the transfer of memory."""
        return self.disk_remaining_bytes > 0 and self.transferred_bytes == 0


def parse_job(stats: Mapping[str, Any]) -> DomainJob:
    """Parse libvirt's typed parameters. Pure."""

    def number(name: str) -> int:
        return int(stats.get(name, 0))

    return DomainJob(
        active=number("type") != _NO_JOB,
        round=number("memory_iteration"),
        total_bytes=number("memory_total"),
        remaining_bytes=number("memory_remaining"),
        transferred_bytes=number("memory_processed"),
        throughput_bytes_per_s=float(number("memory_bps")),
        dirty_rate_bytes_per_s=float(
            number("memory_dirty_rate") * (number("memory_page_size") or 4096)
        ),
        throttle_percent=number("auto_converge_throttle"),
        postcopy_requests=number("memory_postcopy_requests"),
        downtime_ms=number("downtime") if "downtime" in stats else None,
        normal_pages=number("memory_normal"),
        zero_pages=number("memory_constant"),
        disk_total_bytes=number("disk_total"),
        disk_remaining_bytes=number("disk_remaining"),
        disk_throughput_bytes_per_s=float(number("disk_bps")),
    )
