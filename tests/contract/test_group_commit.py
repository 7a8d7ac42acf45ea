"""A group's commit that was cut off: all of it is there, or nothing; and the lines it goes over."""

import asyncio
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.store_work import make
from vmckpt.checkpoint.catalogue.location import open_or_create
from vmckpt.checkpoint.group.line import Line
from vmckpt.checkpoint.group.member import joined
from vmckpt.errors import OperationFailedError, OutcomeUnknownError
from vmckpt.group.head import GroupHead
from vmckpt.group.journal import GroupJournal, Part, groups_dir, led, settle, settle_left
from vmckpt.hosts.processes.process import ProcessId
from vmckpt.state.documents import Documents, Schema
from vmckpt.store.open import Access, create_store, open_store

pytestmark = pytest.mark.contract

ENDED = ProcessId(2**22 + 1, 1)  # no process has this pid


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path / "state"))
    return tmp_path


def committed(state: Path, *, both: bool) -> GroupJournal:
    """A journal of two members in two stores; of the second the checkpoint may be missing."""
    parts = []
    for vm in ("web", "db"):
        location = str(state / vm)
        with create_store(location) as store:
            made = make(store, 1, None)
            if vm == "db" and not both:
                store.remove([made.id])
        parts.append(Part(vm, "local", ENDED, "local", location, made.id))
    journal = GroupJournal("0123", "night", tuple(parts))
    journal.write()
    return journal


def ids(state: Path, vm: str) -> list[str]:
    with open_store(str(state / vm)) as store:
        return store.ids()


def test_what_all_have_committed_is_whole(state: Path) -> None:
    journal = committed(state, both=True)
    assert Documents(groups_dir(), Schema(GroupJournal, "-")).load("0123") == journal
    assert asyncio.run(settle(journal))
    assert ids(state, "web")
    assert ids(state, "db")
    assert asyncio.run(settle_left()) == []


def test_what_one_has_not_committed_is_nobodys(state: Path) -> None:
    committed(state, both=False)
    assert asyncio.run(settle_left()) == [
        "group night was interrupted in its commit: it was removed"
    ]
    assert not ids(state, "web")
    assert not list(groups_dir().glob("*.json"))


def test_of_a_store_that_does_not_answer_nothing_is_believed(state: Path) -> None:
    journal = committed(state, both=True)
    (state / "db").rename(state / "away")
    with pytest.raises(OutcomeUnknownError, match="not known yet"):
        asyncio.run(settle(journal))
    assert ids(state, "web")
    [said] = asyncio.run(settle_left())
    assert "not known yet" in said
    (state / "away").rename(state / "db")
    assert asyncio.run(settle_left()) == [
        "group night was interrupted in its commit: it is complete"
    ]


def test_what_was_committed_may_be_removed_before_all_have_answered(state: Path) -> None:
    """By a rule, while db's store was silent: db's checkpoint was removed too, as if none had been
    made.
    """
    journal = committed(state, both=True)
    (state / "db").rename(state / "away")
    with pytest.raises(OutcomeUnknownError):
        asyncio.run(settle(journal))
    with open_store(str(state / "web")) as store:
        store.remove(store.ids())
    (state / "away").rename(state / "db")
    assert asyncio.run(settle_left()) == [
        "group night was interrupted in its commit: it is complete"
    ]
    assert ids(state, "db")


def test_a_silent_store_hides_no_other(state: Path) -> None:
    """The one that answers comes after it, and is asked all the same."""
    journal = committed(state, both=True)
    (state / "web").rename(state / "away")
    with pytest.raises(OutcomeUnknownError):
        asyncio.run(settle(journal))
    with open_store(str(state / "db")) as store:
        store.remove(store.ids())
    (state / "away").rename(state / "web")
    asyncio.run(settle_left())
    assert ids(state, "web")


def test_what_is_of_no_whole_group_may_have_gone_already(state: Path) -> None:
    journal = committed(state, both=False)
    web, db = journal.parts
    replace(journal, parts=(replace(web, committed=True), db)).write()
    with open_store(str(state / "web")) as store:
        store.remove(store.ids())
    assert asyncio.run(settle_left()) == [
        "group night was interrupted in its commit: it was removed"
    ]


def test_whoever_leads_a_group_is_left_to_it(state: Path) -> None:
    committed(state, both=False)

    async def look() -> list[str]:
        async with led("0123"):
            return await settle_left()

    assert asyncio.run(look()) == []
    assert ids(state, "web")


def test_a_damaged_journal_is_told_and_left(state: Path) -> None:
    committed(state, both=True)
    (groups_dir() / "0123.json").write_text("{")
    [said] = asyncio.run(settle_left())
    assert "is damaged" in said
    assert ids(state, "web")


async def _over_a_socket(path: Path) -> list[str]:
    said: list[str] = []

    async def serve() -> None:
        async with joined(path, 1.0, stays_paused=False) as member:
            member.send("prepared", machine="a", processors=2)
            said.append(str((await member.receive("set"))["to"]))
            with pytest.raises(OperationFailedError, match="because"):
                await member.receive("cut")
            said.append("over")

    serving = asyncio.ensure_future(serve())
    while not path.exists():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    reader, writer = await asyncio.open_unix_connection(path)
    async with Line(reader, writer, "web").beating() as line:
        head = GroupHead({"web": line})
        await head.expect_all("prepared")
        head.send_all("set", to="web")
        head.give_up("because")
        await serving
        with pytest.raises(OperationFailedError, match="connection was closed"):
            await head.expect_all("set")
    return said


class _Deaf:
    def write(self, data: bytes) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("word", "more"),
    [
        ("prepared", {"machine": "a", "processors": "2"}),
        ("stored", {"id": "ab", "held": None}),
        ("settled", {"result": {"host": "a"}}),
        ("committed", {"result": {"pause_ms": "long"}}),
        ("failed", {}),
    ],
)
def test_a_member_that_says_something_else_ends_the_group(
    word: str, more: dict[str, object]
) -> None:
    """It ended the command: vmckpt had a bug."""

    async def hear() -> None:
        reader = asyncio.StreamReader()
        reader.feed_data(json.dumps({"word": word, **more}).encode() + b"\n")
        with pytest.raises(OperationFailedError, match="the group was aborted") as raised:
            await GroupHead({"web": Line(reader, _Deaf(), "web")}).expect_all(word)
        assert f"'web' said '{word}', and " in raised.value.why

    asyncio.run(hear())


def test_both_ends_hear_one_another_and_the_end(tmp_path: Path) -> None:
    assert asyncio.run(_over_a_socket(tmp_path / "ear")) == ["web", "over"]
    assert os.listdir(tmp_path) == []


def test_members_that_make_their_hosts_first_store_at_once_have_one(tmp_path: Path) -> None:
    for number in range(5):
        location = str(tmp_path / str(number))
        with ThreadPoolExecutor(8) as pool:
            stores = list(
                pool.map(partial(open_or_create, location), [Access(may_be_made=True)] * 8)
            )
        assert len({store.config.id for store in stores}) == 1
        for store in stores:
            store.close()
