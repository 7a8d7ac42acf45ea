"""What -v and -vv show, and what they never show."""

from collections.abc import Iterator

import pytest

from vmckpt.events.trace import (
    Detail,
    flags,
    relay,
    trace,
    trace_command,
    trace_process,
    untrace,
)

pytestmark = pytest.mark.unit


@pytest.fixture
def lines() -> Iterator[list[str]]:
    yield []
    untrace()


def test_nothing_is_traced_by_default(lines: list[str]) -> None:
    trace_command("web on a", "stop")
    assert flags() == []
    trace(Detail.NAMES, lines.append)
    assert lines == []


def test_names_only_and_a_repeated_line_once(lines: list[str]) -> None:
    trace(Detail.NAMES, lines.append)
    for _ in range(3):
        trace_command("web on a", "query-migrate", {"x": 1})
    trace_process("a", ["/usr/bin/qemu-img", "info", "x"])
    assert lines == ["web on a: query-migrate", "a: run qemu-img"]
    assert flags() == ["-v"]


def test_arguments_and_every_line(lines: list[str]) -> None:
    trace(Detail.ARGUMENTS, lines.append)
    for _ in range(2):
        trace_command("web on a", "migrate", {"uri": "tcp:h2:1"})
    trace_process("a", ["qemu-img", "info", "a b"])
    assert lines == [
        'web on a: migrate {"uri": "tcp:h2:1"}',
        'web on a: migrate {"uri": "tcp:h2:1"}',
        "a: run qemu-img info 'a b'",
    ]
    assert flags() == ["-vv"]


def test_no_secret_is_shown(lines: list[str]) -> None:
    trace(Detail.ARGUMENTS, lines.append)
    trace_command("web on a", "object-add", {"qom-type": "secret", "id": "k", "data": "hunter2"})
    trace_command(
        "web on a", "set_password", {"password": "hunter2", "inner": [{"token": "hunter2"}]}
    )
    trace_command("web on a", "blockdev-add", {"file": "https://me:hunter2@disks/web?x=1"})
    trace_process("a", ["fence", "--password", "hunter2", "--passwd=hunter2", "--port", "1"])
    trace_process("a", ["sh", "-c", "x --secret hunter2"])
    trace_process("a", ["curl", "https://me:hunter2@host/", "secret=hunter2,id=1"])
    text = "\n".join(lines)
    assert "hunter2" not in text
    assert text.count("***") == 9
    assert "--port 1" in text
    assert "disks/web?x=1" in text


def test_lines_of_a_job_are_passed_on(lines: list[str]) -> None:
    trace(Detail.NAMES, lines.append)
    relay("web on a: stop")
    assert lines == ["web on a: stop"]
