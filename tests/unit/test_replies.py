"""query-migrate's answers as QEMU 7.2 and 10.0 really give them."""

from typing import Any

import pytest

from vmckpt.codec import convert
from vmckpt.qemu.replies import MigrationStatus, QemuJob, QemuVersion
from vmckpt.qemu.shapes import MigrationInfo

RAM = {
    "total": 554508288,
    "remaining": 133054464,
    "transferred": 251658240,
    "duplicate": 40000,
    "skipped": 0,
    "normal": 61000,
    "normal-bytes": 249856000,
    "dirty-pages-rate": 5000,
    "mbps": 1073.7,
    "dirty-sync-count": 3,
    "postcopy-requests": 0,
    "page-size": 4096,
    "multifd-bytes": 0,
    "pages-per-second": 30000,
    "downtime-bytes": 0,
    "precopy-bytes": 251658240,
    "postcopy-bytes": 0,
    "dirty-sync-missed-zero-copy": 0,
}
# 10.0: `skipped` is gone.
RAM_10 = {key: value for key, value in RAM.items() if key != "skipped"}


def parse(**reply: Any) -> MigrationStatus:
    words = {key.replace("_", "-"): value for key, value in reply.items()}
    return MigrationStatus.parse(convert(MigrationInfo, words))


def test_before_the_first_migration_the_answer_is_empty() -> None:
    status = MigrationStatus.parse({})
    assert status == MigrationStatus("none")
    assert (status.ended, status.in_postcopy) == (False, False)


def test_in_setup_there_is_no_ram_yet() -> None:
    status = parse(status="setup")
    assert (status.status, status.round, status.total_bytes, status.ended) == ("setup", 0, 0, False)


def test_a_downtime_that_is_not_estimated_yet_is_unknown() -> None:
    """11.1 says so by the longest time there is."""
    assert parse(status="active", expected_downtime=2**63 - 1).expected_downtime_ms is None


@pytest.mark.parametrize("ram", [RAM, RAM_10], ids=["7.2", "10.0"])
def test_an_active_source(ram: dict[str, Any]) -> None:
    status = parse(status="active", total_time=2300, setup_time=5, expected_downtime=280, ram=ram)
    assert status == MigrationStatus(
        status="active",
        expected_downtime_ms=280,
        total_bytes=554508288,
        remaining_bytes=133054464,
        transferred_bytes=251658240,
        throughput_bytes_per_s=1073.7e6 / 8,
        dirty_rate_bytes_per_s=5000 * 4096.0,
        normal_pages=61000,
        zero_pages=40000,
        round=3,
    )


def test_a_throttled_guest() -> None:
    assert parse(status="active", ram=RAM, cpu_throttle_percentage=30).throttle_percent == 30


def test_a_completed_source() -> None:
    status = parse(
        status="completed", total_time=4100, setup_time=3, downtime=0, ram=RAM | {"remaining": 0}
    )
    assert status.ended
    assert status.downtime_ms == 0
    assert status.remaining_bytes == 0


def test_a_failed_source_says_only_why() -> None:
    status = parse(
        status="failed", error_desc="Unable to write to socket: Connection reset by peer"
    )
    assert status.ended
    assert status.error == "Unable to write to socket: Connection reset by peer"
    assert (status.downtime_ms, status.total_bytes) == (None, 0)


def test_a_target_that_listens_says_its_port() -> None:
    status = parse(
        status="setup",
        socket_address=[
            {"path": "/run/x.sock", "type": "unix"},
            {"port": "44321", "ipv4": True, "host": "10.77.1.2", "type": "inet"},
        ],
    )
    assert status.port == 44321
    assert parse(status="setup", socket_address=[]).port is None


@pytest.mark.parametrize(
    ("word", "ended", "in_postcopy"),
    [
        ("none", False, False),
        ("setup", False, False),
        ("wait-unplug", False, False),
        ("active", False, False),
        ("pre-switchover", False, False),
        ("device", False, False),
        ("cancelling", False, False),
        ("postcopy-active", False, True),
        ("postcopy-paused", False, True),
        ("postcopy-recover-setup", False, True),
        ("postcopy-recover", False, True),
        ("completed", True, False),
        ("failed", True, False),
        ("cancelled", True, False),
    ],
)
def test_every_state_of_qemu_is_known(word: str, ended: bool, in_postcopy: bool) -> None:
    status = parse(status=word)
    assert (status.ended, status.in_postcopy) == (ended, in_postcopy)


def test_postcopy_counts_what_the_target_asked_for() -> None:
    ram = RAM_10 | {"postcopy-requests": 812, "postcopy-bytes": 3325952}
    source = parse(status="postcopy-active", ram=ram)
    assert source.postcopy_requests == 812
    target = parse(status="completed", postcopy_blocktime=57, postcopy_vcpu_blocktime=[57, 12])
    assert target.blocktime_ms == 57


def test_dirty_pages_count_in_the_guests_page_size() -> None:
    assert parse(status="active", ram=RAM | {"page-size": 65536}).dirty_rate_bytes_per_s == (
        5000 * 65536
    )


def test_blockers_are_kept_in_qemus_words() -> None:
    reason = "The qcow format used by node 'disk0' does not support live migration"
    assert parse(blocked_reasons=[reason]).blockers == (reason,)


def test_a_job_is_concluded_only_in_that_state() -> None:
    assert QemuJob("j", "snapshot-save", "concluded", 1, 1, None).concluded
    assert not QemuJob("j", "snapshot-save", "running", 0, 1, None).concluded
    assert not QemuJob("j", "snapshot-save", "aborting", 0, 1, "no space").concluded


def test_a_version_reads_as_people_write_it() -> None:
    assert str(QemuVersion(10, 0, 2)) == "10.0.2"
