"""Output that is held: whoever holds it, and whatever is in the way, in the end it is let go."""

import asyncio
import time
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from vmckpt.codec import convert
from vmckpt.epoch.capture import resume
from vmckpt.epoch.output import BriefHold, HeldOutput, brief_holds, holds_output
from vmckpt.epoch.senders import require_holdable, senders
from vmckpt.errors import RefusedError
from vmckpt.qemu.monitor import CommandRefusedError, MonitorLostError
from vmckpt.replicate.primary.epochs import Epochs
from vmckpt.replicate.primary.protection import Protection

pytestmark = pytest.mark.contract

NIC = "/machine/peripheral-anon/device[0]/virtio-backend"
GATE, OUTER, INNER = (f"vmckpt-{name}-net0" for name in ("gate", "outer", "inner"))


class Qemu:
    """Its objects, by a monitor that gives no answer to so many questions, and a guest."""

    def __init__(self, *objects: str, silences: int = 0, lives_for: int = 1000) -> None:
        self.objects, self.silences, self._lives_for = [*objects], silences, lives_for
        self.runs = False
        self.sent: int | None = 65000
        self.chardevs = [name for name in objects if name.startswith("vmckpt-gate-")]

    async def ask(self, command: str, kind: type[Any], arguments: object = None) -> Any:
        return convert(kind, self._answer(command, arguments))

    def _answer(self, command: str, arguments: object) -> object:
        if command == "x-query-virtio":
            disk = {"name": "virtio-blk", "path": "/machine/peripheral/disk0-dev/virtio-backend"}
            return [{"name": "virtio-net", "path": NIC}, disk]
        if command == "x-query-virtio-queue-status":
            assert arguments == {"path": NIC, "queue": 1}
            if self.sent is None:
                raise CommandRefusedError("web", command, "not found")
            return {"used-idx": self.sent % 65536}
        assert command == "qom-list"
        if self.silences:
            self.silences -= 1
            raise MonitorLostError("web did not answer qom-list", why="a test's", remedy="-")
        return [{"name": name, "type": "child<filter-buffer>"} for name in self.objects]

    async def tell(self, command: str, arguments: Any = None) -> None:
        if command == "object-del":
            self.objects.remove(arguments["id"])
        elif command == "chardev-remove":
            if arguments["id"] not in self.chardevs or arguments["id"] in self.objects:
                raise CommandRefusedError(command, "GenericError", "not found, or busy")
            self.chardevs.remove(arguments["id"])
        else:
            assert command == "cont"
            self.runs = True

    def lives(self) -> bool:
        self._lives_for -= 1
        return self._lives_for >= 0


@pytest.mark.parametrize("left", [(GATE, OUTER, INNER), (INNER,), (OUTER,), (GATE,)])
def test_what_a_killed_service_left_of_its_buffers_is_found_and_removed(
    left: tuple[str, ...],
) -> None:
    qemu: Any = Qemu("another", *left, "vmckpt-inner-net1")

    async def main() -> None:
        held = await holds_output(qemu)
        assert sorted(held) == ["net0", "net1"]
        await HeldOutput(qemu, held).release_all()

    asyncio.run(main())
    assert (qemu.objects, qemu.chardevs) == (["another"], [])


class Adopted:
    """The monitor of a QEMU with such networks; `refused`: those that it does not filter."""

    def __init__(self, networks: str, refused: str = "") -> None:
        self._networks, self._refused = networks, refused
        self.objects: dict[str, Any] = {}
        self.made: list[dict[str, Any]] = []

    async def ask(self, command: str, kind: type[Any], arguments: Any = None) -> Any:
        if command == "human-monitor-command":
            return self._networks
        return [{"name": name, "type": "child<filter-buffer>"} for name in self.objects]

    async def tell(self, command: str, arguments: Any) -> None:
        if command == "object-del":
            del self.objects[arguments["id"]]
            return
        self.made.append(arguments)
        if arguments["netdev"] == self._refused:
            raise CommandRefusedError("web", command, "Vhost is not supported")
        self.objects[arguments["id"]] = arguments


