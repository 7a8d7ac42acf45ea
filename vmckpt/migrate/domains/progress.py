"""Translate libvirt's progress into the events that every migration reports."""

from vmckpt.events.types import Progress
from vmckpt.forecast.model.convergence import eta_s
from vmckpt.migrate.steps.steering import FIRST_POSTCOPY_ROUND, TransferFigures
from vmckpt.vm.domains.job import DomainJob


def figures(job: DomainJob) -> TransferFigures:
    """The figures for decisions. Pure."""
    return TransferFigures(
        job.round,
        job.remaining_bytes,
        job.transferred_bytes,
        job.throughput_bytes_per_s,
        job.dirty_rate_bytes_per_s if job.round >= FIRST_POSTCOPY_ROUND else 0.0,
    )


def progress(job: DomainJob, at_s: float, *, postcopy: bool, has_ended: bool = False) -> Progress:
    """The event; while disks are copied, with their figures. Pure."""
    if job.copies_disks:
        done = job.disk_total_bytes - job.disk_remaining_bytes
        return Progress(
            at_s=at_s,
            status="mirror",
            round=0,
            total_bytes=job.disk_total_bytes,
            remaining_bytes=job.disk_remaining_bytes,
            transferred_bytes=done,
            throughput_bytes_per_s=job.disk_throughput_bytes_per_s,
            dirty_rate_bytes_per_s=0.0,
            expected_downtime_ms=None,
            throttle_percent=0,
            postcopy_requests=0,
            eta_s=eta_s(job.disk_remaining_bytes, job.disk_throughput_bytes_per_s, 0.0),
        )
    seen = figures(job)
    status = "postcopy-active" if postcopy else "active" if job.round else "setup"
    return Progress(
        at_s=at_s,
        status="completed" if has_ended else status,
        round=job.round,
        total_bytes=job.total_bytes,
        remaining_bytes=job.remaining_bytes,
        transferred_bytes=job.transferred_bytes,
        throughput_bytes_per_s=job.throughput_bytes_per_s,
        dirty_rate_bytes_per_s=seen.dirty_rate_bytes_per_s,
        expected_downtime_ms=job.downtime_ms if job.round >= FIRST_POSTCOPY_ROUND else None,
        throttle_percent=job.throttle_percent,
        postcopy_requests=job.postcopy_requests,
        eta_s=eta_s(job.remaining_bytes, job.throughput_bytes_per_s, seen.dirty_rate_bytes_per_s),
        normal_pages=job.normal_pages,
        zero_pages=job.zero_pages,
    )
