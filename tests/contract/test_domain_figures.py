"""What a domain's migration records of itself: forecasts are learned from it, and judged by it."""

import asyncio
from typing import Any

import pytest

from tests.fake_libvirtd import FakeLibvirtd
from vmckpt.events.record import FIGURES_MISSING
from vmckpt.events.types import Event, Note, PhaseBegan, Progress
from vmckpt.migrate.domains.request import MigrateCall
from vmckpt.migrate.domains.transfer import DomainTransfer
from vmckpt.options.migration import Method, MigrationOptions
from vmckpt.vm.domains.flags import MigrateFlag
from vmckpt.vm.domains.job import DomainJob

pytestmark = [pytest.mark.contract, pytest.mark.timeout(20)]
UUID = "00000000-0000-0000-0000-000000000001"
COPYING = DomainJob(active=True, disk_total_bytes=100, disk_remaining_bytes=50)


def sending(number: int, pages: int) -> DomainJob:
    return DomainJob(True, number, 800, 400, 4 * pages, normal_pages=pages, zero_pages=7)


def moved(
    options: MigrationOptions, *jobs: DomainJob, is_silent: bool = False
) -> tuple[DomainTransfer, list[Event]]:
    """One whose call ends a moment after the last of these was reported."""
    heard, last = list[Event](), asyncio.Event()
    left = list(jobs)

    def job() -> DomainJob:
        if len(left) == 1:
            last.set()
            return left[0]
        return left.pop(0)

    async def migrates(*_: object) -> None:
        await last.wait()
        await asyncio.sleep(0.2)

    answers: dict[str, Any] = {"start_postcopy": None, "set_max_downtime": None}
    session = FakeLibvirtd(migrate=migrates, job=job, **answers)
    session.is_silent = is_silent

    async def main() -> DomainTransfer:
        clock = asyncio.get_running_loop().time
        transfer = DomainTransfer(session, UUID, options, clock, heard.append, patience_s=0.3)
        await transfer.run(MigrateCall("", {}, MigrateFlag.LIVE), session)
        return transfer

    return asyncio.run(main()), heard


def phases(heard: list[Event]) -> list[str]:
    return [event.phase for event in heard if isinstance(event, PhaseBegan)]


def test_its_phases_and_pages_are_those_that_forecasts_read() -> None:
    options = MigrationOptions(method=Method.PRECOPY)
    idle = DomainJob(active=True)
    jobs = (idle, COPYING, COPYING, sending(1, 10), sending(2, 30))
    transfer, heard = moved(options, *jobs)
    assert phases(heard) == ["mirror", "transfer"]
    samples = [event for event in heard if isinstance(event, Progress)]
    assert [sample.status for sample in samples[:3]] == ["setup", "mirror", "mirror"]
    assert (samples[-1].status, samples[-1].normal_pages, samples[-1].zero_pages) == (
        "completed",
        30,
        7,
    )
    # From the first memory that was seen to be sent; the disks before it do not count.
    began_s = next(e.at_s for e in heard if isinstance(e, PhaseBegan) and e.phase == "transfer")
    assert transfer.took_s == pytest.approx(samples[-1].at_s - began_s, abs=0.05)


def test_post_copy_is_a_phase_of_its_own() -> None:
    options = MigrationOptions(method=Method.POSTCOPY)
    transfer, heard = moved(options, sending(1, 10), sending(2, 30), sending(2, 40))
    assert transfer.postcopy
    assert phases(heard) == ["transfer", "drain"]


def test_one_whose_memory_was_never_seen_took_as_long_as_the_call() -> None:
    transfer, heard = moved(MigrationOptions(), DomainJob(active=True))
    assert phases(heard) == []
    assert transfer.took_s >= 0.2


def test_without_final_figures_those_of_the_last_query_do_not_count() -> None:
    """Its call returns before its job's end is reported: nothing is learned of half the pages."""
    estimated = sending(1, 10)._replace(downtime_ms=300)
    options = MigrationOptions(method=Method.PRECOPY)
    transfer, heard = moved(options, estimated, is_silent=True)
    assert transfer.last.downtime_ms is None
    assert [one.code for one in heard if isinstance(one, Note)] == [FIGURES_MISSING]
    transfer, heard = moved(options, estimated)
    assert transfer.last.downtime_ms == 300
    assert [one.code for one in heard if isinstance(one, Note)] == []
