"""Which way back there is for a VM that was taken over, and what keeps a VM that is not there."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from vmckpt.errors import HostDownError, NotFoundError, RefusedError, UsageError
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.process import ProcessId
from vmckpt.replicate.control import answering
from vmckpt.replicate.failback import came_from, failback, last_options
from vmckpt.replicate.keep import keep
from vmckpt.replicate.operate import failover
from vmckpt.replicate.request import Files, Options, Request
from vmckpt.vm.argv import Platform
from vmckpt.vm.inventory import Vm
from vmckpt.vm.paths import vm_dir
from vmckpt.vm.spec import parse_spec
from vmckpt.vm.start import Qemu, Replaced

OPTIONS = Options("/leases", ("agent", "{host}"), epoch_s=0.05)


def a_vm(tmp_path: Path) -> Vm:
    """Of lab-b, which took it over from lab-a."""
    host, directory = LocalHost("b", tmp_path, "127.0.0.1"), vm_dir(tmp_path, "web")
    spec = parse_spec('name = "web"\nmemory = "32M"\n', "test", tmp_path)
    platform = Platform("q35", "tcg", "qemu64")
    qemu = Qemu(directory.qemu("0"), ProcessId(1, 1), platform, replaces=Replaced("a", "9"))
    return Vm(spec, host, directory, qemu)


def test_it_goes_back_to_where_it_came_from(tmp_path: Path) -> None:
    vm = a_vm(tmp_path)
    assert came_from(vm) == "a"
    with pytest.raises(NotFoundError) as unknown:
        came_from(vm._replace(qemu=vm.qemu._replace(replaces=None)))
    assert "failback web HOST" in unknown.value.remedy


def test_what_was_wished_last_is_remembered(tmp_path: Path) -> None:
    vm = a_vm(tmp_path)
    assert asyncio.run(last_options(vm)) is None
    files = Files.of(vm.host, "web")
    files.path.mkdir(parents=True)
    here = LocalHost("b", tmp_path, "127.0.0.1")
    request = Request(
        run="r", vm="web", spec=vm.spec.text, platform={}, primary=here, standby=here,
        options=OPTIONS, one_machine=False, qemu_id="9",
    )  # fmt: skip
    files.request.write_text(json.dumps(request.to_json()))
    assert asyncio.run(last_options(vm)) == OPTIONS
    files.request.write_text("{}")
    with pytest.raises(UsageError):
        asyncio.run(last_options(vm))


def test_one_that_another_host_protects_is_left_so(tmp_path: Path) -> None:
    vm, other = a_vm(tmp_path), LocalHost("c", tmp_path / "c", "127.0.0.1")
    files = Files.of(vm.host, "web")

    async def answer(word: str) -> dict[str, Any]:
        return {"role": "primary", "state": "protected", "primary": "b", "standby": "a"}

    async def main() -> None:
        await vm.host.make_dir(files.path)
        files.request.write_text("{}")
        async with answering(files.control, answer):
            with pytest.raises(RefusedError) as refused:
                await failback(vm, other, OPTIONS, "run", [vm.host, other])
        assert "from b to a" in refused.value.why

    asyncio.run(main())


class Down(LocalHost):
    """A host that has lost its power."""

    async def read_text(self, path: Path) -> str | None:
        raise HostDownError("a is down", why="no route", remedy="switch it on")

    async def exists(self, path: Path) -> bool:
        raise HostDownError("a is down", why="no route", remedy="switch it on")


def test_a_failover_from_a_host_that_is_gone_has_succeeded(tmp_path: Path) -> None:
    vm, old = a_vm(tmp_path), Down("a", tmp_path / "a", "127.0.0.1")
    files = Files.of(vm.host, "web")
    status = {
        "role": "standby", "state": "promoted", "primary": "a", "standby": "b",
        "qemu_id": "0", "primary_qemu_id": "9",
    }  # fmt: skip
    files.path.mkdir(parents=True)
    files.request.write_text("{}")
    files.status.write_text(json.dumps(status))
    vm.directory.current.parent.mkdir(parents=True)
    vm.directory.spec.write_text(vm.spec.text)
    vm.directory.current.write_text(vm.qemu.to_json())
    done = asyncio.run(failover("web", [old, vm.host]))
    assert done["state"] == "promoted"
    (warning,) = done["warnings"]
    assert "a gives no answer (no route)" in warning


def test_who_keeps_a_vm_says_once_what_is_in_the_way(tmp_path: Path) -> None:
    hosts = [LocalHost(name, tmp_path / name, "127.0.0.1") for name in "ab"]
    told: list[tuple[str, str]] = []

    async def main() -> None:
        def tell(event: str, text: str) -> None:
            told.append((event, text))

        keeping = keep("web", hosts, lambda _vm, _host: OPTIONS, new_run=lambda: "r", tell=tell)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(keeping, 1.0)

    asyncio.run(main())
    ((event, text),) = told
    assert event == "failed"
    assert "there is no VM 'web'" in text
