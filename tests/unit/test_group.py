"""Which groups there are, by what their checkpoints say; who may be one; the witness of a cut."""

import struct
from dataclasses import replace

import pytest
from click.testing import Result
from typer.testing import CliRunner

from tests.unit.test_checkpoint_tree import entry
from vmckpt.checkpoint.catalogue.catalogue import CatalogueEntry
from vmckpt.checkpoint.catalogue.tree import lines, rows
from vmckpt.checkpoint.facts import CheckpointFacts
from vmckpt.cli.main import command_line
from vmckpt.errors import NotFoundError, RefusedError, UsageError
from vmckpt.group.create import require_group
from vmckpt.group.groups import find, groups, require_whole
from vmckpt.lab.guests.talk import MAGIC, Counts, Violation, pages_at, parse_page, violations

pytestmark = pytest.mark.unit


def of_group(name: str, number: int, group: str, members: dict[str, str]) -> CatalogueEntry:
    plain = entry(name, number, None)
    assert plain.facts
    ids = {vm: f"{one}{'0' * 31}" for vm, one in members.items()}
    facts = replace(plain.facts, group={"id": f"{group}-id", "name": group, "members": ids})
    return replace(plain, facts=facts, manifest=replace(plain.manifest, facts=facts.to_json()))


WEB = of_group("a", 1, "night", {"web": "a", "db": "b"})
DB = of_group("b", 2, "night", {"web": "a", "db": "b"})
ALONE = entry("c", 3, None)


def test_a_group_is_what_its_checkpoints_say() -> None:
    [group] = groups([WEB, DB, ALONE])
    assert group.name == "night"
    assert group.entries == {"web": WEB, "db": DB}
    assert not group.missing
    require_whole(group)
    assert find([WEB, DB, ALONE], "night") == find([WEB, DB, ALONE], "nigh") == group


def test_one_that_lacks_a_checkpoint_is_restored_by_nobody() -> None:
    [group] = groups([DB, ALONE])
    assert group.missing == ["web"]
    with pytest.raises(RefusedError, match="no longer complete"):
        require_whole(group)


def test_groups_are_named_or_not_there() -> None:
    with pytest.raises(NotFoundError, match="no group 'day'"):
        find([WEB, DB], "day")
    twin = of_group("d", 4, "night", {"web": "d", "db": "e"})
    assert twin.facts
    assert twin.facts.group
    twin = replace(twin, facts=replace(twin.facts, group={**twin.facts.group, "id": "other"}))
    with pytest.raises(UsageError, match="2 groups"):
        find([WEB, DB, twin], "night")


def test_a_checkpoint_says_which_group_it_is_of() -> None:
    assert dict(lines(WEB))["group"] == "night (night-id): web, db"
    assert [row[-3] for row in rows([WEB, ALONE])] == ["night", ""]
    assert WEB.facts
    assert CheckpointFacts.from_json(WEB.manifest.facts) == WEB.facts
    assert ALONE.facts
    assert "group" not in ALONE.facts.to_json()  # an older vmckpt knows it


@pytest.mark.parametrize("names", [[], ["web"], ["web", "db", "web"]])
def test_a_group_is_several_each_once(names: list[str]) -> None:
    with pytest.raises(UsageError, match="not a group"):
        require_group(names)


def asked(*words: str) -> Result:
    return CliRunner().invoke(command_line(["checkpoint"]), ["checkpoint", *words])


@pytest.mark.parametrize(
    "words",
    [
        ["create"],
        ["create", "web", "--group", "db,cache"],
        ["create", "--group", "web"],
        ["create", "--group", "web,web"],
        ["create", "--group", "web,db", "--kind", "file"],
        ["create", "--group", "web,db", "--kind", "internal"],
        ["create", "--group", "web,db", "--name", "No Name"],
        ["create", "web", "--max-hold", "1s"],
        ["restore"],
        ["restore", "point", "--group", "night"],
        ["restore", "--group", "night", "--as", "other"],
        ["restore", "--group", "night", "--keep-macs"],
        ["rm"],
        ["rm", "point", "--group", "night"],
        ["show"],
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_asked(words: list[str]) -> None:
    done = asked(*words)
    assert isinstance(done.exception, UsageError), (done.exception, done.output)


def page(*peers: tuple[bytes, int, int, int, int, int]) -> bytes:
    head = struct.pack("<8sII", MAGIC, 7, 32)
    body = b"".join(struct.pack("<4sIQQQQQ", address, 0, *counts) for address, *counts in peers)
    return (head + body).ljust(4096, b"\0")


def test_the_witness_is_found_in_memory_and_read() -> None:
    one = page((bytes((10, 77, 0, 12)), 5, 4, 3, 2, 0))
    noise = MAGIC.rjust(100, b"\0").ljust(4096, b"\0")  # in the middle of a page it is no witness
    assert pages_at(memoryview(bytes(4096))) == []
    assert pages_at(memoryview(noise + one)) == [1]
    assert parse_page(one) == {"10.77.0.12": Counts(5, 4, 3, 2, 0)}


def test_what_was_heard_and_not_said_is_found() -> None:
    counts = {"a": {"b": Counts(5, 5, 5, 5, 0)}, "b": {"a": Counts(5, 6, 7, 5, 0)}}
    assert violations(counts) == [Violation("a", "b", "udp", 5, 6)]
    counts["b"]["a"] = Counts(5, 5, 4, 6, 0)
    assert [one.over for one in violations(counts)] == ["tcp", "tcp"]
