"""vmckpt store, as it is typed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.commands import vmckpt
from tests.guest_like import Memory, dirtied, memory, require_same, save
from tests.small_packs import make_small, require_one
from vmckpt.store.files.manifest import Manifest
from vmckpt.store.open import create_store, open_store


class Bench:
    """A state directory whose store has two checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.location = folder / "state" / "checkpoints"
        ram = memory(64, 1)
        after, dirty = dirtied(ram, 50, 1)
        with create_store(str(self.location)) as store:
            first = save(store, ram, name="first")
            second = save(store, after, parent=first, dirty=dirty, name="second")
        self.states: list[tuple[Manifest, Memory]] = [(first, ram), (second, after)]

    def run(self, *words: str, code: int = 0, key_command: str = "") -> dict[str, Any]:
        """The command's answer: of `vmckpt store`, or of another if `words` begin with its name."""
        group = [] if words[0] == "checkpoint" else ["store"]
        done = subprocess.run(
            [sys.executable, "-m", "vmckpt.cli.entry", *group, *words, "--json"],
            env={
                **os.environ,
                "VMCKPT_STATE_DIR": str(self.folder / "state"),
                "VMCKPT_STORE_KEY_COMMAND": key_command,
            },
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_small_packs_are_merged_by_gc(bench: Bench) -> None:
    with open_store(str(bench.location)) as store:
        made = make_small(store, 16, vm="small")
    planned = bench.run("gc", "--dry-run")
    assert (planned["merged"], planned["bundles"]) == (20, 0)
    # The first one raises the format.
    assert bench.run("info")["format"] == 1
    first = bench.run("gc")
    assert (first["merged"], first["bundles"]) == (0, 0)
    facts = bench.run("info")
    assert (facts["format"], facts["bundles"], facts["packs"]) == (3, 0, 20)
    second = bench.run("gc")
    assert (second["merged"], second["bundles"]) == (20, 1)
    facts = bench.run("info")
    assert (facts["format"], facts["bundles"], facts["packs"]) == (3, 1, 20)
    assert bench.run("check")["whole"]
    with open_store(str(bench.location)) as store:
        for manifest, ram in made:
            require_one(store, manifest, ram)


def test_info_and_check_and_gc(bench: Bench) -> None:
    facts = bench.run("info")
    assert facts["checkpoints"] == 2
    assert facts["vms"] == ["vm"]
    assert facts["stored_bytes"] < facts["restored_bytes"]
    assert bench.run("check")["whole"]
    with open_store(str(bench.location)) as store:
        store.remove([bench.states[0][0].id])
    planned = bench.run("gc", "--dry-run")
    assert planned["dry_run"]
    assert planned["freed_bytes"] > 0
    freed = bench.run("gc")
    assert freed["rewritten"] == planned["rewritten"] != []
    assert bench.run("gc")["freed_bytes"] == 0
    [pack, *_] = (bench.location / "packs").glob("[0-9a-f]*")
    data = pack.read_bytes()
    pack.write_bytes(data[:100] + bytes([data[100] ^ 1]) + data[101:])
    error = bench.run("check", code=11)["error"]
    assert error["kind"] == "damaged"
    assert pack.name in error["why"]
    assert bench.states[1][0].id in error["remedy"]


def test_checkpoints_are_carried_in_a_file(bench: Bench) -> None:
    file = bench.folder / "carried"
    first, second = (manifest.id for manifest, _ in bench.states)
    assert bench.run("export", str(file))["copied"] == [first, second]
    assert "exists already" in bench.run("export", str(file), code=4)["error"]["what"]
    assert bench.run("info", str(file))["checkpoints"] == 2
    assert bench.run("check", str(file))["whole"]
    other = str(bench.folder / "other")
    bench.run("init", other)
    assert bench.run("import", str(file), "second", "--store", other)["copied"] == [second]
    taken = bench.run("import", str(file), "--store", other)
    assert taken["copied"] == [first]
    assert taken["there_already"] == [second]
    with open_store(other) as store:
        for manifest, ram in bench.states:
            require_same(store, manifest, ram)


@pytest.mark.parametrize("named", [False, True])
def test_what_cannot_be_read_is_not_left_out_of_a_copy_without_a_word(
    bench: Bench, named: bool
) -> None:
    """Of a store with a damaged checkpoint the copy elsewhere was said to be complete."""
    path = bench.location / "checkpoints" / bench.states[0][0].id
    path.write_bytes(b"\0" * 200 + path.read_bytes()[200:])
    other, file = bench.folder / "other", bench.folder / "carried"
    bench.run("init", str(other))
    words = ["second"] if named else []
    code = 0 if named else 11
    told = bench.run("copy", str(other), *words, code=code)
    assert named or "1 of 2 checkpoints were not copied" in told["error"]["what"]
    with open_store(str(other)) as store:
        require_same(store, *bench.states[1])
    told = bench.run("export", str(file), *words, code=code)
    assert named or "1 of 2 checkpoints were not copied" in told["error"]["what"]
    assert file.exists() == named


def test_copies_go_to_an_encrypted_store(bench: Bench) -> None:
    other, key = str(bench.folder / "other"), str(bench.folder / "key")
    made = bench.run("init", other, "--key-file", key)
    assert made["encrypted"] == "key"
    assert made["made_key_file"] == key
    assert bench.run("copy", other, "first", code=4)["error"]["why"] == "no key was given"
    copied = bench.run("copy", other, "first", "--target-key-file", key)
    assert copied["copied"] == [bench.states[0][0].id]
    assert len(bench.run("copy", other, key_command=f"cat {key}")["copied"]) == 1
    assert bench.run("check", other, "--key-file", key)["checkpoints"] == 2


def test_what_cannot_be_meant_is_said(bench: Bench) -> None:
    assert bench.run("init", code=4)["error"]["kind"] == "refused"
    assert bench.run("info", "/nowhere", code=3)["error"]["kind"] == "not-found"
    assert bench.run("export", "x", "third", code=3)["error"]["kind"] == "not-found"
    both = ["--key-file", "a", "--key-command", "b"]
    assert bench.run("info", *both, code=2)["error"]["kind"] == "usage"
    # No key is left that opens nothing.
    key = bench.folder / "key"
    bench.run("init", "--key-file", str(key), code=4)
    assert not key.exists()


def test_damage_is_repaired(bench: Bench) -> None:
    lost = bench.states[1][0].id
    path = bench.location / "checkpoints" / lost
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    assert bench.run("check", "--read-data-subset", "1/3", code=11)["error"]["kind"] == "damaged"
    assert "not part" in bench.run("check", "--read-data-subset", "5", code=2)["error"]["what"]
    shown = bench.run("repair")
    assert list(shown["lost"]) == [lost]
    assert not shown["applied"]
    assert lost in bench.run("repair", "--apply", code=11)["error"]["why"]
    assert path.exists()
    done = bench.run("repair", "--apply", "--remove-lost")
    assert (done["removed"], done["left"]) == ([lost], [])
    assert bench.run("check")["whole"]
    assert bench.run("repair")["whole"]


def test_a_check_without_a_store_of_ones_own_is_of_those_that_hold_checkpoints(
    bench: Bench, tmp_path: Path
) -> None:
    """All hosts' own, and those that VMs were taken into; a silent host keeps no one back."""
    state = tmp_path / "operator"
    (state / "hosts").mkdir(parents=True)

    def host(name: str, folder: Path) -> None:
        entry = {"kind": "local", "state_dir": str(folder), "migration_address": "127.0.0.1"}
        (state / f"hosts/{name}.json").write_text(json.dumps(entry))

    def check(*words: str) -> tuple[int, dict[str, Any]]:
        done = vmckpt(state, "store", "check", *words, "--json")
        return done.returncode, json.loads(done.stdout)

    code, none = check()
    assert (code, none["error"]["kind"]) == (3, "not-found")
    host("a", bench.folder / "state")
    code, one = check()
    assert (code, one["place"], one["checkpoints"]) == (0, str(bench.location), 2)
    with create_store(str(tmp_path / "b" / "checkpoints")) as store:
        save(store, memory(16, 3), name="third")
    host("b", tmp_path / "b")
    code, both = check()
    assert (code, both["whole"], [one["checkpoints"] for one in both["stores"]]) == (
        0,
        True,
        [2, 1],
    )
    pack = next((tmp_path / "b").rglob("*.pack"), None) or next(
        path for path in (tmp_path / "b/checkpoints/packs").rglob("*") if path.is_file()
    )
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.chmod(0o600)
    pack.write_bytes(data)
    code, damaged = check()
    assert (code, str(tmp_path / "b") in damaged["error"]["what"]) == (11, True)
    assert check(str(bench.location))[0] == 0


def test_a_checkpoint_that_cannot_be_read_is_listed_and_removed_by_its_id(bench: Bench) -> None:
    first, second = (manifest.id for manifest, _ in bench.states)
    path = bench.location / "checkpoints" / second
    path.write_bytes(path.read_bytes()[:60])
    where = ("--store", str(bench.location))
    listed = bench.run("checkpoint", "list", *where)
    assert [one["id"] for one in listed["checkpoints"]] == [first]
    assert second in str(listed["silent"])
    assert bench.run("checkpoint", "rm", second[:8], "--yes", *where)["removed"] == [second]
    assert not path.exists()
    assert not bench.run("checkpoint", "list", *where)["silent"]
