"""The tutorial is recorded whole: no output of a former recording stays in it."""

import pytest

from benchmarks.tour import PAGE, blocks, commands

pytestmark = pytest.mark.unit


def test_an_output_with_empty_lines_is_one_block() -> None:
    text = (
        "Text:\n\n    $ plan\n    web\n\n        METHOD\n\n    choice\n\n    $ list\n    a\n\nMore."
    )
    found = [commands(block) for block in blocks(text)]
    assert [one for one in found if one] == [["plan"], ["list"]]
    assert "\n".join(line for block in blocks(text) for line in block) == text


def test_each_block_of_the_page_begins_with_a_command() -> None:
    found = [block for block in blocks(PAGE.read_text()) if block[0].startswith("    ")]
    others = [block[0] for block in found if not block[0].startswith("    $ ")]
    assert others == ["    make setup build/image build/qemu-10.0"]
