"""What a VM has with it of its checkpoints: the last one, and the stores that have some."""

from pathlib import Path

import pytest

from vmckpt.checkpoint.catalogue.location import StoreLocation, own
from vmckpt.checkpoint.history import History
from vmckpt.hosts.local import LocalHost

HOST = LocalHost("local", Path("/state"), "127.0.0.1")
OTHER = LocalHost("other", Path("/other"), "127.0.0.1")


def test_a_hosts_own_store_needs_no_mention() -> None:
    history = History().then("a", HOST, "/state/checkpoints")
    assert history == History("a")
    assert History.parse(history.text) == history


def test_the_largest_number_of_a_checkpoint_stays_known() -> None:
    history = History().then("a", HOST, "/srv/points", 7).then("b", HOST, "/srv/points", 3)
    assert history.sequence == 7
    assert History.parse(history.text) == history
    assert History.parse('{"last": "a", "stores": []}') == History("a")  # of an older vmckpt


def test_each_store_is_known_once_by_whose_directory_it_is() -> None:
    history = History()
    for location in ("/srv/points", "s3://bucket/web", "/srv/points"):
        history = history.then("a", HOST, location)
    assert history.stores == ("s3://bucket/web", "local:/srv/points")


def test_a_directory_is_looked_for_where_it_was_and_where_the_vm_is() -> None:
    history = History("a", ("local:/srv/points", "s3://bucket/web"))
    assert list(history.locations(OTHER)) == [
        StoreLocation(LocalHost("local", *_here()), "/srv/points"),
        StoreLocation(OTHER, "/srv/points"),
        StoreLocation(None, "s3://bucket/web"),
    ]


def test_a_host_that_the_inventory_has_no_more_leaves_the_directory() -> None:
    history = History("a", ("gone:/srv/points",))
    assert list(history.locations(OTHER)) == [StoreLocation(OTHER, "/srv/points")]


def test_which_object_the_last_one_was_is_of_the_last_one_alone() -> None:
    taken = History("a").then("b", HOST, "/srv/points", 3, version="17 42")
    assert History.parse(taken.text) == taken
    assert taken.version == "17 42"
    assert taken.then("c", HOST, "/srv/points").version == ""  # restored


def test_what_cannot_be_read_says_nothing() -> None:
    for text in (None, "", "a" * 32, "{}", '{"last": "a"}', "[1]",
                 '{"stores": [], "sequence": -1}', '{"stores": ["a", 1]}'):  # fmt: skip
        assert History.parse(text) == History()


def test_places_in_words() -> None:
    assert own(OTHER).label == "other:"
    assert StoreLocation(OTHER, "/srv/points").label == "/srv/points"
    assert StoreLocation(None, "s3://bucket/web").label == "s3://bucket/web"


def _here() -> tuple[Path, str]:
    from vmckpt.hosts.inventory.inventory import local_host

    return local_host().state_dir, local_host().migration_address


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"last": "a", "stores": [], "sequence": Infinity}',
        '{"last": "a", "stores": [], "sequence": 1e400}',
        '{"last": "a", "stores": ["\\ud800"]}',
        '{"last": ["a"], "stores": "x"}',
        '"x"',
        "\0" * 100,
    ],
)
def test_whatever_a_host_wrote_there_is_no_history_or_one(text: str) -> None:
    assert History.parse(text) == History()


def test_a_store_that_is_none_is_passed_over() -> None:
    """One host's word keeps no other host's checkpoints from being listed."""
    history = History("a", ("ftp://nowhere/x", "s3://bucket/web"))
    assert list(history.locations(OTHER)) == [StoreLocation(None, "s3://bucket/web")]
