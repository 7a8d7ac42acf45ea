"""A guest that is handed over goes on with whoever has its term, and never with the other one."""

import asyncio
from pathlib import Path
from shutil import copytree, rmtree

import pytest

from vmckpt.errors import OutcomeUnknownError, RefusedError
from vmckpt.lease.file_store import FileStore
from vmckpt.lease.lease import Lease
from vmckpt.lease.record import LeaseRecord, LeaseSpan
from vmckpt.lease.rule import Claimant
from vmckpt.lease.store import ArbiterDownError, Versioned
from vmckpt.replicate.primary.keeper import TermKeeper

SPAN = LeaseSpan(1.0)


class Deaf(FileStore):
    """Takes in nothing while it `is_down`."""

    is_down = False

    async def replace(self, vm: str, record: LeaseRecord, *, over: int) -> Versioned:
        if self.is_down:
            raise ArbiterDownError("the arbiter is down", why="a test's", remedy="-")
        return await super().replace(vm, record, over=over)


class Lossy(FileStore):
    """Does what it is asked, and does not answer: the `lost` next times, or `is_stuck` over it."""

    lost, is_stuck = 0, False

    def __init__(self, location: Path) -> None:
        super().__init__(location)
        self.stuck = asyncio.Event()

    async def replace(self, vm: str, record: LeaseRecord, *, over: int) -> Versioned:
        put = await super().replace(vm, record, over=over)
        if self.is_stuck:
            self.stuck.set()
            await asyncio.Event().wait()
        if self.lost:
            self.lost -= 1
            raise OutcomeUnknownError("no answer", why="it was lost", remedy="-")
        return put


def primary_of(store: FileStore, told: list[str]) -> TermKeeper:
    return TermKeeper(Lease(store, "web", Claimant("a/1"), SPAN), told.append)


def standby_of(store: FileStore) -> Lease:
    return Lease(store, "web", Claimant("b/1", replica="b/1"), SPAN)


def is_standbys(holder: str) -> bool:
    return holder.startswith("b/1")


async def hand_over(keeper: TermKeeper) -> None:
    await keeper.take(None)
    assert await keeper.in_sync("b/1")
    assert keeper.may_run()
    await keeper.hand_over()
    assert not keeper.may_run()


async def taken_over(store: FileStore, told: list[str]) -> tuple[TermKeeper, Lease]:
    """A primary that has handed over, and its standby, which has the term."""
    keeper, standby = primary_of(store, told), standby_of(store)
    await hand_over(keeper)
    await standby.take()
    return keeper, standby


def test_what_nobody_took_goes_on_where_it_was(tmp_path: Path) -> None:
    store, told = FileStore(tmp_path), list[str]()

    async def main() -> None:
        keeper = primary_of(store, told)
        await hand_over(keeper)
        assert float(told[-1]) == 0  # the guard lets nothing run, whatever becomes of us
        assert await keeper.take_back(is_standbys)
        assert keeper.term == 2
        with pytest.raises(RefusedError):
            await standby_of(store).take()
        keeper.free()
        assert told[-1] == "inf"

    asyncio.run(main())


def test_what_another_took_is_left_to_it(tmp_path: Path) -> None:
    store, told = FileStore(tmp_path), list[str]()

    async def main() -> None:
        keeper, standby = await taken_over(store, told)
        assert not await keeper.take_back(is_standbys)
        assert float(told[-1]) == 0
        # It could not go on with it, and says so.
        await standby.give_up()
        assert await keeper.take_back(is_standbys)

    asyncio.run(main())


def test_what_another_gave_up_that_came_later_is_nobodys_to_take_back(tmp_path: Path) -> None:
    """The guest ran on elsewhere since: what stands here is older."""
    store, told = FileStore(tmp_path), list[str]()

    async def main() -> None:
        keeper, standby = await taken_over(store, told)
        await standby.record_in_sync("c/2")
        await standby.give_up()
        third = Lease(store, "web", Claimant("c/2", replica="c/2"), SPAN)
        await third.take()
        await third.give_up()
        assert not await keeper.take_back(is_standbys)

    asyncio.run(main())


