"""Which commands do without typer, and that they do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit
LOOK = """
import sys
sys.argv = ["vmckpt", *sys.argv[1:]]
from vmckpt.cli import entry, loop
import os
def ended(code):
    print(f"{code} {'typer' in sys.modules}")
    sys.stdout.flush()
    exit_(code)
exit_, os._exit = os._exit, ended
loop.run = lambda work: print(work.cr_code.co_name) or work.close()
from vmckpt.cli.commands import moving
moving.run, moving.show_outcome = loop.run, lambda outcome, as_json: print(as_json)
moving.target_of = lambda name: name
entry.start()
"""


def said(*words: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", LOOK, *words], capture_output=True, text=True, check=False
    )
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "as_json"),
    [
        (("web", "b"), "False"),
        (("web", "b", "--json"), "True"),
        (("--json", "web", "b"), "True"),
    ],
)
def test_a_plain_migration_needs_no_typer(words: tuple[str, ...], as_json: str) -> None:
    assert said("migrate", *words) == ["_migrate", as_json, "0", "False"]


def test_any_other_option_is_the_parsers() -> None:
    words = ("migrate", "web", "b", "--method", "precopy", "--json")
    assert said(*words) == ["_migrate", "True", "0", "True"]


@pytest.mark.parametrize("words", [(), ("web", "b", "c"), ("web", "b", "--to")])
def test_what_is_missing_or_too_much_is_told_by_the_parser(words: tuple[str, ...]) -> None:
    assert said("migrate", *words) == ["2", "True"]


@pytest.mark.parametrize("words", [("--help",), ("vm", "list")])
def test_no_codec_is_loaded_where_there_is_no_record(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    program = (
        "import sys; from vmckpt.cli.main import main; code = main();"
        "assert 'msgspec' not in sys.modules; raise SystemExit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        env={**os.environ, "VMCKPT_STATE_DIR": str(tmp_path)},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
