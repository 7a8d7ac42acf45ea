"""Names of checkpoints that no one has named."""

import time

import pytest

from vmckpt.store.files.naming import MOST_LETTERS, dated

pytestmark = pytest.mark.unit
AT = time.gmtime(0)


def test_it_says_of_what_for_what_and_when() -> None:
    assert dated("web", at=AT) == "web-19700101-000000"
    assert dated("web", "fork", AT) == "web-fork-19700101-000000"


@pytest.mark.parametrize("made_for", ["", "fork", "guard"])
def test_its_time_is_whole_and_a_number_has_room(made_for: str) -> None:
    name = dated("w" * MOST_LETTERS, made_for, AT)
    assert name.endswith("-19700101-000000")
    assert len(f"{name}-2") == MOST_LETTERS