def test_an_arbiter_that_heard_of_nothing_is_waited_for_until_the_lease_has_ended(
    tmp_path: Path,
) -> None:
    store, told = Deaf(tmp_path), list[str]()

    async def main() -> None:
        keeper = primary_of(store, told)
        await keeper.take(None)
        assert await keeper.in_sync("b/1")
        store.is_down = True
        await keeper.hand_over()
        back = asyncio.ensure_future(keeper.take_back(is_standbys))
        await asyncio.wait({back}, timeout=0.3)
        assert not back.done()
        store.is_down = False
        async with asyncio.timeout(20):
            assert await back
        assert keeper.term == 2

    asyncio.run(main())


@pytest.mark.parametrize("lost", [1, 2])
def test_a_term_that_was_taken_back_without_an_answer_is_ours(tmp_path: Path, lost: int) -> None:
    store, told = Lossy(tmp_path), list[str]()

    async def main() -> None:
        keeper = primary_of(store, told)
        await hand_over(keeper)
        store.lost = lost
        assert await keeper.take_back(is_standbys)
        assert keeper.term == 2
        with pytest.raises(RefusedError):
            await standby_of(store).take()

    asyncio.run(main())


def test_taking_back_that_is_cut_off_may_be_begun_again(tmp_path: Path) -> None:
    told = list[str]()

    async def main() -> None:
        store = Lossy(tmp_path)
        keeper = primary_of(store, told)
        await hand_over(keeper)
        store.is_stuck = True
        back = asyncio.ensure_future(keeper.take_back(is_standbys))
        await store.stuck.wait()
        back.cancel()
        await asyncio.wait({back})
        assert back.cancelled()
        store.is_stuck = False
        assert await keeper.take_back(is_standbys)
        assert keeper.term == 2

    asyncio.run(main())


def test_an_arbiter_that_knows_of_no_term_grants_none_back(tmp_path: Path) -> None:
    """Its directory is not mounted here, and the standby has the term there."""
    mounted, elsewhere = tmp_path / "leases", tmp_path / "not mounted"
    store, told = FileStore(mounted), list[str]()

    async def main() -> None:
        keeper, _ = await taken_over(store, told)
        mounted.rename(elsewhere)
        back = asyncio.ensure_future(keeper.take_back(is_standbys))
        await asyncio.wait({back}, timeout=0.3)
        assert not back.done()
        assert not mounted.exists()
        elsewhere.rename(mounted)
        assert not await back

    asyncio.run(main())


def test_an_arbiter_that_is_gone_for_good_is_waited_for_until_the_operator_knows_better(
    tmp_path: Path,
) -> None:
    store, told = Deaf(tmp_path), list[str]()

    async def main() -> None:
        keeper = primary_of(store, told)
        await hand_over(keeper)
        store.is_down = True
        taking = asyncio.ensure_future(keeper.take_back(is_standbys))
        await asyncio.sleep(1.5)  # longer than the lease
        assert not taking.done()
        assert float(told[-1]) == 0
        assert "the arbiter is down" in keeper.arbiter_fails
        keeper.continue_alone(is_certain=True)
        async with asyncio.timeout(5):
            assert await taking
            assert await keeper.solo()
        keeper.free()
        assert told[-1] == "inf"

    asyncio.run(main())


def test_an_arbiter_that_was_put_back_grants_nothing_back(tmp_path: Path) -> None:
    """It has a record of ours again, from before the term was given up; the standby runs on."""
    location, older = tmp_path / "leases", tmp_path / "older"
    store, told = FileStore(location), list[str]()

    async def main() -> None:
        keeper, standby = primary_of(store, told), standby_of(store)
        await keeper.take(None)
        assert await keeper.in_sync("b/1")
        copytree(location, older)
        await keeper.hand_over()
        await standby.take()
        rmtree(location)
        older.rename(location)
        back = asyncio.ensure_future(keeper.take_back(is_standbys))
        await asyncio.wait({back}, timeout=1.5)  # longer than the lease
        assert not back.done()
        assert float(told[-1]) == 0
        assert "has forgotten" in keeper.arbiter_fails
        keeper.continue_alone(is_certain=True)
        assert await back

    asyncio.run(main())
