"""Which cards a host has to give, by a tree that stands for its /sys: PCI functions and vGPUs."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.waiting import eventually
from vmckpt.errors import OperationFailedError
from vmckpt.hosts.host import COMMAND_TIMEOUT_S, Completed
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes.process import ProcessId
from vmckpt.preflight.finding import Finding, ask
from vmckpt.preflight.passthrough import passthrough_checks
from vmckpt.vm.inventory import Vm
from vmckpt.vm.passthrough.cards import (
    SYSFS,
    VFIO_DEVICES,
    Card,
    cards_of,
    cards_of_vm,
    choose,
    read_given,
    taken_on,
)
from vmckpt.vm.passthrough.passthrough import Passthrough, Strategy
from vmckpt.vm.passthrough.plug import functions, reserve
from vmckpt.vm.paths import QemuDir, vm_dir
from vmckpt.vm.record import Platform, Qemu
from vmckpt.vm.spec.spec import Spec, parse_spec

GPU, VF, VGPU = "10de:2330", "15b3:101e", "mdev:nvidia-105"
UUID = "c0ffee00-0000-4000-8000-00000000000{}"
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class StandIn(LocalHost):
    """A host whose /sys and /dev/vfio are directories of its state."""

    def _there(self, word: str) -> str:
        for path in (SYSFS, str(VFIO_DEVICES)):
            if word == path or word.startswith(path + "/"):
                return f"{self.state_dir}{word}"
        return word

    async def run(self, argv: Sequence[str], timeout_s: float = COMMAND_TIMEOUT_S) -> Completed:
        return await super(StandIn, self).run([self._there(word) for word in argv], timeout_s)

    async def usable(self, path: Path) -> bool:
        return await super(StandIn, self).usable(Path(self._there(str(path))))

    @property
    def sys(self) -> Path:
        return Path(f"{self.state_dir}{SYSFS}")

    def function(
        self, address: str, name: str, driver: str, *, of: str = "", gib: int = 1, version: str = ""
    ) -> None:
        """A PCI function, in an IOMMU group of its own."""
        location = self.sys / "devices/pci" / address
        location.mkdir(parents=True)
        vendor, _, device = name.partition(":")
        (location / "vendor").write_text(f"0x{vendor}\n")
        (location / "device").write_text(f"0x{device}\n")
        last = 0x380000000000 + gib * GIB - 1
        (location / "resource").write_text(
            "0x00000000fb000000 0x00000000fbffffff 0x40200\n"
            f"0x0000380000000000 {last:#018x} 0x14220c\n"
            "0x0000000000000000 0x0000000000000000 0x0\n"
        )
        self.drive(location, driver, version)
        self._in_group(location)
        if of:
            (location / "physfn").symlink_to(f"../{of}")
        listed = self.sys / "bus/pci/devices"
        listed.mkdir(parents=True, exist_ok=True)
        (listed / address).symlink_to(location)

    def drive(self, location: Path, driver: str, version: str = "") -> None:
        module = self.sys / "module" / driver
        drivers = self.sys / "bus/pci/drivers" / driver
        if not drivers.exists():
            module.mkdir(parents=True)
            drivers.mkdir(parents=True)
            (drivers / "module").symlink_to(module)
        if version:
            (module / "version").write_text(f"{version}\n")
        (location / "driver").symlink_to(drivers)

    def _in_group(self, location: Path) -> None:
        groups = self.sys / "kernel/iommu_groups"
        number = len(list(groups.glob("*")))
        (groups / str(number)).mkdir(parents=True)
        (location / "iommu_group").symlink_to(groups / str(number))
        door = Path(f"{self.state_dir}{VFIO_DEVICES}/{number}")
        door.parent.mkdir(parents=True, exist_ok=True)
        door.touch()

    def vgpus(self, parent: str, kind: str, number: int, could_be: int) -> None:
        """Mediated devices of a card's, and how many more could be made of it."""
        location = self.sys / "devices/pci" / parent
        types = location / "mdev_supported_types" / kind
        types.mkdir(parents=True)
        (types / "available_instances").write_text(f"{could_be}\n")
        parents, listed = self.sys / "class/mdev_bus", self.sys / "bus/mdev/devices"
        for directory in (parents, listed):
            directory.mkdir(parents=True, exist_ok=True)
        (parents / parent).symlink_to(location)
        for one in range(number):
            made = location / UUID.format(one)
            made.mkdir()
            (made / "mdev_type").symlink_to(f"../mdev_supported_types/{kind}")
            self._in_group(made)
            (listed / made.name).symlink_to(made)


