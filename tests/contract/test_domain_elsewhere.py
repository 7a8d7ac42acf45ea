"""On which host a domain's checkpoint is restored, when libvirtds are silent."""

import asyncio
from pathlib import Path

import pytest

from vmckpt.checkpoint.domains import elsewhere
from vmckpt.errors import HostDownError
from vmckpt.hosts.every import Answers
from vmckpt.hosts.local import LocalHost
from vmckpt.vm.domains.flags import DomainState
from vmckpt.vm.domains.inventory import Domain, as_domain
from vmckpt.vm.domains.replies import DomainInfo

pytestmark = pytest.mark.contract
UUID = "11111111-1111-1111-1111-111111111111"
XML = "<domain type='qemu'><name>web</name><os><type machine='q35'>hvm</type></os></domain>"


def found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, state: DomainState, *, silent: bool
) -> str:
    host = LocalHost("b", tmp_path, "127.0.0.1")
    error = HostDownError("c's libvirtd does not answer", why="silent", remedy="start it")

    async def all_domains(_: object) -> Answers[Domain]:
        there = as_domain(host, DomainInfo(UUID, "web", state, 1, True, XML))
        return Answers([there], [error] if silent else [])

    monkeypatch.setattr(elsewhere, "all_domains", all_domains)
    return asyncio.run(elsewhere.host_of_domain(UUID, "local")).name


@pytest.mark.parametrize("silent", [True, False])
def test_a_domain_that_runs_is_where_it_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, silent: bool
) -> None:
    assert found(monkeypatch, tmp_path, DomainState.RUNNING, silent=silent) == "b"


def test_one_that_is_off_may_run_where_libvirtd_is_silent(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A plain `virsh migrate --persistent` leaves its definition behind."""
    assert found(monkeypatch, tmp_path, DomainState.SHUTOFF, silent=False) == "b"
    with pytest.raises(HostDownError, match="runs on none of the hosts"):
        found(monkeypatch, tmp_path, DomainState.SHUTOFF, silent=True)
