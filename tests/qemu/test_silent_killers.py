"""What QEMU itself does not notice, or never: refused beforehand, or found out and undone.

Each is a way for a guest to die although both QEMUs say that all is well.
"""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.qemu.world import World, image, kill, loaded, spoilable, world
from vmckpt.lab.guests.labguest import LabGuest
from vmckpt.qemu.monitor import session
from vmckpt.vm.inventory import find_vm


def guest() -> LabGuest:
    return LabGuest("mover", 1, image())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    wrapper = spoilable("10.0", tmp_path_factory.mktemp("q"))
    with world(wrapper, wrapper) as one:
        spec = one.state_dir / "mover.toml"
        spec.write_text(guest().spec() + '[[devices]]\ndriver = "pcie-root-port"\nid = "port1"\n')
        one.ok("vm", "run", str(spec), "--host", "lab-a")
        yield one


def refuses(made: World, code: int, *words: str) -> str:
    """The migration fails with this code, and the guest goes on at home, whole. What it said."""

    async def tried() -> str:
        async with loaded(made, guest()) as control:
            await asyncio.sleep(0.5)
            done = await asyncio.to_thread(made.vmckpt, "migrate", "mover", "lab-b", *words)
            assert done.code == code, done.stderr
            await control.ping()
            return f"{done.error['what']}: {done.error['why']}"

    said = asyncio.run(tried())
    at_home(made)
    return said


def at_home(made: World) -> None:
    shown = made.ok("vm", "show", "mover")
    assert (shown["host"], shown["state"], shown["migration_cut_off"]) == (
        "lab-a",
        "running",
        False,
    )
    assert [one.pid for one in made.qemus("mover")] == [shown["pid"]]
    assert made.files("lab-b") == []


def home(made: World) -> Path:
    return made.lab.host("lab-a").state_dir / "vms" / "mover"


@pytest.mark.parametrize(
    ("cpu", "found"),
    [
        ("Nehalem", "CPU model: qemu64"),
        ("qemu64,-sse3", "CPU features: 1 CPUID word of qemu64"),
    ],
)
def test_another_cpu(made: World, cpu: str, found: str) -> None:
    record = home(made) / "vm.json"
    kept = record.read_text()
    data = json.loads(kept)
    data["platform"]["cpu"] = cpu
    record.write_text(json.dumps(data))
    try:
        assert found in refuses(made, 4)
    finally:
        record.write_text(kept)


def test_another_number_of_vcpus(made: World) -> None:
    spec = home(made) / "spec.toml"
    kept = spec.read_text()
    spec.write_text(kept.replace("vcpus = 1", "vcpus = 2"))
    try:
        assert "vCPUs: 1 here, 2 there" in refuses(made, 4)
    finally:
        spec.write_text(kept)


async def told(made: World, command: str, **arguments: object) -> None:
    """Someone else's hand on the source's QEMU."""
    os.environ["VMCKPT_STATE_DIR"] = str(made.state_dir)
    try:
        vm = await find_vm("mover")
    finally:
        del os.environ["VMCKPT_STATE_DIR"]
    async with session(await vm.host.connect(vm.qemu.files.onlooker), "mover") as monitor:
        await monitor.tell(command, arguments)


def test_a_device_that_the_target_lacks(made: World) -> None:
    """Someone has plugged one by hand."""
    asyncio.run(told(made, "device_add", driver="virtio-rng-pci", id="extra", bus="port1"))
    assert "extra" in refuses(made, 4)
    asyncio.run(told(made, "device_del", id="extra"))


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ("migrate-set-parameters", "multifd-channels"),
        ("migrate-set-capabilities", "return-path"),
    ],
)
def test_a_setting_that_only_one_side_has(made: World, command: str, named: str) -> None:
    """Other channel counts hang both forever; without a return path the source is told nothing."""
    off = {"capability": "return-path", "state": False}
    asyncio.run(told(made, "migrate-set-capabilities", capabilities=[off]))
    with made.spoilt("lab-a", {"command": command, "of": named, "do": "lie"}):
        assert named in refuses(made, 7, "--parallel", "3")


@pytest.mark.timeout(200)
@pytest.mark.parametrize("moment", [pytest.param("agree", marks=pytest.mark.long), "device state"])
def test_a_target_that_stops_for_good(made: World, moment: str) -> None:
    """In the device phase the source's QMP is blocked with it: only a yank frees it."""
    journal = home(made) / "migration.json"

    def reached(stops: int) -> bool:
        if moment == "agree":
            return journal.exists() and '"step": "agree"' in journal.read_text()
        return source_stops(made) > stops

    async def stopped() -> None:
        async with loaded(made, guest()) as control:
            # More is left at the stop than sockets hold.
            await control.load_memory("rate=100M set=96M pattern=uniform content=random")
            (before,), stops = made.qemus("mover"), source_stops(made)
            words = ["--bandwidth", "300MB", "--max-downtime", "2s"]
            words += ["--tls", "psk"] if moment == "agree" else []
            command = made.begin("migrate", "mover", "lab-b", *words)
            try:
                while not reached(stops):
                    assert command.poll() is None
                    await asyncio.sleep(0.0005)
                for one in made.qemus("mover"):
                    if one != before:
                        os.kill(one.pid, signal.SIGSTOP)
                out, err = await asyncio.to_thread(command.communicate, timeout=120)
            finally:
                kill(command)
            assert command.returncode == 7, out + err
            await control.ping()

    asyncio.run(stopped())
    at_home(made)


def source_stops(made: World) -> int:
    (log,) = home(made).glob("qemu-*/stderr.log")
    return log.read_text().count("vm_state_notify running 0")