@pytest.fixture
def ours(tmp_path: Path) -> StandIn:
    return StandIn("a", tmp_path / "a", "127.0.0.1")


@pytest.fixture
def theirs(tmp_path: Path) -> StandIn:
    return StandIn("b", tmp_path / "b", "127.0.0.1")


def device(match: str, strategy: Strategy = Strategy.HOOK_DETACH) -> Passthrough:
    return Passthrough("dev0", "vfio-pci", match, strategy, "/h", 0, {}, {})


def chosen(host: StandIn, wanted: Passthrough, taken: set[str] | None = None) -> tuple[str, str]:
    card, why = asyncio.run(choose(host, wanted, taken or set()))
    return (card.addresses[0] if card else "", why)


def check(ours: StandIn, theirs: StandIn, text: str) -> Finding:
    """What the preflight of a move says of the one device of a VM that has been given its card."""
    vm = a_vm(ours, f'[[passthrough]]\nid = "dev0"\n{text}\n')
    files = vm.qemu.files

    async def act() -> list[Finding]:
        await ours.make_dir(files.path)
        await reserve(ours, files, vm.spec.passthrough)
        return await ask(passthrough_checks(vm, theirs, may_postcopy=False, is_running=True))

    return next(one for one in asyncio.run(act()) if one.code == "device-dev0")


def a_vm(host: StandIn, text: str) -> Vm:
    spec: Spec = parse_spec(f'name = "web"\nmemory = "64M"\n{text}', "web.toml", Path("/"))
    directory = vm_dir(host.state_dir, "web")
    files: QemuDir = directory.qemu("q1")
    qemu = Qemu(files, ProcessId(1, 1), Platform("q35", "kvm", "host"))
    return Vm(spec, host, directory, qemu)


def test_what_a_host_shows(ours: StandIn) -> None:
    ours.function("0000:41:00.0", GPU, "vfio-pci", gib=128)
    ours.function("0000:43:00.1", VF, "mlx5_vfio_pci", of="0000:43:00.0")
    ours.function("0000:44:00.0", GPU, "nvidia", version="580.65.06")
    ours.vgpus("0000:44:00.0", "nvidia-105", 1, 2)
    found: dict[str, Card] = {card.addresses[0]: card for card in asyncio.run(cards_of(ours))}
    gpu, vf, vgpu = (found[one].functions[0] for one in ("0000:41:00.0", "0000:43:00.1",
                                                         UUID.format(0)))  # fmt: skip
    assert (gpu.name, gpu.group, gpu.window_bytes) == (GPU, "0", 128 * GIB)
    assert (vf.is_vfio, vf.part_of, vf.driver) == (True, "0000:43:00.0", "mlx5_vfio_pci")
    assert vgpu == (UUID.format(0), VGPU, "nvidia", "3", "0000:44:00.0", True, "580.65.06", 0)
    assert not found["0000:44:00.0"].functions[0].is_vfio


def test_a_driver_that_shows_it_to_vfio_by_itself(ours: StandIn) -> None:
    """As the drivers of newer vGPUs do, whose virtual functions keep the vendor's driver."""
    ours.function("0000:41:00.4", GPU, "nvidia", of="0000:41:00.0")
    assert chosen(ours, device(GPU))[0] == ""
    (ours.sys / "devices/pci/0000:41:00.4/vfio-dev/vfio0").mkdir(parents=True)
    assert chosen(ours, device(GPU))[0] == "0000:41:00.4"


