"""How often QEMU is asked while memory moves: at the end it has no time for questions."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.contract.test_dropped_copies import Scripted
from tests.scripted_qmp import Server, play
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes.process import ProcessId
from vmckpt.migrate.outcome.ends import Pair
from vmckpt.migrate.steps import transfer as transfers
from vmckpt.migrate.steps.disks import DiskMirrors
from vmckpt.migrate.steps.switchover import Socketed, Switchover
from vmckpt.migrate.steps.transfer import Transfer, TransferEnding
from vmckpt.options.migration import Method, MigrationOptions
from vmckpt.qemu.monitor import Monitor
from vmckpt.qemu.replies import MigrationStatus

pytestmark = pytest.mark.contract
ROUNDS = 5


class Decided(Switchover):
    """One that let the source go, or in the first round has nothing to say yet."""

    def __init__(self, monitor: Monitor, root: Path, *, let_go: bool) -> None:
        end = Socketed(LocalHost("a", root, "127.0.0.1"), ProcessId(1, 1))
        super().__init__(monitor, source=end, destination=end, port=1, max_downtime_s=0.3)
        self._let_go = let_go

    async def consider(self, _: MigrationStatus) -> None:
        pass

    @property
    def all_sent_once(self) -> bool:
        return self._let_go

    @property
    def held(self) -> bool:
        return not self._let_go


def event(name: str, **data: object) -> dict[str, object]:
    return {"event": name, "data": data, "timestamp": {"seconds": 0, "microseconds": 0}}


@pytest.mark.timeout(30)
@pytest.mark.parametrize(("let_go", "most"), [(True, 2), (False, 2 + ROUNDS)])
def test_short_rounds_are_no_reason_to_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, let_go: bool, most: int
) -> None:
    """The first rounds are: who steers has to see each of them."""
    monkeypatch.setattr(transfers, "SAMPLE_S", 60.0)
    asked = [0]

    async def serve(server: Server) -> None:
        async def rounds() -> None:
            await server.send(event("MIGRATION", status="active"))
            for number in range(ROUNDS):
                seen = asked[0]
                await server.send(event("MIGRATION_PASS", **{"pass": number + 2}))
                while not let_go and asked[0] == seen:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
                await asyncio.sleep(0.02)
            await server.send(event("MIGRATION", status="completed"))

        telling: asyncio.Task[None] | None = None
        try:
            while True:
                command: dict[str, Any] = await server.command()
                if command["execute"] == "query-migrate":
                    asked[0] += 1
                    await server.answer(command, {"status": "active"})
                    telling = telling or asyncio.create_task(rounds())
                else:
                    await server.answer(command, {})
        except EOFError:
            return

    async def client(monitor: Monitor) -> None:
        end = Scripted(monitor, tmp_path)
        none = DiskMirrors(
            Pair(end, end, True, tmp_path), [], run="r1", bandwidth_bytes_per_s=0,
            clock=lambda: 0.0, emit=lambda _: None, note=lambda *_: None,
        )  # fmt: skip
        moving = Transfer(
            monitor, MigrationOptions(Method.PRECOPY), lambda: 0.0, lambda _: None, lambda *_: None,
            disks=none, switchover=Decided(monitor, tmp_path, let_go=let_go),
        )  # fmt: skip
        assert await moving.run("tcp:::1") is TransferEnding.COMPLETED

    play(serve, client)
    assert asked[0] <= most
    assert let_go or asked[0] >= ROUNDS
