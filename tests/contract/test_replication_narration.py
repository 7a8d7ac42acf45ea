"""What services of a replication leave to read: changes only, bounded, and readable ever after."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from vmckpt.cli.main import command_line
from vmckpt.hosts.local import LocalHost
from vmckpt.replicate.narration import (
    CHECK_S,
    MOST_BYTES,
    events_file,
    narrated,
    read_events,
    tell_event,
)
from vmckpt.replicate.status import ReplicaStatus, Role

STATUS = ReplicaStatus(role=Role.PRIMARY, vm="web", state="protected")


def test_each_change_is_told_once_and_the_last_one_too(tmp_path: Path) -> None:
    host = LocalHost("a", tmp_path, "127.0.0.1")
    said = replace(STATUS, state="copying", pause_p50_ms=1.0)

    async def main() -> list[dict[str, Any]]:
        nonlocal said
        async with narrated(lambda: said, host):
            await asyncio.sleep(3 * CHECK_S)
            said = replace(said, state="protected", pause_p50_ms=2.0)
            while len(await read_events("web", [host])) < 2:  # noqa: ASYNC110
                await asyncio.sleep(CHECK_S)
            said = replace(said, state="ended", why="alone")
        return await read_events("web", [host])

    events = asyncio.run(main())
    assert [event["state"] for event in events] == ["copying", "protected", "ended"]
    assert events[-1]["why"] == "alone"
    assert all(event["host"] == "a" and event["time"].endswith("Z") for event in events)
    assert "pause_p50_ms" not in events[0]
    assert events_file(host, "web").stat().st_mode & 0o777 == 0o600


def test_a_path_that_is_lost_is_told_and_that_it_is_there_again(tmp_path: Path) -> None:
    host = LocalHost("a", tmp_path, "127.0.0.1")
    states = ("waiting", "heard", "silent", "heard")

    async def main() -> list[dict[str, Any]]:
        seen = list[str]()

        def status() -> ReplicaStatus:
            seen.append(states[min(len(seen), len(states) - 1)])
            return replace(STATUS, paths={"replication": "heard", "second": seen[-1]})

        async with narrated(status, host):
            while len(seen) < len(states):  # noqa: ASYNC110
                await asyncio.sleep(CHECK_S)
        return await read_events("web", [host])

    told = [event["paths"]["second"] for event in asyncio.run(main())]
    assert told == ["waiting", "silent", "heard"]


def test_there_is_never_more_than_two_files_of_it(tmp_path: Path) -> None:
    host = LocalHost("a", tmp_path, "127.0.0.1")
    told = replace(STATUS, why="y" * (MOST_BYTES // 3))
    for number in range(10):
        tell_event(host, replace(told, term=number))
    files = list(events_file(host, "web").parent.iterdir())
    assert sum(path.stat().st_size for path in files) < 2.7 * MOST_BYTES
    kept = [event["term"] for event in asyncio.run(read_events("web", [host]))]
    assert kept == list(range(kept[0], 10))
    assert len(kept) >= 3


def test_a_file_that_cannot_be_written_stops_nothing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    host = LocalHost("a", tmp_path, "127.0.0.1")
    events_file(host, "web").mkdir(parents=True)
    tell_event(host, STATUS)
    (said,) = capfd.readouterr().err.splitlines()
    assert json.loads(said[said.index("{") :])["state"] == "protected"


def test_a_line_that_was_cut_off_is_passed_over(tmp_path: Path) -> None:
    host = LocalHost("a", tmp_path, "127.0.0.1")
    tell_event(host, STATUS)
    with events_file(host, "web").open("a") as file:
        file.write('{"time": "2026-11-28", "host": "a", "state": "x", "paths": {"second": []}}\n')
        file.write('{"time": "2026')
    tell_event(host, replace(STATUS, state="ended"))
    tell_event(host, replace(STATUS, state="copying"))
    found = [event["state"] for event in asyncio.run(read_events("web", [host]))]
    assert found == ["protected", "copying"]


def test_each_event_is_followed_once_although_a_host_was_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """When it answered again, all that it had on record came once more."""
    first, second = ({"time": f"2026-11-2{n}", "host": "a", "state": str(n)} for n in (1, 2))
    answers = [[first, second], [first], [first, second]]

    async def read(*_: object) -> list[dict[str, str]]:
        return answers.pop(0)

    def interrupted(_: float) -> None:
        if not answers:
            raise KeyboardInterrupt

    monkeypatch.setattr("vmckpt.replicate.narration.read_events", read)
    monkeypatch.setattr("time.sleep", interrupted)
    words = ["replicate", "events", "web", "--follow", "--json"]
    told = CliRunner().invoke(command_line(words), words)
    assert [json.loads(line) for line in told.stdout.splitlines()] == [first, second]
    assert not answers
