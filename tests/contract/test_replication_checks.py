"""What keeps a VM from being replicated, as a scripted QEMU says it."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from tests.contract.test_replication_leftovers import requested, stands_still_at
from tests.faulty_host import Fault, FaultyHost
from tests.scripted_qmp import answering, play
from vmckpt.errors import RefusedError
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes.kernel import PageTracking
from vmckpt.hosts.processes.process import ProcessId
from vmckpt.preflight.capture import devices
from vmckpt.preflight.finding import Finding
from vmckpt.preflight.replication.checks import _compared, _firmware, runs
from vmckpt.preflight.replication.memory import blocks
from vmckpt.qemu.monitor import Monitor
from vmckpt.replicate.primary import primary
from vmckpt.replicate.request import read_request
from vmckpt.vm.inventory import Vm
from vmckpt.vm.paths import vm_dir
from vmckpt.vm.record import Platform, Qemu
from vmckpt.vm.spec.spec import Adopted, parse_spec


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("vfio-pci", "VFIO"),
        ("vhost-user-fs-pci", "vhost"),
        ("vhost-vsock-pci", "vhost"),
        ("ivshmem-plain", "ivshmem"),
        ("usb-host", "USB"),
    ],
)
def test_a_device_that_bypasses_qemu_is_refused_by_name(kind: str, reason: str) -> None:
    listed = [
        {"name": "nic0", "type": "child<virtio-net-pci>"},
        {"name": "mine", "type": f"child<{kind}>"},
        {"name": "type", "type": "string"},
    ]

    async def look(monitor: Monitor) -> None:
        found = [check async for check in devices(monitor)]
        assert {check.code for check in found if check.verdict == "refuse"} == {"bypass"}
        refused = [check for check in found if check.verdict == "refuse"]
        assert all("'mine'" in check.reason and reason in check.reason for check in refused)
        assert all("'mine'" in check.remedy for check in refused)

    play(answering(query_migrate={}, qom_list=listed), look)


def test_a_device_that_qemu_cannot_save_is_refused_by_its_id() -> None:
    blocked = {"blocked-reasons": ["non-migratable device: 0000:00:03.0/1/usb-mtp"]}
    pci = [{"devices": [{"bus": 0, "slot": 3, "function": 0, "qdev_id": "usb"}]}]

    async def look(monitor: Monitor) -> None:
        (found,) = [check async for check in devices(monitor)]
        assert (found.code, found.verdict) == ("migratable", "refuse")
        assert "'usb'" in found.reason

    play(answering(query_migrate=blocked, query_pci=pci, qom_list=[]), look)


def test_firmware_variables_that_the_guest_can_write_are_refused(tmp_path: Path) -> None:
    firmware = '[firmware]\ncode = "/usr/share/code.fd"\nvars = "/var/vars.fd"\n'
    for text, refused in ((firmware, ["firmware-variables"]), ("", [])):
        spec = parse_spec(f'name = "web"\nmemory = "32M"\n{text}', "test", tmp_path)
        directory = vm_dir(tmp_path, "web")
        qemu = Qemu(directory.qemu("0"), ProcessId(1, 1), Platform("q35", "tcg", "qemu64"))
        vm = Vm(spec, LocalHost("a", tmp_path, "127.0.0.1"), directory, qemu)
        found = list(_firmware(vm))
        assert [check.code for check in found if check.verdict == "refuse"] == refused
        assert all("/var/vars.fd" in check.reason for check in found)


@pytest.mark.parametrize("count", [1, 2])
def test_memory_in_several_blocks_is_refused_and_no_migration_helps(
    tmp_path: Path, count: int
) -> None:
    spec = parse_spec('name = "web"\nmemory = "32M"\n', "test", tmp_path)
    ram = '{{"qom-type":"memory-backend-file","id":"m{0}","mem-path":"<vmckpt:ram>","offset":{0}}}'
    words = tuple(word for number in range(count) for word in ("-object", ram.format(number)))
    directory = vm_dir(tmp_path, "web")
    qemu = Qemu(directory.qemu("0"), ProcessId(1, 1), Platform("q35", "tcg", "qemu64"))
    host = LocalHost("a", tmp_path, "127.0.0.1")
    vm = Vm(spec._replace(adopted=Adopted(words, (), ())), host, directory, qemu)
    found = list(blocks(vm))
    assert [check.code for check in found] == ["memory-blocks"] * (count - 1)
    assert all("vmckpt schedule add web" in check.remedy for check in found)


@pytest.mark.parametrize(
    ("how", "memory", "lease_s", "refused"),
    [
        (PageTracking.COMPARISON, "4G", 3.0, False),
        (PageTracking.COMPARISON, "16G", 3.0, True),
        (PageTracking.COMPARISON, "16G", 10.0, False),
        (PageTracking.COMPARISON, "64G", 10.0, True),
        (PageTracking.PROTECTION, "64G", 3.0, False),
        (PageTracking.SOFT_DIRTY, "64G", 3.0, False),
    ],
)
def test_no_guest_is_compared_for_longer_than_its_lease_may_wait(
    tmp_path: Path, how: PageTracking, memory: str, lease_s: float, *, refused: bool
) -> None:
    """Its service did nothing else meanwhile: the lease of a healthy guest ended."""
    host = FaultyHost("a", tmp_path, "-", faults=(Fault("page_tracking", answers=how),))
    spec = parse_spec(f'name = "web"\nmemory = "{memory}"\n', "test", tmp_path)
    directory = vm_dir(tmp_path, "web")
    qemu = Qemu(directory.qemu("0"), ProcessId(1, 1), Platform("q35", "tcg", "qemu64"))

    async def checked() -> list[Finding]:
        return [one async for one in _compared(Vm(spec, host, directory, qemu), lease_s)]

    found = asyncio.run(checked())
    assert [one.verdict for one in found] == ["refuse"] * refused
    assert all("--lease-time" in one.remedy for one in found)


@pytest.mark.parametrize(
    ("state", "remedy"),
    [
        ("running", ""),
        ("paused", "vmckpt vm resume web"),
        ("io-error", "vmckpt vm resume web"),
        ("suspended", "vmckpt vm show web"),
    ],
)
def test_a_guest_that_does_not_run_is_not_protected(
    tmp_path: Path, state: str, remedy: str
) -> None:
    directory = vm_dir(tmp_path, "web")
    spec = parse_spec('name = "web"\nmemory = "32M"\n', "test", tmp_path)
    qemu = Qemu(directory.qemu("0"), ProcessId(1, 1), Platform("q35", "tcg", "qemu64"))
    vm = Vm(spec, LocalHost("a", tmp_path, "127.0.0.1"), directory, qemu)

    async def look(monitor: Monitor) -> None:
        found = [check async for check in runs(vm, monitor)]
        assert [check.remedy for check in found] == ([remedy] if remedy else [])
        assert all(f"'{state}'" in check.reason for check in found)

    play(answering(query_status={"status": state, "running": state == "running"}), look)


def test_a_guest_that_was_paused_since_start_checked_it_stays_paused(tmp_path: Path) -> None:
    """It was resumed as its protection, which had no epoch, ended: `keep` did so by itself."""
    hosts = tuple(LocalHost(name, tmp_path / name, "127.0.0.1") for name in ("b", "a"))
    did = list[str]()

    async def main() -> None:
        files = requested((hosts[0], hosts[1]), tmp_path)
        request = replace(read_request(files.path), qemu_id="new")
        async with stands_still_at(hosts[0], did):
            with pytest.raises(RefusedError, match="cannot be protected") as refused:
                await primary._vm_of(request)
        assert "vmckpt vm resume web" in refused.value.remedy

    asyncio.run(main())
    assert "cont" not in did
