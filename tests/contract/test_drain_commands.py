"""`vmckpt drain` and `undrain` where there is no guest."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.commands import vmckpt

pytestmark = pytest.mark.contract

SPEC = 'name = "web"\nmemory = "64M"\n'


def said(state: Path, *words: str) -> tuple[int, dict[str, Any]]:
    done = vmckpt(state, *words, "--json")
    return done.returncode, json.loads(done.stdout)


def test_an_empty_host_is_closed_at_once_and_opened_again(tmp_path: Path) -> None:
    spec = tmp_path / "web.toml"
    spec.write_text(SPEC)
    code, result = said(tmp_path, "drain", "local")
    assert (code, result["moved"], result["stay"]) == (0, [], [])
    code, refused = said(tmp_path, "vm", "run", str(spec))
    assert (code, refused["error"]["what"]) == (4, "local is drained")
    assert said(tmp_path, "undrain", "local")[0] == 0
    code, refused = said(tmp_path, "undrain", "local")
    assert (code, refused["error"]["what"]) == (4, "local is not drained")


def test_what_a_reason_drained_is_undone_by_the_same_reason_alone(tmp_path: Path) -> None:
    mark, reason = tmp_path / "drained.json", ("--reason", "shutdown")
    assert said(tmp_path, "undrain", "local", *reason)[0] == 0
    assert said(tmp_path, "drain", "local", *reason)[0] == 0
    assert said(tmp_path, "undrain", "local", "--reason", "repair")[0] == 0
    assert mark.exists()
    # Again, and with another reason: it keeps the first.
    assert said(tmp_path, "drain", "local", *reason)[0] == 0
    assert said(tmp_path, "drain", "local", "--reason", "repair")[0] == 0
    assert said(tmp_path, "undrain", "local", *reason)[0] == 0
    assert not mark.exists()


def test_a_host_that_an_operator_has_drained_is_not_opened_at_boot(tmp_path: Path) -> None:
    mark, reason = tmp_path / "drained.json", ("--reason", "shutdown")
    assert said(tmp_path, "drain", "local")[0] == 0
    operators = mark.read_text()
    assert said(tmp_path, "drain", "local", *reason)[0] == 0
    code, result = said(tmp_path, "undrain", "local", *reason)
    assert (code, result["moved"]) == (0, [])
    assert mark.read_text() == operators
    assert said(tmp_path, "undrain", "local")[0] == 0
    # And one that an operator elsewhere drained since.
    assert said(tmp_path, "drain", "local", *reason)[0] == 0
    mark.write_text(operators)
    assert said(tmp_path, "undrain", "local", *reason)[0] == 0
    assert mark.read_text() == operators


def test_what_cannot_be_meant_is_refused(tmp_path: Path) -> None:
    assert said(tmp_path, "drain", "nowhere")[0] == 3
    assert said(tmp_path, "drain", "local", "--to", "nowhere")[0] == 3
    assert said(tmp_path, "drain", "local", "--to", "local")[0] == 4
    wrong = (["--to", ","], ["--apart", "one"], ["--finish-within", "soon"], ["--keep-free", "all"],
             ["--max-parallel", "0"], ["--for", "0s"], ["--vcpus-per-cpu", "nan"],
             ["--vcpus-per-cpu", "inf"], ["--vcpus-per-cpu", "1e308"])  # fmt: skip
    for words in wrong:
        assert said(tmp_path, "drain", "local", *words)[0] == 2
    assert not (tmp_path / "drained.json").exists()
