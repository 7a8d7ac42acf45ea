"""A program finds and examines VMs as commands do; `tests/contract/test_images.py` removes them."""

import asyncio
from pathlib import Path

import pytest

from vmckpt.drivers.direct import DirectVm
from vmckpt.drivers.driver import examined
from vmckpt.drivers.find import find, find_own, inspect_everywhere
from vmckpt.errors import (
    HostDownError,
    NotFoundError,
    RefusedError,
    StorageError,
    UsageError,
    VmckptError,
)
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory.inventory import local_host
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes.process import ProcessId
from vmckpt.options.migration import MigrationOptions
from vmckpt.preflight.finding import Examined
from vmckpt.vm.paths import vm_dir
from vmckpt.vm.record import Platform, Qemu

pytestmark = pytest.mark.contract


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalHost:
    """This machine, with a VM that is off."""
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path))
    directory = vm_dir(tmp_path, "web")
    directory.path.mkdir(parents=True)
    directory.spec.write_text('name = "web"\nmemory = "64M"\n')
    platform = Platform("q35", "tcg", "qemu64")
    directory.current.write_text(Qemu(directory.qemu("0"), ProcessId(0, 0), platform).to_json())
    return local_host()


def test_a_vm_that_is_off_is_found_and_told_of(host: LocalHost) -> None:
    told: list[str] = []

    async def work() -> None:
        vm = await find("web", told.append)
        info = await vm.inspect()
        assert (vm.host.name, info.state, info.is_on) == (host.name, "stopped", False)
        assert (await inspect_everywhere()).given == [info]
        assert (await find_own("web", told.append)).name == "web"
        with pytest.raises(RefusedError, match="is stopped"):
            await vm.console()
        with pytest.raises(UsageError, match="not a name for a snapshot"):
            await vm.save("../x", print)
        with pytest.raises(NotFoundError, match="no VM 'db'"):
            await find("db", told.append)

    asyncio.run(work())
    assert told == []


@pytest.mark.parametrize(
    ("kind", "code"), [(HostDownError, "reachable"), (StorageError, "storage")]
)
def test_an_error_of_an_examination_is_one_more_refusal(
    host: LocalHost, kind: type[VmckptError], code: str
) -> None:
    vm = asyncio.run(find_own("web", print))

    class Failing(DirectVm):
        async def examine(self, target: Host, options: MigrationOptions) -> Examined:
            raise kind("it failed", why="so", remedy="do")

    found = asyncio.run(examined(Failing(vm), host, MigrationOptions()))
    assert not found.is_possible
    assert [(one.code, one.reason, one.remedy) for one in found.checks] == [
        (code, "it failed: so", "do")
    ]


def test_a_vm_whose_files_cannot_be_read_on_this_machine_hides_no_other(host: LocalHost) -> None:
    """A bad sector below one VM's directory ended `vm list`, `drain` and `top` of all VMs."""
    odd = vm_dir(host.state_dir, "odd")
    odd.current.mkdir(parents=True)
    odd.spec.write_text('name = "odd"\nmemory = "64M"\n')
    found = asyncio.run(inspect_everywhere())
    assert [vm.name for vm in found.given] == ["web"]
    assert found.unanswered == ()
    [unread] = found.unread
    assert (unread.host, unread.vm) == (host.name, "odd")
    assert found.silent == [unread.error]
