"""Output that is held: whoever holds it, and whatever is in the way, in the end it is let go."""

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from vmckpt.epoch.capture import resume
from vmckpt.epoch.output import HeldOutput, holds_output
from vmckpt.qemu.monitor import MonitorLostError
from vmckpt.replicate.protection import Protection

pytestmark = pytest.mark.contract

OUTER, INNER = "vmckpt-outer-net0", "vmckpt-inner-net0"


class Qemu:
    """Its objects, by a monitor that gives no answer to so many questions, and a guest."""

    def __init__(self, *objects: str, silences: int = 0, lives_for: int = 1000) -> None:
        self.objects, self.silences, self._lives_for = [*objects], silences, lives_for
        self.runs = False

    async def ask(self, command: str, arguments: object = None) -> list[dict[str, str]]:
        assert command == "qom-list"
        if self.silences:
            self.silences -= 1
            raise MonitorLostError("web did not answer qom-list", why="a test's", remedy="-")
        return [{"name": name, "type": "child<filter-buffer>"} for name in self.objects]

    async def tell(self, command: str, arguments: Any = None) -> None:
        if command == "object-del":
            self.objects.remove(arguments["id"])
        else:
            assert command == "cont"
            self.runs = True

    def lives(self) -> bool:
        self._lives_for -= 1
        return self._lives_for >= 0


@pytest.mark.parametrize("left", [(OUTER, INNER), (INNER,), (OUTER,)])
def test_what_a_killed_service_left_of_its_buffers_is_found_and_removed(
    left: tuple[str, ...],
) -> None:
    qemu: Any = Qemu("another", *left, "vmckpt-inner-net1")

    async def main() -> None:
        held = await holds_output(qemu)
        assert sorted(held) == ["net0", "net1"]
        await HeldOutput(qemu, held).let_go()

    asyncio.run(main())
    assert qemu.objects == ["another"]


async def let_go(qemu: Any) -> None:
    ended: Any = Protection.__new__(Protection)
    intake = SimpleNamespace(let_go=lambda: None)
    ended._keeper, ended._qemu_lives = SimpleNamespace(free=lambda: None), qemu.lives
    ended._grip = SimpleNamespace(
        output=HeldOutput(qemu, ["net0"]),
        capture=SimpleNamespace(resume=partial(resume, qemu)),
        mirrors=SimpleNamespace(intake=intake),
    )
    async with asyncio.timeout(20):
        await ended._let_go()


def test_a_qemu_that_is_silent_for_once_is_not_taken_for_dead() -> None:
    qemu = Qemu(OUTER, INNER, silences=1)
    asyncio.run(let_go(qemu))
    assert (qemu.objects, qemu.runs) == ([], True)


def test_a_qemu_that_has_died_is_not_waited_for() -> None:
    qemu = Qemu(OUTER, INNER, silences=1000, lives_for=1)
    asyncio.run(let_go(qemu))
    assert not qemu.runs