NETWORKS = """\
virtio-net-pci.0: index=0,type=nic,model=virtio-net-pci,macaddr=52:54:00:12:34:56
 \\ __org.qemu.nic0: index=0,type=tap,ifname=hand0,script=no,downscript=no
hub 0
 \\ hub0port1: #net129: index=0,type=user,net=10.0.2.0,restrict=off
 \\ hub0port0: e1000.0: index=0,type=nic,model=e1000,macaddr=52:54:00:12:34:57
"""


def test_what_an_adopted_vm_sends_by_is_what_its_qemu_has() -> None:
    vm: Any = SimpleNamespace(name="web", spec=SimpleNamespace(adopted=object(), nics=()))

    async def main() -> None:
        qemu: Any = Adopted(NETWORKS)
        found = await senders(vm, qemu)
        for step in BriefHold(qemu, found[:1], 1.0).begin():
            await step
        qemu.made.clear()
        assert found == ["__org.qemu.nic0", "#net129"]
        await require_holdable(vm, qemu, found)
        # They hold nothing, are gone, and have left alone what holds output for another process.
        assert [(one["netdev"], one["status"]) for one in qemu.made] == [
            ("__org.qemu.nic0", "off"), ("#net129", "off"),
        ]  # fmt: skip
        assert [*qemu.objects] == brief_holds(found[:1])
        # QEMU accepts their names, whatever its back ends' are.
        assert brief_holds(found) == ["vmckpt-brief-__org.qemu.nic0", "vmckpt-brief-net129"]
        qemu = Adopted(NETWORKS, refused="#net129")
        with pytest.raises(
            RefusedError, match="the network output of 'web' cannot be held"
        ) as refused:
            await require_holdable(vm, qemu, found)
        assert "Vhost is not supported" in refused.value.why
        assert qemu.objects == {}

    asyncio.run(main())


async def release_all(qemu: Any) -> None:
    ended: Any = Protection.__new__(Protection)
    intake = SimpleNamespace(drop=lambda: None)
    ended._keeper, ended._qemu_lives = SimpleNamespace(free=lambda: None), qemu.lives
    ended._monitor = SimpleNamespace(reopen=AsyncMock())
    ended._handles = SimpleNamespace(
        output=HeldOutput(qemu, ["net0"]),
        capture=SimpleNamespace(resume=partial(resume, qemu)),
        mirrors=SimpleNamespace(intake=intake),
    )
    async with asyncio.timeout(20):
        await ended._release_guest()


def test_a_qemu_that_is_silent_for_once_is_not_taken_for_dead() -> None:
    qemu = Qemu(GATE, OUTER, INNER, silences=1)
    asyncio.run(release_all(qemu))
    assert (qemu.objects, qemu.runs) == ([], True)


def test_a_qemu_that_has_died_is_not_waited_for() -> None:
    qemu = Qemu(GATE, OUTER, INNER, silences=1000, lives_for=1)
    asyncio.run(release_all(qemu))
    assert not qemu.runs


def test_an_epoch_ends_before_a_buffer_is_full() -> None:
    qemu: Any = Qemu()
    output = HeldOutput(qemu, ["net0"])
    wake = asyncio.Event()
    intake = SimpleNamespace(is_early=asyncio.Event(), waits_for=waits)
    epochs: Any = Epochs.__new__(Epochs)
    epochs._output, epochs._mirrors = output, SimpleNamespace(intake=intake)
    epochs.pace = SimpleNamespace(run_s=60.0)
    epochs._capture, epochs._most_pages = SimpleNamespace(dirty_pages=lambda: 0), 1

    async def rest(sent: int | None) -> None:
        qemu.sent = sent
        for step in output.end_epoch():
            step.close()
        epochs._resumed_s = time.monotonic()
        resting = asyncio.ensure_future(epochs.rest(wake))
        for _ in range(8):
            await asyncio.sleep(0.06)
            if qemu.sent is not None:
                qemu.sent += 1000
        if not resting.done():
            wake.set()
        await resting

    async def main() -> None:
        await rest(65000)
        assert not wake.is_set()
        await rest(None)
        assert wake.is_set()

    asyncio.run(main())


async def waits(most_s: float, wake: asyncio.Event) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(wake.wait(), most_s)
