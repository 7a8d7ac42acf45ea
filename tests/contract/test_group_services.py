"""The jobs of a group's members, before their head has heard of all of them."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.test_checkpoint_services import left, work_of
from tests.contract.test_jobs import Playing, plan
from vmckpt.checkpoint.jobs import CHECKPOINT
from vmckpt.errors import HostDownError, RefusedError
from vmckpt.group import services
from vmckpt.hosts.processes import process

pytestmark = pytest.mark.contract


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Playing]]:
    monkeypatch.setattr(services, "END_S", 1.0)
    hosts = [Playing(name, tmp_path / name, "127.0.0.1") for name in ("a", "b")]
    for host in hosts:
        host.state_dir.mkdir()
    yield hosts
    for one in process.find_by_argument(f"{tmp_path}/"):
        process.kill(one)


async def begun(hosts: list[Playing]) -> None:
    works = [work_of(CHECKPOINT, host)._replace(held_s=0.25) for host in hosts]
    async with asyncio.timeout(60), services.at_work(works):
        raise AssertionError("it has all of its members")


def test_a_member_that_is_frozen_is_not_waited_for_for_good(
    hosts: list[Playing], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(services, "HEAD_S", 1.5)
    for host in hosts:
        plan(host, "freeze")
    with pytest.raises(HostDownError, match="the checkpoint of 'web' does not join its group"):
        asyncio.run(begun(hosts))


def test_what_a_member_fails_of_is_raised_and_the_others_are_called_off(
    hosts: list[Playing],
) -> None:
    plan(hosts[0], "refuse")
    plan(hosts[1], "wait")
    with pytest.raises(RefusedError, match="it is refused"):
        asyncio.run(begun(hosts))
    assert (hosts[1].state_dir / "undone").exists()
    assert not left(hosts[1], CHECKPOINT)
