"""A VM that is off, on its way: what killed commands left, and a host that goes silent."""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faulty_host import FaultyHost, silence
from vmckpt.errors import OperationFailedError
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes.process import ProcessId
from vmckpt.migrate.offline import reduced_spec, temporary_qemu
from vmckpt.migrate.run import migrate
from vmckpt.options.migration import MigrationOptions
from vmckpt.vm.inventory import Vm
from vmckpt.vm.paths import new_qemu_id, vm_dir
from vmckpt.vm.record import Platform, Qemu
from vmckpt.vm.spec.spec import parse_spec

pytestmark = pytest.mark.contract
# It ends at once: no move gets further than to the beginning.
NO_QEMU = "/bin/false"


@pytest.fixture
def state(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(short_path / "op"))
    return short_path


def a_vm(host: LocalHost) -> Vm:
    """One that is off, whose own memory stands on a disk."""
    directory, ram_dir = vm_dir(host.state_dir, "web"), host.state_dir / "ram"
    ram_dir.mkdir(parents=True)
    directory.path.mkdir(parents=True)
    spec = parse_spec(f'name = "web"\nmemory = "32M"\nram_dir = "{ram_dir}"\n', "spec", ram_dir)
    platform = Platform("q35", "tcg", "qemu64")
    vm = Vm(spec, host, directory, Qemu(directory.qemu(new_qemu_id()), ProcessId(0, 0), platform))
    directory.spec.write_text(spec.text)
    directory.current.write_text(vm.qemu.to_json())
    return vm


@pytest.fixture
def left(state: Path) -> Iterator[tuple[Vm, list[Path]]]:
    """A VM that powered itself off, and what its QEMU and two of killed commands' left."""
    vm = a_vm(LocalHost("a", state / "a", "127.0.0.1", qemu=NO_QEMU))
    still, started = (vm.directory.qemu(new_qemu_id()) for _ in range(2))
    files = [
        still.ram(reduced_spec(vm.spec).ram_dir),
        *(one.ram(vm.spec.ram_dir) for one in (vm.qemu.files, started)),
        *(one.stderr for one in (vm.qemu.files, still, started)),
    ]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.touch()
    yield vm, files
    shutil.rmtree(files[0].parent, ignore_errors=True)


def test_nothing_of_earlier_qemus_stays_when_it_is_moved(left: tuple[Vm, list[Path]]) -> None:
    vm, files = left
    target = LocalHost("b", vm.host.state_dir.parent / "b", "127.0.0.1")
    with pytest.raises(OperationFailedError, match="did not start"):
        asyncio.run(migrate(vm, target, MigrationOptions(offline=True), lambda _: None))
    assert [file for file in files if file.exists()] == []
    assert {file.name for file in vm.directory.path.iterdir()} == {"spec.toml", "vm.json"}


def test_what_went_wrong_is_said_though_the_host_is_silent_then(state: Path) -> None:
    silent = FaultyHost("a", state / "a", "127.0.0.1", qemu=NO_QEMU, faults=silence("exists"))
    vm = a_vm(silent)

    async def move() -> None:
        async with temporary_qemu(vm):
            pass

    with pytest.raises(OperationFailedError, match="did not start"):
        asyncio.run(move())
    assert silent.unused() == []
