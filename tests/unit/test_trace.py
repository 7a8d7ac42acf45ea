"""What -v and -vv show, and what they never show."""

import re
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


class Lines(list[str]):
    """Lines of a trace, without their times."""

    def add(self, line: str) -> None:
        time, _, rest = line.partition(" ")
        assert re.fullmatch(r"\d\d:\d\d:\d\d\.\d{3}", time)
        self.append(rest)


@pytest.fixture
def lines() -> Iterator[Lines]:
    yield Lines()
    untrace()


def test_nothing_is_traced_by_default(lines: Lines) -> None:
    trace_command("web on a", "stop")
    assert flags() == []
    trace(Detail.NAMES, lines.add)
    assert lines == []


def test_names_only_and_a_repeated_line_once(lines: Lines) -> None:
    trace(Detail.NAMES, lines.add)
    for _ in range(3):
        trace_command("web on a", "query-migrate", {"x": 1})
    trace_process("a", ["/usr/bin/qemu-img", "info", "x"])
    assert lines == ["web on a: query-migrate", "a: run qemu-img"]
    assert flags() == ["-v"]


def test_arguments_and_every_line(lines: Lines) -> None:
    trace(Detail.ARGUMENTS, lines.add)
    for _ in range(2):
        trace_command("web on a", "migrate", {"uri": "tcp:h2:1"})
    trace_process("a", ["qemu-img", "info", "a b"])
    assert lines == [
        'web on a: migrate {"uri": "tcp:h2:1"}',
        'web on a: migrate {"uri": "tcp:h2:1"}',
        "a: run qemu-img info 'a b'",
    ]
    assert flags() == ["-vv"]


def test_no_secret_is_shown(lines: Lines) -> None:
    trace(Detail.ARGUMENTS, lines.add)
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


def test_lines_of_a_job_are_passed_on(lines: Lines) -> None:
    trace(Detail.NAMES, lines.add)
    relay("10:00:00.123 web on a: stop")
    assert lines == ["web on a: stop"]
