"""Which commands do without typer, and that they do; how little else they load."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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


# Runs the command line; what it has loaded is the last line on stderr.
LOADED = """
import json, os, sys
before = set(sys.modules)
sys.argv = ["vmckpt", *sys.argv[1:]]
from vmckpt.cli import entry
def ended(code):
    ours = [name for name in sys.modules if name.split(".")[0] == "vmckpt"]
    found = [one for name in ours for one in vars(sys.modules[name]).values()]
    made = {one for one in found if isinstance(one, type) and "__dataclass_fields__" in vars(one)}
    loaded = {"ours": ours, "all": [*set(sys.modules) - before], "dataclasses": [*map(repr, made)]}
    print(json.dumps(loaded), file=sys.stderr)
    sys.stdout.flush()
    exit_(code)
exit_, os._exit = os._exit, ended
entry.start()
"""
# Costly, and not needed to list VMs: of the libraries, and of our own.
NOT_FOR_A_LIST = {
    "typer", "click", "msgspec", "shutil", "hashlib", "shlex", "random",
    "vmckpt.events.secrets", "vmckpt.events.types", "vmckpt.options", "vmckpt.vm.argv",
    "vmckpt.vm.start", "vmckpt.vm.users", "vmckpt.vm.lifecycle", "vmckpt.vm.disks.images",
    "vmckpt.qemu.agent", "vmckpt.hosts.ssh", "vmckpt.migrate.outcome.journal", "vmckpt.checkpoint",
}  # fmt: skip


def listed(
    directory: Path, *words: str, code: int = 0, **variables: str
) -> tuple[str, dict[str, Any]]:
    """What `vmckpt vm list` prints, and what it has loaded."""
    done = subprocess.run(
        [sys.executable, "-c", LOADED, "vm", "list", *words],
        env={**os.environ, "VMCKPT_STATE_DIR": str(directory), **variables},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done.stdout, json.loads(done.stderr.splitlines()[-1])


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_a_plain_list_loads_little(words: tuple[str, ...], tmp_path: Path) -> None:
    _, loaded = listed(tmp_path, *words)
    assert not NOT_FOR_A_LIST & set(loaded["all"])
    # Each module costs 0.05 ms, each dataclass 0.2 ms: see what was added, and whether a list
    # needs it.
    assert len(loaded["ours"]) <= 82, loaded["ours"]
    assert len(loaded["dataclasses"]) <= 5, loaded["dataclasses"]


def test_a_plain_list_is_the_parsers(tmp_path: Path) -> None:
    for plain, parsed in (((), ("-o", "table")), (("--json",), ("-o", "json"))):
        (text, without), (same, loaded) = listed(tmp_path, *plain), listed(tmp_path, *parsed)
        assert text == same
        assert ("typer" in without["all"], "typer" in loaded["all"]) == (False, True)


def test_a_list_with_a_default_is_the_parsers(tmp_path: Path) -> None:
    text, loaded = listed(tmp_path, code=3, VMCKPT_VM_LIST_HOST="nowhere")
    assert text == ""
    assert "typer" in loaded["all"]
