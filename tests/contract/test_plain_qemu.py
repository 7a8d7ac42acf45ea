"""A QEMU that has migrated is left as if it never had, but not before it has cleaned up."""

import pytest

from tests.scripted_qmp import Server, play
from vmckpt.errors import OperationFailedError
from vmckpt.qemu import plain
from vmckpt.qemu.monitor import Monitor

pytestmark = pytest.mark.contract

MIGRATION = {"type": "migration"}
OTHERS = {"type": "chardev", "id": "console"}


class Qemu:
    """One that still cleans up at the first `looks` looks at it."""

    def __init__(self, looks: float, **capabilities: bool) -> None:
        self.looks, self.capabilities = looks, capabilities
        self.told = list[dict[str, bool]]()

    async def __call__(self, server: Server) -> None:
        try:
            while True:
                command = await server.command()
                match command["execute"]:
                    case "query-migrate-capabilities":
                        listed = [
                            {"capability": name, "state": on}
                            for name, on in self.capabilities.items()
                        ]
                        await server.answer(command, listed)
                    case "query-yank":
                        self.looks -= 1
                        found = [OTHERS, MIGRATION] if self.looks >= 0 else [OTHERS]
                        await server.answer(command, found)
                    case "migrate-set-capabilities":
                        assert self.looks < 0, "it has not cleaned up"
                        given = command["arguments"]["capabilities"]
                        self.told.append({one["capability"]: one["state"] for one in given})
                        await server.answer(command, {})
        except EOFError:
            return


async def left_plain(monitor: Monitor) -> None:
    await plain.switch_off_capabilities(monitor)


@pytest.mark.parametrize("looks", [0, 3])
def test_what_is_on_goes_off_when_the_migration_has_been_cleaned_up(looks: int) -> None:
    qemu = Qemu(looks, multifd=True, events=True, xbzrle=False)
    play(qemu, left_plain)
    assert qemu.told == [{"multifd": False, "events": False}]


def test_a_qemu_that_has_none_on_is_told_nothing() -> None:
    qemu = Qemu(0, multifd=False)
    play(qemu, left_plain)
    assert qemu.told == []


def test_channels_that_never_end_are_left_to_qemu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "CLEANED_UP_S", 0.1)
    qemu = Qemu(float("inf"), multifd=True)

    async def refused(monitor: Monitor) -> None:
        with pytest.raises(OperationFailedError, match="does not end"):
            await plain.switch_off_capabilities(monitor)

    play(qemu, refused)
    assert qemu.told == []
