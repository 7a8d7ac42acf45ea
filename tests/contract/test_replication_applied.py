"""An epoch is acknowledged once the standby has it, checked; and applying it is no silence."""

import asyncio
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.contract.test_disks_over_the_wire import PAGES, Both, connected, ram_path
from tests.waiting_qemu import it_waits
from vmckpt.epoch.epoch import Pages
from vmckpt.lease.clock import boottime_s
from vmckpt.lease.file_store import FileStore
from vmckpt.lease.lease import Lease
from vmckpt.lease.record import LeaseSpan
from vmckpt.lease.rule import Claimant
from vmckpt.lease.standby import StandbyMove
from vmckpt.memory.ram_file import PAGE_BYTES, mapped
from vmckpt.replicate import channel
from vmckpt.replicate.channel import ALONE
from vmckpt.replicate.disks.journal import DisksJournal
from vmckpt.replicate.primary import keeper
from vmckpt.replicate.primary.stream import StandbyLostError
from vmckpt.replicate.standby.replica import replica_in
from vmckpt.replicate.standby.takeover import TakeOver
from vmckpt.replicate.wire.epoch import ReceivedEpoch
from vmckpt.replicate.wire.pages import PageBatch

__all__ = ["ram_path"]

FIRST, SECOND = os.urandom(PAGE_BYTES), b"changed!"


async def sent(both: Both, page: bytes) -> int:
    return await both.stream.commit(Pages(((0, PAGE_BYTES),), page), (b"", b"devices"))


@pytest.mark.parametrize("where", ["in memory", "on its way"])
def test_of_an_epoch_that_is_damaged_nothing_is_acknowledged(
    where: str, tmp_path: Path, ram_path: Path
) -> None:
    async def main() -> None:
        async with connected(tmp_path, ram_path) as both:
            number = await sent(both, FIRST)
            await both.stream.acknowledged(number)
            if where == "in memory":
                with mapped(ram_path) as ram:
                    ram.write([(2048, 2049)], bytes([FIRST[2048] ^ 1]))
                why = "differs from what the primary expects"
            else:
                real = both.stream._channel._writer.write
                both.stream._channel._writer.write = (  # type: ignore[method-assign]
                    lambda data: real(bytes(data).replace(SECOND, b"damaged!"))
                )
                why = "is damaged"
            damaged = await sent(both, SECOND + FIRST[len(SECOND) :])
            with pytest.raises(StandbyLostError, match=why):
                await both.stream.acknowledged(damaged)
            assert both.keeper.acknowledged == number
            assert not both.keeper.may_release(damaged)
            assert await both.ended == ALONE
            assert both.replica.complete == (where == "on its way")

    asyncio.run(main())


def test_an_epoch_that_takes_long_to_apply_is_no_silence(
    tmp_path: Path, ram_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "PATIENCE_S", 0.5)
    monkeypatch.setattr(channel, "PATIENCE_S", 0.5)
    monkeypatch.setattr(channel, "HEARTBEAT_S", 0.05)
    real = PageBatch.apply
    worst_s = 0.0

    def slow(batch: PageBatch, replica: Any) -> None:
        time.sleep(1.5)
        real(batch, replica)

    async def main() -> None:
        async with connected(tmp_path, ram_path) as both:
            await both.stream.acknowledged(await sent(both, FIRST))
            monkeypatch.setattr(PageBatch, "apply", slow)
            beating = asyncio.ensure_future(both.stream.beat())
            silences = asyncio.ensure_future(silent())
            for page in (b"a" * PAGE_BYTES, b"b" * PAGE_BYTES):
                await both.stream.acknowledged(await sent(both, page))
                assert boottime_s() - both.primary.heard_s < 1.0
            await both.stream.acknowledged(await sent(both, FIRST))
            beating.cancel()
            silences.cancel()
            assert worst_s < 1.0

    async def silent() -> None:
        nonlocal worst_s
        while True:
            heard_s = boottime_s()
            await asyncio.sleep(0.01)
            worst_s = max(worst_s, boottime_s() - heard_s)

    asyncio.run(main())


def test_one_that_is_given_up_in_it_has_the_whole_epoch(
    ram_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_work = asyncio.Event()
    real = PageBatch.apply

    def slow(batch: PageBatch, replica: Any) -> None:
        loop.call_soon_threadsafe(at_work.set)
        time.sleep(0.2)
        real(batch, replica)

    none = np.zeros(0, dtype=np.int64)
    page = np.full((1, PAGE_BYTES // 8), 7, dtype="<u8")
    batch = PageBatch(
        none, none, np.zeros(0, dtype=bool), np.zeros(0, dtype="<u8"), np.array([3]), page,
        7 * PAGE_BYTES // 8,
    )  # fmt: skip
    epoch = ReceivedEpoch(1, 1, 0, (batch,), b"base", b"state", ())

    async def main() -> None:
        monkeypatch.setattr(PageBatch, "apply", slow)
        with mapped(ram_path) as ram, replica_in(ram, DisksJournal([])) as replica:
            applying = asyncio.ensure_future(replica.apply(epoch))
            await at_work.wait()
            assert (replica.is_applying, replica.complete) == (True, False)
            applying.cancel()
            await asyncio.wait({applying})
            assert applying.cancelled()
            assert (replica.epoch, replica.device_state) == (1, b"basestate")
            assert (replica.is_applying, replica.complete) == (False, True)
            assert replica.written_bytes == PAGE_BYTES
        assert ram_path.read_bytes()[3 * PAGE_BYTES : 4 * PAGE_BYTES] == page.tobytes()

    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(main())
    finally:
        loop.close()
    assert PAGES > 3


def test_nothing_is_decided_while_an_epoch_is_applied(tmp_path: Path) -> None:
    store, span = FileStore(tmp_path), LeaseSpan(0.2)
    primary = Lease(store, "web", Claimant("a/1"), span)
    standby = Lease(store, "web", Claimant("b/1", replica="b/1"), span)
    request: Any = SimpleNamespace(options=SimpleNamespace(fence=()), one_machine=False)
    replica: Any = SimpleNamespace(complete=True, is_applying=True, disks=DisksJournal(()))
    hello = SimpleNamespace(machine="another", emitters=())
    silent: Any = SimpleNamespace(
        heard_s=0.0, epoch_s=0.0, hello=hello, term=1, why="", heard_by_path_s=lambda: (0.0,)
    )

    async def main() -> None:
        await primary.take()
        await primary.record_in_sync("b/1")
        taking = TakeOver(request, standby, replica, silent, asyncio.Event(), lack=it_waits)
        receiving: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        deciding = asyncio.ensure_future(taking.settled(receiving))
        await asyncio.sleep(1.0)  # by then the lease is over
        assert not deciding.done()
        assert not standby.has_requested
        replica.is_applying = False
        async with asyncio.timeout(20):
            assert await deciding is StandbyMove.PROMOTE

    asyncio.run(main())
