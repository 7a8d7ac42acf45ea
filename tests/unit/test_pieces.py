"""What a benchmark that is made in pieces may count together."""

from benchmarks.pieces import rows, same

PIECES = [
    {"commit": "aaaa", "others_use_percent": 3.0, "rows": [{"n": 1}, {"n": 2}]},
    {"commit": "bbbb", "others_use_percent": 0.0, "rows": [{"n": 3}]},
    {"commit": "aaaa", "others_use_percent": 55.0, "ended": "cut off", "rows": [{"n": 4}]},
]


def test_only_pieces_of_the_same_commit_are_gone_on_with() -> None:
    assert same(PIECES, "aaaa") == [PIECES[0], PIECES[2]]
    assert same(PIECES, "cccc") == []


def test_of_changed_code_nothing_is_gone_on_with() -> None:
    assert same([PIECES[0] | {"commit": "aaaa-dirty"}], "aaaa-dirty") == []


def test_times_are_of_pieces_that_were_alone() -> None:
    found = {"part": {"pieces": PIECES}}
    assert [row["n"] for row in rows(found, "part")] == [1, 2, 3, 4]
    assert [row["n"] for row in rows(found, "part", alone=True)] == [1, 2, 3]
    assert rows({}, "part") == []
