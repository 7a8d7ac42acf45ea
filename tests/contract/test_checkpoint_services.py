"""Services that a killed command started: they are ended, or never begin."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from vmckpt.checkpoint import operate
from vmckpt.checkpoint.operate import Work, revoke
from vmckpt.checkpoint.place import Place
from vmckpt.checkpoint.service import Asked, Files, request_for, serve
from vmckpt.errors import BusyError, OutcomeUnknownError, VmckptError
from vmckpt.hosts import process
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.process import identify
from vmckpt.store.open import Access

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving(LocalHost):
    """A host whose services are this program; the last of its arguments is their directory."""

    program: str

    async def own_command(self) -> list[str]:
        return [sys.executable, "-c", self.program]


def at_work(tmp_path: Path, program: str, wish: Mapping[str, Any], verb: str) -> Work:
    host = Serving("far", tmp_path, "127.0.0.1", program=program)
    return Work(host, Asked(verb, "web", "/store"), wish, Place(host, "/store"), Access())


def says(status: object) -> str:
    return (
        "import pathlib, sys\n"
        f"(pathlib.Path(sys.argv[-1]) / 'status.json').write_text({json.dumps(status)!r})\n"
    )


def done(work: Work) -> object:
    return asyncio.run(operate.have_done(work, lambda step: None))


TAKEN = {"id": "ab", "name": "a", "pause_ms": 1.5, "took_s": 2, "stored": 3, "apart": False,
         "damaged": None, "replaced": [], "not_replaced": None, "not_ended": None}  # fmt: skip
RESTORED = {"vm": "web", "host": "far", "running_ms": 3.5, "warnings": []}
DISKS = {"vm": "web", "host": "far", "disks": ["/a"], "warnings": []}
FORKS = {"forks": [{"name": "a-1", "took_ms": 1.0, "error": "", "warnings": []}]}


@pytest.mark.parametrize(
    ("verb", "wish", "result"),
    [
        ("create", {}, TAKEN),
        ("restore", {}, RESTORED),
        ("restore", {"disks_only": True}, DISKS),
        ("fork", {}, FORKS),
    ],
)
def test_what_a_service_says_came_of_it_is_read_or_is_none(
    tmp_path: Path, verb: str, wish: Mapping[str, Any], result: dict[str, Any]
) -> None:
    """One that says that it is done, and nothing else, ended the scheduler: vmckpt had a bug."""
    well = says({"state": "done", "result": result})
    assert done(at_work(tmp_path, well, wish, verb)) == result
    first = next(iter(result))
    for bad in (None, {}, {**result, first: 7}, {**result, first: None}):
        told = says({"state": "done"} | ({} if bad is None else {"result": bad}))
        with pytest.raises(OutcomeUnknownError, match="cannot be read"):
            done(at_work(tmp_path, told, wish, verb))


def test_a_service_that_fails_without_a_word_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(VmckptError):
        done(at_work(tmp_path, says({"state": "failed"}), {}, "create"))


def test_ctrl_c_does_not_wait_for_good_for_a_service_that_is_frozen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one is whose storage hangs: no signal ends it, and the command could not be ended."""
    monkeypatch.setattr(operate, "END_S", 0.5)
    frozen = says({"state": "working"}) + "import os\nos.kill(os.getpid(), 19)  # SIGSTOP\n"
    work = at_work(tmp_path, frozen, {}, "create")

    async def run() -> None:
        asking = asyncio.ensure_future(operate.have_done(work, lambda step: None))
        while not process.find_by_argument(frozen):  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.5)
        asking.cancel()
        async with asyncio.timeout(10):
            with pytest.raises(BusyError, match="the create of 'web' on far has not ended"):
                await asking
        # What is done after its death, by its dead-man's switch, needs its request.
        assert list(tmp_path.glob("checkpointing/*/request.json"))

    try:
        asyncio.run(run())
    finally:
        for one in process.find_by_argument(frozen):
            process.kill(one)
