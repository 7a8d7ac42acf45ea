"""Checks of hosts whose disk is full, or which fall silent meanwhile, hide no other host."""

import asyncio
from pathlib import Path

import pytest

from vmckpt.errors import HostDownError, OutcomeUnknownError, StorageError
from vmckpt.hosts.host import Completed
from vmckpt.hosts.inventory.paste import Paste
from vmckpt.hosts.local import LocalHost
from vmckpt.preflight.finding import OK, REFUSE, WARN
from vmckpt.preflight.host import checks
from vmckpt.preflight.host.checks import check_host, check_hosts

pytestmark = pytest.mark.contract


class Full(LocalHost):
    async def write_text(self, path: Path, text: str) -> None:
        raise StorageError(f"cannot write {path}", why="No space left", remedy="free space there")

    async def make_dir(self, path: Path) -> None:
        await self.write_text(path, "")


class Silent(LocalHost):
    """It answered at first."""

    async def run(self, argv: object, timeout_s: float = 1.0) -> Completed:
        raise OutcomeUnknownError("the connection is lost", why="it is", remedy="try again")

    async def find_executable(self, name: str) -> None:
        await self.run([name])


def test_a_full_disk_is_a_finding(tmp_path: Path) -> None:
    """`host check` showed the error alone, and so did `host check --fixes` of all hosts."""
    host = Full("full", tmp_path, "127.0.0.1")
    report = asyncio.run(check_host(host, host, host))
    last = report.checks[-1]
    assert (last.code, last.verdict, report.fit) == ("storage", REFUSE, False)
    assert "No space left" in last.reason
    assert last.remedy == "# free space there"


def test_one_that_falls_silent_hides_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    well, silent = (kind(name, tmp_path, "127.0.0.1") for name, kind in
                    (("well", LocalHost), ("silent", Silent)))  # fmt: skip
    monkeypatch.setattr(checks, "find_entry", {"well": well, "silent": silent}.get)
    first, second = asyncio.run(check_hosts([well, silent]))
    assert "state-dir" in {one.code for one in first.checks}
    assert [(one.code, one.verdict) for one in second.checks] == [("reachable", REFUSE)]


def test_one_that_never_answered_is_an_error_of_its_own_check(tmp_path: Path) -> None:
    class Down(LocalHost):
        async def require_up(self) -> None:
            raise HostDownError("it is down", why="-", remedy="-")

    host = Down("down", tmp_path, "127.0.0.1")
    with pytest.raises(HostDownError):
        asyncio.run(check_host(host, host, host))


def test_this_machine_needs_an_address_and_certificates_once_another_is_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a host over SSH, 127.0.0.1 was fine, and its certificate was issued for that."""
    here = LocalHost("local", tmp_path, "127.0.0.1")
    there = LocalHost("h2", tmp_path / "h2", "192.0.2.2")
    monkeypatch.setattr(checks, "all_hosts", lambda: [here, there])

    async def verdicts() -> dict[str, str]:
        found = [await checks._address(here, Paste(here, root=True))]
        found.append(await checks._certificates(here, here))
        return {one.code: one.verdict for one in found}

    assert asyncio.run(verdicts()) == {"address": OK, "certificates": OK}
    monkeypatch.setattr(LocalHost, "is_this_machine", property(lambda self: self is here))
    assert asyncio.run(verdicts()) == {"address": WARN, "certificates": WARN}
