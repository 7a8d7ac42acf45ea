"""A host that says that it has taken a VM over: the VM's own host has to know of it.

It may have been broken into, or have been dead by the operator's word, and come back.
"""

import asyncio
import json
from pathlib import Path

import pytest

from tests.contract.test_replication_leftovers import home, record, requested
from tests.silent_ends import marked_as
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes.process import identify
from vmckpt.replicate.operator.leftovers import remove_replaced
from vmckpt.replicate.operator.operate import settle
from vmckpt.replicate.primary.claim import Claim
from vmckpt.replicate.request import ServiceFiles
from vmckpt.vm.inventory import read_vm
from vmckpt.vm.record import Replaced

pytestmark = pytest.mark.contract
Hosts = tuple[LocalHost, LocalHost]


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    return LocalHost("a", tmp_path / "a", "127.0.0.1"), LocalHost("b", tmp_path / "b", "127.0.0.1")


@pytest.mark.parametrize("says", ["its home", "its service", "its home, protected again"])
@pytest.mark.parametrize("standby", ["", "c"])
def test_a_vm_that_was_not_protected_by_a_host_is_not_ended_by_its_word(
    hosts: Hosts, tmp_path: Path, says: str, standby: str
) -> None:
    vm = home(hosts[0], "old")
    if standby:
        Claim("web", "a/1", standby, str(tmp_path / "leases")).write(vm.directory.claim)
        record(tmp_path, "a/1", "c/1")
    said = home(hosts[1], "new", None if says == "its service" else Replaced("a", "old"))
    if says == "its service":
        files = ServiceFiles.of(hosts[1], "web")
        requested(hosts, tmp_path)
        asyncio.run(hosts[0].remove(ServiceFiles.of(hosts[0], "web").path))
        word = {"role": "standby", "state": "promoted", "run": "1", "why": "-", "primary": "a"}
        word |= {"qemu_id": "new", "primary_qemu_id": "old"}
        files.status.write_text(json.dumps(word))
    with marked_as(vm.qemu.files) as process:
        itself = identify(process.pid)
        assert itself is not None
        vm.directory.current.write_text(vm.qemu._replace(process=itself).to_json())
        if says == "its home, protected again":
            asyncio.run(remove_replaced(said, hosts[0]))
        else:
            asyncio.run(settle("web", hosts))
        assert process.poll() is None
    assert asyncio.run(read_vm(hosts[0], "web")) is not None


def test_a_standby_that_was_said_to_be_dead_and_comes_back_does_not_end_what_runs(
    hosts: Hosts, tmp_path: Path
) -> None:
    """The primary went on alone, in the same QEMU: its claim and its service's files had gone."""
    home(hosts[0], "old")
    home(hosts[1], "new", Replaced("a", "old"))
    requested(hosts, tmp_path)
    asyncio.run(hosts[0].remove(ServiceFiles.of(hosts[0], "web").path))
    record(tmp_path, "a/1/recovery", None)
    assert asyncio.run(settle("web", hosts))
    assert asyncio.run(read_vm(hosts[0], "web")) is not None
    assert asyncio.run(read_vm(hosts[1], "web")) is None
