"""A start that fails half-way: nothing of it stays, and the VM is as it was."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.faulty_host import Fault, FaultyHost
from vmckpt.errors import HostDownError, StorageError
from vmckpt.hosts.inventory.inventory import local_host
from vmckpt.hosts.local import LocalHost
from vmckpt.vm import create, lifecycle
from vmckpt.vm.paths import QemuDir, vm_dir
from vmckpt.vm.record import Platform
from vmckpt.vm.spec.spec import Spec, parse_spec


@pytest.mark.parametrize("before", [None, "the old one"])
def test_where_the_disk_is_full_qemu_is_ended_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    current, ended = vm_dir(tmp_path, "web").current, list[QemuDir]()
    current.parent.mkdir(parents=True)
    if before is not None:
        current.write_text(before)

    async def close() -> None:
        pass

    async def start_qemu(*_: object, **__: object) -> tuple[Any, Any]:
        return SimpleNamespace(to_json=lambda: "the new one"), SimpleNamespace(close=close)

    async def end_qemu(host: LocalHost, ram_dir: Path, files: QemuDir) -> None:
        ended.append(files)

    monkeypatch.setattr(lifecycle, "start_qemu", start_qemu)
    monkeypatch.setattr(lifecycle, "end_qemu", end_qemu)
    spec = cast(
        "Spec",
        SimpleNamespace(name="web", nics=(), passthrough=(), ram_dir=tmp_path, is_isolated=False),
    )
    platform = cast("Platform", None)
    no_room = StorageError("cannot write", why="no space left", remedy="free some")
    full = Fault("write_text", raises=lambda _: no_room)
    host = FaultyHost("a", tmp_path, "127.0.0.1", faults=(full,))
    with pytest.raises(StorageError):
        asyncio.run(lifecycle.boot(spec, host, platform))
    assert len(ended) == 1
    assert (current.read_text() if current.exists() else None) == before


def test_a_vm_whose_second_image_cannot_be_made_leaves_no_first_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def make(host: LocalHost, path: Path, image_format: str, size_bytes: int) -> None:
        path.write_text("an image, or half of one")
        if path.name == "two.raw":
            raise HostDownError("a is silent", why="for 30 s", remedy="look")

    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(create, "create_image", make)
    (tmp_path / "images").mkdir()
    (tmp_path / "images/zero.raw").write_text("was there")
    disks = [f'[[disks]]\nimage = "{name}.raw"\nsize = "1M"\n' for name in ("zero", "one", "two")]
    text = 'name = "web"\nmemory = "64M"\n' + "".join(disks)
    with pytest.raises(HostDownError):
        asyncio.run(create.run_vm(parse_spec(text, "spec", tmp_path), local_host()))
    assert [path.name for path in (tmp_path / "images").iterdir()] == ["zero.raw"]
