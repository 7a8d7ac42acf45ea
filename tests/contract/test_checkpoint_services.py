"""Services that a killed command started: they are ended, or never begin."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from vmckpt.checkpoint.operate import revoke
from vmckpt.checkpoint.service import Asked, Files, request_for, serve
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.process import identify

FOREVER = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.fixture
def host(tmp_path: Path) -> LocalHost:
    return LocalHost("here", tmp_path, "127.0.0.1")


@pytest.fixture
def service() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(FOREVER) as child:
        yield child
        child.kill()


def asked_for(host: LocalHost, run: str, vm: str, key: Path | None = None) -> Files:
    files = Files.of(host, run)
    files.path.mkdir(parents=True)
    files.request.write_text(request_for(host, Asked("create", vm, "/store"), {}, key))
    return files


def of_web(request: Mapping[str, Any]) -> bool:
    return bool(request["vm"] == "web")


def test_one_that_was_revoked_never_begins(host: LocalHost, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("00ff")
    mine, other = asked_for(host, "r1", "web", key), asked_for(host, "r2", "db")
    asyncio.run(revoke(host, of_web))
    for files in (mine, other):
        asyncio.run(serve(files.path, ["true"]))
    assert not mine.status.exists()
    assert not key.exists()
    assert json.loads(other.status.read_text())["state"] == "failed"  # there is no such VM


@pytest.mark.parametrize("text", ["{}", '{"vm": 1}', '{"verb": "create", "vm": "web"}', "[", "[1]"])
def test_what_is_no_request_keeps_no_other_from_being_revoked(host: LocalHost, text: str) -> None:
    """It ended a guard's rollback: vmckpt had a bug."""
    other, mine = asked_for(host, "r1", "web"), asked_for(host, "r2", "web")
    other.request.write_text(text)
    other.process.write_text('{"pid": 1, "is": "init"}')
    asyncio.run(revoke(host, of_web))
    assert mine.revoked.exists()
    assert not other.revoked.exists()


@pytest.mark.parametrize(("state", "is_ended"), [("working", True), ("running", False)])
def test_one_at_work_is_ended_and_what_it_has_done_stays(
    host: LocalHost, service: "subprocess.Popen[bytes]", state: str, is_ended: bool
) -> None:
    files = asked_for(host, "r1", "web")
    process = identify(service.pid)
    assert process
    files.process.write_text(json.dumps(asdict(process)))
    files.status.write_text(json.dumps({"state": state}))
    asyncio.run(revoke(host, of_web))
    assert (service.poll() is not None) is is_ended
