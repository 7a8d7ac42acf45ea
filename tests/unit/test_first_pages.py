"""What is noted of a guest's first pages, from what it waited for and what it found."""

from pathlib import Path

import pytest

from vmckpt.checkpoint.restore.first_pages import MOST_NOTED, next_noted, note, read_noted


def test_what_was_used_stays_first_and_what_was_not_goes() -> None:
    assert next_noted([1, 2, 3], [9, 2, 8, 9], used={3, 1}) == [1, 3, 9, 2, 8]


def test_the_surest_are_kept_where_there_are_too_many() -> None:
    noted = list(range(MOST_NOTED))
    assert next_noted(noted, [-1, -2, -3], used=set(noted[2:])) == [*noted[2:], -1, -2]
    assert next_noted(noted, [-1], used=set(noted)) == noted


def test_what_is_noted_is_read_again(tmp_path: Path) -> None:
    note(tmp_path / "deep" / "guest", [3, 1])
    assert read_noted(tmp_path / "deep" / "guest") == [3, 1]
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["guest"]


@pytest.mark.parametrize("text", ["", "{", "7", '["1", 2.5, null, {}]'])
def test_a_note_that_is_none_names_no_page(tmp_path: Path, text: str) -> None:
    (tmp_path / "guest").write_text(text)
    assert read_noted(tmp_path / "guest") == []
    assert read_noted(tmp_path / "missing") == []


def test_a_note_that_cannot_be_written_is_left(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    note(tmp_path / "file" / "guest", [1])
