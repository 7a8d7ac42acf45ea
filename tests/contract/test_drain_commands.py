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


def test_what_cannot_be_meant_is_refused(tmp_path: Path) -> None:
    assert said(tmp_path, "drain", "nowhere")[0] == 3
    assert said(tmp_path, "drain", "local", "--to", "nowhere")[0] == 3
    assert said(tmp_path, "drain", "local", "--to", "local")[0] == 4
    wrong = (["--to", ","], ["--apart", "one"], ["--finish-within", "soon"], ["--keep-free", "all"],
             ["--max-parallel", "0"], ["--for", "0s"])  # fmt: skip
    for words in wrong:
        assert said(tmp_path, "drain", "local", *words)[0] == 2
    assert not (tmp_path / "drained.json").exists()
