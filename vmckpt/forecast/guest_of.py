"""A measured guest, as the model forecasts it."""

from vmckpt.forecast.measure.dirty_rate import DirtyRate
from vmckpt.forecast.model.course import DirtyProfile
from vmckpt.forecast.model.first_pass import Stretch
from vmckpt.forecast.model.guest import PAGE_BYTES, Guest


def guest_of(measured: DirtyRate, disk_bytes: int = 0, *, moves_now: bool = False) -> Guest:
    """The measured guest for the model; unknown values are assumed to be the costliest."""
    ram, dirtied = measured.ram, measured.dirtied
    return Guest(
        total_pages=measured.ram_bytes // PAGE_BYTES,
        zero_share=ram.zero if ram else 0.0,
        ratio=ram.ratio if ram else 1.0,
        dirtied_zero_share=dirtied.zero if dirtied else 0.0,
        dirtied_ratio=dirtied.ratio if dirtied else 1.0,
        curve=measured.curve,
        disk_bytes=disk_bytes,
        busy=measured.busy,
        layout=_stretches(measured),
        course=_course(measured),
        moves_now=moves_now,
    )


def _course(measured: DirtyRate) -> DirtyProfile | None:
    seen = measured.course
    if not seen.ends_s:
        return None
    return DirtyProfile.seen(seen.ends_s, seen.pages, seen.counts, measured.curve)


def _stretches(measured: DirtyRate) -> tuple[Stretch, ...]:
    """Its memory in page order; the last piece may be shorter, and counts as long as the others."""
    pages = measured.ram_bytes / PAGE_BYTES / max(len(measured.layout), 1)
    return tuple(
        Stretch(pages * (1 - content.zero), pages * content.zero, pages * hole, content.ratio)
        for hole, content in measured.layout
    )
