"""Progress without a terminal: a line where something is to be said, on stderr."""

import pytest

from vmckpt.events.types import JobProgress, Note, PhaseBegan, Progress
from vmckpt.ui.progress import describe, display
from vmckpt.ui.tables import fields, table

QUIET = Progress(
    at_s=1.0,
    status="active",
    round=1,
    total_bytes=1 << 29,
    remaining_bytes=100 << 20,
    transferred_bytes=412 << 20,
    throughput_bytes_per_s=128 << 20,
    dirty_rate_bytes_per_s=0.0,
    expected_downtime_ms=None,
    throttle_percent=0,
    postcopy_requests=0,
    eta_s=None,
)
BUSY = Progress(
    at_s=2.0,
    status="active",
    round=4,
    total_bytes=1 << 29,
    remaining_bytes=100 << 20,
    transferred_bytes=1 << 30,
    throughput_bytes_per_s=128 << 20,
    dirty_rate_bytes_per_s=64 << 20,
    expected_downtime_ms=781,
    throttle_percent=20,
    postcopy_requests=7,
    eta_s=1.5625,
)


def test_what_is_not_known_yet_is_left_out() -> None:
    assert describe(QUIET) == "round 1, 100 MiB left, 412 MiB sent, 128 MiB/s"


def test_every_figure_that_is_known_is_shown() -> None:
    assert describe(BUSY) == (
        "round 4, 100 MiB left, 1.00 GiB sent, 128 MiB/s, dirtied 64.0 MiB/s, downtime 781 ms, "
        "guest throttled 20 %, 7 pages asked for, ETA 2 s"
    )


def test_lines_go_to_stderr_with_their_time(capsys: pytest.CaptureFixture[str]) -> None:
    with display("web: a -> b") as emit:
        emit(PhaseBegan(0.0, "prepare"))
        emit(PhaseBegan(0.25, "a phase of tomorrow"))
        emit(QUIET)
        emit(Note(1.5, "postcopy", "switching to post-copy"))
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "[   0.00s] starting QEMU on the destination",
        "[   0.25s] a phase of tomorrow",
        "[   1.00s] active: round 1, 100 MiB left, 412 MiB sent, 128 MiB/s",
        "[   1.50s] note: switching to post-copy [postcopy]",
    ]


def test_samples_are_thinned_but_phases_and_notes_never(capsys: pytest.CaptureFixture[str]) -> None:
    with display("x") as emit:
        for _ in range(50):
            emit(QUIET)
            emit(Note(1.0, "x", "said"))
    lines = capsys.readouterr().err.splitlines()
    assert sum("said" in line for line in lines) == 50
    assert sum("active" in line for line in lines) == 1


def test_a_job_shows_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with display("x") as emit:
        emit(JobProgress(0.5, "save", 30, 40))
    with display("x") as emit:
        emit(JobProgress(0.5, "save", 0, 0))
    assert capsys.readouterr().err.splitlines() == ["[   0.50s] save: 75 %", "[   0.50s] save: 0 %"]


def test_a_table_is_aligned_and_can_be_cut() -> None:
    text = table(("name", "host"), [("web", "lab-a"), ("database", "b")])
    assert text == "NAME      HOST\nweb       lab-a\ndatabase  b"
    assert table(("name", "host"), []) == "NAME  HOST"


def test_fields_are_aligned() -> None:
    assert fields([("a", "1"), ("long", "2")]) == "a     1\nlong  2"
