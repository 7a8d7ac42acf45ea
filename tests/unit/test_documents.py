"""Records: read as they were written, replaced durably, and damaged in one way."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.unreadable import nothing_is_listed
from vmckpt.errors import StorageError
from vmckpt.state.documents import Documents, Schema

pytestmark = pytest.mark.unit


@dataclass(frozen=True, slots=True)
class Note:
    text: str
    times: tuple[float, ...] = ()


SCHEMA = Schema(Note, "write note {name} again", version=2)


@pytest.fixture
def notes(tmp_path: Path) -> Documents[Note]:
    return Documents(tmp_path / "a/notes", SCHEMA)


def test_a_record_is_read_as_it_was_written(notes: Documents[Note]) -> None:
    assert (notes.names(), notes.load("n"), notes.load_all().records) == ([], None, {})
    notes.remove("n")
    notes.save("n", Note("first"))
    notes.save("n", Note("a\udcff", (1.0, 2.5)))  # of a path that is not valid UTF-8
    notes.save("m", Note("other"))
    assert notes.load("n") == Note("a\udcff", (1.0, 2.5))
    assert list(notes.load_all().require_sound()) == [Note("other"), notes.load("n")]
    assert notes.path("n").stat().st_mode & 0o777 == 0o600
    assert notes.directory.stat().st_mode & 0o777 == 0o700
    notes.remove("n")
    assert (notes.names(), notes.load("n")) == (["m"], None)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "it is empty, as a power cut leaves a file"),
        (b"\0\0\0", "it is empty, as a power cut leaves a file"),
        (b"{", "it is not valid JSON"),
        (b"\xff", "it is not valid JSON"),
        (b"[]", "it holds a list, not an object"),
        (b'{"text": "a"}', "written by another version of vmckpt"),
        (b'{"format": 1, "text": "a"}', "written by another version of vmckpt"),
        (b'{"format": 3}', "written by another version of vmckpt"),
        (b'{"format": 2}', "missing required field `text`"),
        (b'{"format": 2, "text": 1}', r"Expected `str`, got `int` - at `\$.text`"),
        (b'{"format": 2, "text": "a", "text": "b"}', "'text' occurs twice"),
        (b'{"format": 2, "text": "a", "times": [NaN]}', "NaN is not a number"),
    ],
)
def test_damage_is_named_with_what_to_do_and_hides_no_other(
    notes: Documents[Note], data: bytes, why: str
) -> None:
    notes.save("n", Note("good"))
    notes.path("bad").write_bytes(data)
    with pytest.raises(StorageError, match=r"bad\.json is damaged: .*" + why) as raised:
        notes.load("bad")
    assert raised.value.remedy == "write note bad again"
    listed = notes.load_all()
    assert listed.records == {"n": Note("good")}
    assert [str(one) for one in listed.damaged] == [str(raised.value)]
    with pytest.raises(StorageError, match=r"bad\.json is damaged"):
        listed.require_sound()


def test_a_record_without_a_version_is_of_the_first() -> None:
    assert Schema(Note, "-").decode('{"text": "a"}', Path("here")) == Note("a")
    assert SCHEMA.encode(Note("a")) == '{"format": 2, "text": "a", "times": []}'


def test_what_cannot_be_written_or_read_is_said(notes: Documents[Note]) -> None:
    notes.path("n").mkdir(parents=True)
    with pytest.raises(StorageError, match=r"cannot write .*n\.json"):
        notes.save("n", Note("a"))
    with pytest.raises(StorageError, match=r"cannot read .*n\.json"):
        notes.load("n")
    with pytest.raises(StorageError, match=r"cannot remove .*n\.json"):
        notes.remove("n")


def test_a_directory_that_cannot_be_read_is_not_an_empty_one(notes: Documents[Note]) -> None:
    notes.save("n", Note("first"))
    (notes.directory / ".n.json").write_text("of an editor")
    with nothing_is_listed(), pytest.raises(StorageError, match="cannot read"):
        notes.load_all()
    assert notes.names() == ["n"]


def test_an_infinity_is_not_written(notes: Documents[Note]) -> None:
    with pytest.raises(StorageError, match=r"Note.* cannot be written: .*not JSON compliant"):
        notes.save("n", Note("a", (float("inf"),)))
    assert notes.load("n") is None
