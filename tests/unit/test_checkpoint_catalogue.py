"""Which checkpoint is meant, and that one which several stores have is one."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_checkpoint_tree import entry
from vmckpt.checkpoint.catalogue.catalogue import (
    Catalogue,
    _agreeing,
    _different,
    _is_ours,
    _merged,
)
from vmckpt.checkpoint.catalogue.location import StoreLocation, own, parse_location
from vmckpt.checkpoint.origin import marked, run_key
from vmckpt.errors import HostDownError, NotFoundError, UsageError
from vmckpt.hosts.local import LocalHost
from vmckpt.store.files.manifest import is_same


class Elsewhere(LocalHost):
    """A host that is not this machine."""

    is_this_machine = False


A, B = (LocalHost(name, Path(f"/{name}"), "127.0.0.1") for name in ("lab-a", "lab-b"))
BUCKET = StoreLocation(None, "s3://bucket/web")


def test_what_two_stores_have_is_one_checkpoint() -> None:
    one, two = entry("a", 1, None), entry("b", 2, "a")
    found = _merged([(BUCKET, two.manifest), (own(A), one.manifest), (own(B), two.manifest)])
    assert [(each.id, each.locations) for each in found] == [
        (one.id, (own(A),)),
        (two.id, (own(B), BUCKET)),
    ]


def test_a_directory_of_this_machine_is_looked_into_once() -> None:
    shared = [StoreLocation(A, "/srv/points"), StoreLocation(B, "/srv/points")]
    assert _different([own(A), *shared, BUCKET, BUCKET]) == [own(A), shared[0], BUCKET]


def test_a_directory_of_another_host_is_named_in_full() -> None:
    """It was one of wherever a process there began, and no list looked into it."""
    far = Elsewhere("far", Path("/far"), "192.0.2.1")
    assert parse_location("/srv/points", far) == StoreLocation(far, "/srv/points")
    with pytest.raises(UsageError, match="points is not the location of a store"):
        parse_location("points", far)
    assert parse_location("points", A).path == str(Path("points").absolute())


def test_by_name_or_by_the_beginning_of_its_id() -> None:
    found = Catalogue([entry("a", 1, None), entry("b", 2, "a")], [])
    assert found.find("a").name == "a"
    assert found.find("b000").name == "b"
    other = entry("a", 2, None)
    other = replace(other, manifest=replace(other.manifest, id="c" * 32))
    twice = Catalogue([entry("a", 1, None), other], [])
    with pytest.raises(UsageError):
        twice.find("a")


def test_no_name_stands_for_the_id_of_another() -> None:
    """Who may add to a store gives his own the name that an operator types."""
    one, other = entry("a", 1, None), entry("b", 2, None)
    assert other.facts is not None
    theirs = replace(other, facts=replace(other.facts, name=one.id[:12]))
    found = Catalogue([one, theirs], [])
    with pytest.raises(UsageError, match="matches 2 checkpoints"):
        found.find(one.id[:12])
    assert found.find(one.id).id == found.find(one.id[:13]).id == one.id
    # A name of few digits is one, whatever ids begin so.
    named = replace(other, facts=replace(other.facts, name=one.id[:8]))
    assert Catalogue([one, named], []).find(one.id[:8]).id == other.id


def test_stores_that_were_not_looked_into_are_named() -> None:
    down = HostDownError("host lab-b is down", why="no answer", remedy="-")
    with pytest.raises(NotFoundError) as told:
        Catalogue([], [down]).find("a")
    assert "host lab-b is down: no answer" in told.value.why


@pytest.mark.parametrize(
    "changed",
    [{"vm_id": "x"}, {"created_unix_s": 5.0}, {"sequence": 1}, {"parent": "b" * 32}, {"facts": {}}],
)
def test_what_one_store_says_of_anothers_checkpoint_does_not_count(
    changed: dict[str, Any],
) -> None:
    """A client that only adds to it could have retention remove the newest from all of them."""
    mine = replace(entry("a", 1, None).manifest, vm_id="v", sequence=9)
    hostile = replace(mine, **changed)
    copy = replace(mine, added_bytes=7, packs=("c" * 32,))
    for found in (
        [(BUCKET, hostile), (own(A), mine), (own(B), copy)],
        [(own(B), copy), (own(A), mine), (BUCKET, hostile)],
    ):
        kept, [error] = _agreeing(found, lambda _: False)
        [one] = _merged(kept)
        assert BUCKET not in one.locations
        assert len(one.locations) == 2
        assert is_same(one.manifest, mine)
        assert BUCKET.label in error.what


def test_a_checkpoint_of_this_sites_is_not_foreign_because_a_bucket_says_so(tmp_path: Path) -> None:
    """A bucket counted as nearer than the store of a host elsewhere, which has the right one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VMCKPT_STATE_DIR", str(tmp_path))
        bare = entry("a", 1, None).manifest
        key = run_key(tmp_path, bare.vm)
        mine = replace(bare, facts=marked({"name": "n"}, key, bare.id, bare.vm))
        hostile = replace(mine, facts={**mine.facts, "spec": "of another guest"})
        far = StoreLocation(Elsewhere("far", Path("/far"), "192.0.2.1"), "/srv/checkpoints")
        for found in ([(BUCKET, hostile), (far, mine)], [(far, mine), (BUCKET, hostile)]):
            kept, [error] = _agreeing(found, _is_ours)
            assert kept == [(far, mine)]
            assert BUCKET.label in error.what
        (tmp_path / "site.key").write_text("damaged")
        assert not _is_ours(mine)
