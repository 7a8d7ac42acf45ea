"""A source whose target is far behind is kept from sending, until it has nearly caught up."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.faulty_host import Fault, FaultyHost
from tests.scripted_qmp import Server, play
from vmckpt.hosts.host import Queues
from vmckpt.hosts.processes.process import ProcessId
from vmckpt.migrate.steps import switchover as switchovers
from vmckpt.migrate.steps.switchover import STILL_BYTES_PER_S, Socketed, Switchover
from vmckpt.qemu.abilities import SENDING_SPEED, SWITCHOVER_SPEED
from vmckpt.qemu.monitor import Monitor
from vmckpt.qemu.replies import MigrationStatus

pytestmark = pytest.mark.contract
LIMIT, MB = 200_000_000, 1_000_000


class Migrating:
    """A source with its switchover: it sends 50 MB between two looks, 50 ms apart."""

    def __init__(
        self, monitor: Monitor, root: Path, monkeypatch: pytest.MonkeyPatch, *, channels: bool
    ) -> None:
        self._now_s, self._sent, self._unread_bytes = 0.0, 0, 0
        monkeypatch.setattr(switchovers, "time", SimpleNamespace(monotonic=lambda: self._now_s))
        # Nothing waits on the source's side.
        queues = Fault("socket_queues", by=lambda *_: Queues(0, self._unread_bytes))
        source, target = (FaultyHost(name, root, "127.0.0.1", faults=(queues,)) for name in "ab")
        self.switchover = Switchover(
            monitor,
            source=Socketed(source, ProcessId(1, 1)),
            destination=Socketed(target, ProcessId(1, 1)),
            port=1, max_downtime_s=0.3, limit_bytes_per_s=LIMIT, quick_rounds=channels,
        )  # fmt: skip

    async def look(self, unread_bytes: int, *, round_number: int = 1, sent: int = 50 * MB) -> None:
        self._now_s, self._sent = self._now_s + 0.05, self._sent + sent
        self._unread_bytes = unread_bytes
        status = MigrationStatus("active", transferred_bytes=self._sent, round=round_number)
        await self.switchover.consider(status)


def told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *looks: tuple[int, int, int],
    end: str = "",
    channels: bool = True,
) -> list[tuple[str, int]]:
    """What QEMU is set to, in order, at these looks (unread, round, sent)."""
    set_to: list[tuple[str, int]] = []

    async def serve(server: Server) -> None:
        try:
            while True:
                command = await server.command()
                assert command["execute"] == "migrate-set-parameters"
                set_to.extend(command["arguments"].items())
                await server.answer(command, {})
        except EOFError:
            return

    async def client(monitor: Monitor) -> None:
        moving = Migrating(monitor, tmp_path, monkeypatch, channels=channels)
        for unread, number, sent in looks:
            await moving.look(unread, round_number=number, sent=sent)
        if end == "now":
            await moving.switchover.now()
        if end == "limit":
            await moving.switchover.hold_to(LIMIT // 2)
        await asyncio.sleep(0)

    play(serve, client)
    return set_to


# The target reads 20 MB between looks, and has 60 MB to read when all has gone once.
BEHIND = ((30 * MB, 1, 50 * MB), (60 * MB, 1, 50 * MB), (60 * MB, 2, 20 * MB))


def test_a_source_waits_without_sending_for_a_target_that_is_far_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caught_up = ((40 * MB, 3, 0), (10 * MB, 3, 0), (0, 3, 0))
    set_to = told(tmp_path, monkeypatch, *BEHIND, *caught_up)
    assert set_to[:2] == [(SENDING_SPEED, STILL_BYTES_PER_S), (SENDING_SPEED, LIMIT)]
    # Only when it has read all of the first pass the guest may be stopped.
    assert [name for name, _ in set_to[2:]] == [SWITCHOVER_SPEED]
    assert (SENDING_SPEED, LIMIT) not in told(tmp_path, monkeypatch, *BEHIND, caught_up[0])


def test_it_goes_on_sending_to_a_target_that_keeps_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = ((MB, 1, 50 * MB), (MB, 1, 50 * MB), (MB, 2, 20 * MB), (0, 3, 0))
    assert [name for name, _ in told(tmp_path, monkeypatch, *looks)] == [SWITCHOVER_SPEED]


def test_over_one_channel_it_goes_on_sending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_to = told(tmp_path, monkeypatch, *BEHIND, (0, 3, 0), channels=False)
    assert [name for name, _ in set_to] == [SWITCHOVER_SPEED]


def test_whoever_stops_the_guest_at_once_lets_the_source_send_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_to = told(tmp_path, monkeypatch, *BEHIND, end="now")
    assert set_to[1:] == [(SWITCHOVER_SPEED, 0), (SENDING_SPEED, LIMIT)]


def test_another_limit_counts_once_it_sends_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert told(tmp_path, monkeypatch, *BEHIND, end="limit") == [
        (SENDING_SPEED, STILL_BYTES_PER_S)
    ]  # fmt: skip
    sending = told(tmp_path, monkeypatch, (0, 1, 50 * MB), end="limit")
    assert sending == [(SENDING_SPEED, LIMIT // 2)]
