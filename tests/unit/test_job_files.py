"""What a migration that runs on its source host leaves to read."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmckpt.errors import NotFoundError
from vmckpt.events.lines import Lines, from_line, to_line
from vmckpt.events.types import Event, JobProgress, Note, PhaseBegan, Progress
from vmckpt.hosts.host import HostEntry
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.remote.tls import TlsEndpoint
from vmckpt.jobs.files import JobFiles
from vmckpt.jobs.kind import ORDER
from vmckpt.migrate.elsewhere.job import MIGRATE, MigrationRequest
from vmckpt.options.migration import Method, MigrationOptions, Tls

EVENTS: list[Event] = [
    PhaseBegan(0.1, "prepare"),
    Note(0.2, "tls", "encrypted, ü\nby certificates"),
    JobProgress(0.3, "mirror", 1, 2),
    Progress(0.4, "active", 1, 2, 3, 4, 5.5, 6.5, None, 0, 0, None),
    Progress(0.5, "active", 2, 2, 3, 4, 5.5, 6.5, 30, 20, 7, 1.5),
]


@pytest.mark.parametrize("event", EVENTS)
def test_an_event_is_one_line_and_comes_back(event: Event) -> None:
    line = to_line(event)
    assert line.count("\n") == 1
    assert line.endswith("\n")
    assert from_line(line) == event


@pytest.mark.parametrize(
    "line",
    ["", "[]", "{}", '{"event": "Explosion"}', '{"event": "Note"}', '{"event": ["Note"]}',
     '{"event": "Note", "at_s": -1, "code": "a", "text": "b"}',
     '{"event": "Note", "at_s": 1e300, "code": "a", "text": "b"}',
     '{"event": "Note", "at_s": 1, "code": null, "text": "b"}',
     '{"event": "JobProgress", "at_s": 1, "phase": "a", "done": -1, "total": 2}',
     '{"event": "JobProgress", "at_s": 1, "phase": "a", "done": 1.5, "total": 2}'],
)  # fmt: skip
def test_what_is_no_event_is_refused(line: str) -> None:
    with pytest.raises(ValueError):
        from_line(line)


@given(st.lists(st.integers(1, 40), max_size=60))
def test_lines_come_whole_however_the_bytes_come(sizes: list[int]) -> None:
    data = "".join(to_line(event) for event in EVENTS).encode()
    lines, found, offset = Lines(), [], 0
    for size in [*sizes, len(data)]:
        found += list(lines.feed(data[offset : offset + size]))
        offset += size
    assert found == EVENTS


def test_a_job_is_read_as_it_was_written(tmp_path: Path) -> None:
    source = LocalHost("a", tmp_path, "192.0.2.1", bridge="br0", migration_ports=(5, 9))
    target = HostEntry("b", Path("/b"), "192.0.2.2", qemu="/opt/qemu")
    options = MigrationOptions(method=Method.POSTCOPY, tls=Tls.PSK, timeout_s=5.0)
    request = MigrationRequest(target, options, TlsEndpoint("192.0.2.2", 7, "ab", "cd"))
    files = JobFiles.of(tmp_path, MIGRATE.name, "r1")
    with pytest.raises(NotFoundError):
        MIGRATE.job(files)
    files.path.mkdir(parents=True)
    files.order.write_text(ORDER.encode(MIGRATE.order(source, "web", request)))
    found = MIGRATE.job(files)
    assert (found.run, found.vm, found.host, found.request) == ("r1", "web", source, request)
    assert found.request.options.method is Method.POSTCOPY
    there = found.request.open_destination()
    assert (there.name, there.state_dir, there.qemu) == ("b", Path("/b"), "/opt/qemu")
    assert not there.is_this_machine