def test_a_vgpu_is_one_that_was_made_and_is_free(ours: StandIn) -> None:
    ours.function("0000:44:00.0", GPU, "nvidia")
    ours.vgpus("0000:44:00.0", "nvidia-105", 2, 3)
    wanted = device(VGPU)
    assert chosen(ours, wanted)[0] == UUID.format(0)
    assert chosen(ours, wanted, {UUID.format(0)})[0] == UUID.format(1)
    address, why = chosen(ours, wanted, {UUID.format(0), UUID.format(1)})
    assert address == ""
    assert f"{UUID.format(0)} is another VM's" in why
    assert functions(wanted, [UUID.format(1)]) == [
        {
            "driver": "vfio-pci",
            "id": "dev0",
            "bus": "dev0-port",
            "addr": "0.0",
            "sysfsdev": f"/sys/bus/mdev/devices/{UUID.format(1)}",
        }
    ]


def test_where_a_vgpu_could_be_made_is_said(ours: StandIn, theirs: StandIn) -> None:
    for host, number in ((ours, 1), (theirs, 0)):
        host.function("0000:44:00.0", GPU, "nvidia", version="580.65.06")
        host.vgpus("0000:44:00.0", "nvidia-105", number, 3)
    said = check(ours, theirs, f'match = "{VGPU}"')
    assert said.verdict == "refuse"
    assert f"b has no device {VGPU} (could be made by mdevctl: 3 on 0000:44:00.0)" in said.reason


@pytest.mark.parametrize(
    ("version", "verdict"), [("580.65.06", "ok"), ("580.82.07", "warn"), ("", "warn")]
)
def test_a_vgpu_moves_by_qemu_and_its_drivers_versions_are_compared(
    ours: StandIn, theirs: StandIn, version: str, verdict: str
) -> None:
    for host, its in ((ours, "580.65.06"), (theirs, version)):
        host.function("0000:44:00.0", GPU, "nvidia", version=its)
        host.vgpus("0000:44:00.0", "nvidia-105", 1, 0)
    said = check(ours, theirs, f'match = "{VGPU}"')
    assert said.verdict == verdict, said
    assert "vfio-migration" in said.reason
    assert ("the VM's own 580.65.06" in said.reason) is (verdict == "warn")


@pytest.mark.parametrize(
    ("here", "there", "why"),
    [
        ("mlx5_vfio_pci", "mlx5_vfio_pci", None),
        ("vfio-pci", "mlx5_vfio_pci", "0000:43:00.1 is bound to vfio-pci, which moves no state"),
        ("mlx5_vfio_pci", "vfio-pci", "0000:43:00.1 is bound to vfio-pci, which moves no state"),
        ("mlx5_vfio_pci", "pds_vfio_pci", "bound to pds_vfio_pci, the VM's own to mlx5_vfio_pci"),
        ("mlx5_vfio_pci", "mlx5_core", "0000:43:00.1 (mlx5_core) is not bound to vfio-pci"),
    ],
)
def test_a_nic_moves_by_qemu_where_both_drivers_can(
    ours: StandIn, theirs: StandIn, here: str, there: str, why: str | None
) -> None:
    ours.function("0000:43:00.1", VF, here, of="0000:43:00.0")
    theirs.function("0000:43:00.1", VF, there, of="0000:43:00.0")
    said = check(ours, theirs, f'match = "{VF}"')
    assert said.verdict == ("refuse" if why else "ok"), said
    assert (why or "is free") in said.reason
    if why:
        assert "hook-detach" in said.remedy


