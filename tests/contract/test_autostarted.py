"""Which VMs a machine starts when it has booted."""

import asyncio
from pathlib import Path

import pytest

from tests.contract.test_replication_leftovers import home
from vmckpt.drivers.direct import DirectVm
from vmckpt.fleet import autostart as starting
from vmckpt.hosts.local import LocalHost
from vmckpt.vm.inventory import Vm

pytestmark = pytest.mark.contract


@pytest.mark.parametrize("is_here", [True, False])
def test_a_vm_that_another_host_has_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_here: bool
) -> None:
    """What a failover left here is not it; it may be stopped there on purpose."""
    here, there = (LocalHost(name, tmp_path / name, "127.0.0.1") for name in ("a", "b"))
    left = home(here, "old")
    left.directory.spec.write_text("autostart = true\n" + left.directory.spec.read_text())
    started: list[str] = []

    async def found(*_: object) -> Vm:
        return left if is_here else home(there, "new")

    async def start(self: DirectVm) -> None:
        started.append(self.host.name)

    monkeypatch.setattr(starting, "local_host", lambda: here)
    monkeypatch.setattr(starting, "find_own", found)
    monkeypatch.setattr(DirectVm, "start", start)
    done = asyncio.run(starting.autostart(lambda _: None))
    assert started == (["a"] if is_here else [])
    assert [one.vm for one in done] == (["web"] if is_here else [])
