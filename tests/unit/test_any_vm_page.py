"""docs/any-vm.md is what the committed results of its walk say, and has a cell for everything."""

from dataclasses import replace
from textwrap import indent

import pytest

from tests.any_vm import KINDS, OPERATIONS, PAGE, Cell, page, read

pytestmark = pytest.mark.unit
ERROR = {"what": "'x' is off", "why": "it was stopped", "remedy": "vmckpt vm start x"}


def test_the_page_is_of_the_results() -> None:
    assert PAGE.read_text() == page(read())


def test_no_cell_is_missing() -> None:
    cells = read().cells
    assert list(cells) == list(OPERATIONS)
    assert all(list(row) == list(KINDS) for row in cells.values())
    assert sum("| " in line for line in PAGE.read_text().splitlines()) == len(OPERATIONS) + 1


def test_a_refusal_is_told_once_in_the_words_of_its_error() -> None:
    row = {
        "own": Cell("pause 3 ms"),
        "adopted": Cell(refused={"command": "vmckpt a x", **ERROR}),
        "domain": Cell(refused={"command": "vmckpt b x", **ERROR}),
    }
    text = page(replace(read(), cells=dict.fromkeys(OPERATIONS, row)))
    assert text.count("| works: pause 3 ms | refused ([1](#refused)) |") == len(OPERATIONS)
    assert text.count(ERROR["what"]) == 1
    told = "error: 'x' is off\n  why: it was stopped\n  do:  vmckpt vm start x\n"
    assert f"1. `vmckpt a x`, `vmckpt b x`\n\n{indent(told, ' ' * 8)}" in text


def test_a_walk_without_refusals_has_no_such_section() -> None:
    works = dict.fromkeys(KINDS, Cell())
    text = page(replace(read(), cells=dict.fromkeys(OPERATIONS, works)))
    assert "## Refused" not in text
    assert text.count("| works | works | works |") == len(OPERATIONS)