def test_an_equal_maps_no_less(ours: StandIn, theirs: StandIn) -> None:
    ours.function("0000:41:00.0", GPU, "vfio-pci", gib=128)
    theirs.function("0000:81:00.0", GPU, "vfio-pci", gib=64)
    text = f'match = "{GPU}"\nstrategy = "failover"\nnic = 0\n[[nics]]'
    said = check(ours, theirs, text)
    assert said.verdict == "refuse"
    assert "0000:81:00.0 maps 64.0 GiB of its memory, the VM's own 128 GiB" in said.reason
    theirs.function("0000:82:00.0", GPU, "vfio-pci", gib=128)
    assert "0000:82:00.0 is free" in check(ours, theirs, text).reason


def test_a_vm_is_started_with_what_cannot_move(ours: StandIn) -> None:
    """Whether it can is asked when it is to."""
    ours.function("0000:43:00.1", VF, "vfio-pci")
    assert chosen(ours, device(VF, Strategy.VFIO_MIGRATION))[0] == "0000:43:00.1"


def test_a_group_that_cannot_be_opened_is_not_given_away(ours: StandIn) -> None:
    ours.function("0000:41:00.0", GPU, "vfio-pci")
    door = Path(f"{ours.state_dir}{VFIO_DEVICES}/0")
    door.unlink()
    door.mkdir()  # opened for writing it says no, whoever asks
    assert os.access(door, os.W_OK)
    address, why = chosen(ours, device(GPU))
    assert address == ""
    assert "/dev/vfio/0 cannot be opened (0000:41:00.0)" in why
    assert "Is a directory" in why


@pytest.mark.parametrize("line", [f"0x0 0x{'f' * 2000} 0x0", "0x0 ffff 0x0", "0x0 0x\u00b2 0x0"])
def test_windows_that_no_card_has_are_the_hosts_own_error(
    ours: StandIn, theirs: StandIn, line: str
) -> None:
    """Of a host that was broken into: a number of 8,000 bits was a bug of vmckpt's."""
    theirs.function("0000:81:00.0", GPU, "vfio-pci", gib=64)
    ours.function("0000:41:00.0", GPU, "vfio-pci")
    (ours.sys / "devices/pci/0000:41:00.0/resource").write_text(f"{line}\n")
    with pytest.raises(OperationFailedError, match="cannot list the PCI devices of a"):
        asyncio.run(choose(ours, device(GPU), set()))


@pytest.mark.parametrize("addresses", [["0000:01:00.x", "0000:01:00.1"], ["", ""], ["\u00b2"] * 2])
def test_devices_of_no_address_were_given_to_nobody(ours: StandIn, addresses: list[str]) -> None:
    files = vm_dir(ours.state_dir, "web").qemu("q1")

    async def play() -> dict[str, list[str]]:
        await ours.make_dir(files.path)
        await ours.write_text(files.given, json.dumps({"dev0": addresses}))
        assert await taken_on(ours) == set()
        assert await cards_of_vm(ours, files) == {}
        return await read_given(ours, files)

    found = asyncio.run(play())
    assert [one["id"] for one in functions(device(GPU), found.get("dev0", []))] == ["dev0"]


def test_a_card_of_a_vm_that_has_shut_down_is_free(ours: StandIn) -> None:
    """Its record stayed until the next command on that VM: no other VM was started meanwhile."""
    ours.function("0000:41:00.0", GPU, "vfio-pci")
    files = vm_dir(ours.state_dir, "other").qemu("q1")
    asyncio.run(ours.make_dir(files.path))
    asyncio.run(ours.write_text(files.given, json.dumps({"dev0": ["0000:41:00.0"]})))

    def taken() -> set[str]:
        return asyncio.run(taken_on(ours))

    waits = [sys.executable, "-c", "import time; time.sleep(60)", *files.mark.split("\0")]
    with subprocess.Popen(waits) as qemu:
        try:
            eventually(lambda: taken() == {"0000:41:00.0"})
            assert asyncio.run(taken_on(ours, besides=files)) == set()
        finally:
            qemu.kill()
    assert taken() == set()
    assert chosen(ours, device(GPU), taken())[0] == "0000:41:00.0"
