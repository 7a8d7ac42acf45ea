"""What ended a QEMU that no one told to, by what it left."""

import asyncio
from pathlib import Path

import pytest

from tests.faulty_host import Fault, FaultyHost
from vmckpt.hosts.local import LocalHost
from vmckpt.vm.ended import ending
from vmckpt.vm.paths import QemuDir, vm_dir
from vmckpt.vm.spec.spec import Spec, parse_spec

pytestmark = pytest.mark.unit

HEAD = "vmckpt: QEMU of web\n"
RUNS = "10921@1795617155.054667:vm_state_notify running 1 reason 9 (running)\n"
STOPS = "10921@1795617156.054667:vm_state_notify running 0 reason 7 (shutdown)\n"
WORDS = "2026-11-25T14:00:00.0Z qemu-system-x86_64: ../hw/x.c:1: f: Assertion `0' failed.\n"


def host(state: Path, free: int) -> LocalHost:
    """One with so much room left."""

    return FaultyHost("a", state, "127.0.0.1", faults=(Fault("free_bytes", answers=free),))


def left(path: Path, log: str, *, memory: bool = True) -> tuple[Spec, QemuDir]:
    spec = parse_spec(f'name = "web"\nmemory = "64M"\nram_dir = "{path}"', "x", path)
    files = vm_dir(path, "web").qemu("0123abcd")
    files.path.mkdir(parents=True)
    files.stderr.write_text(log)
    if memory:
        files.memory(path).mkdir()
    return spec, files


def said(path: Path, log: str, *, free: int = 1 << 30, memory: bool = True) -> str:
    return asyncio.run(ending(host(path, free), *left(path, log, memory=memory)))


@pytest.mark.parametrize("log", ["", HEAD, HEAD + RUNS + STOPS, HEAD + WORDS])
def test_one_that_ended_by_itself_or_never_ran_did_not_die(tmp_path: Path, log: str) -> None:
    assert said(tmp_path, log, free=0) == ""


def test_where_its_memory_has_no_room_left_it_died_of_sigbus(tmp_path: Path) -> None:
    words = said(tmp_path, HEAD + RUNS, free=4096)
    assert "SIGBUS" in words
    assert str(tmp_path) in words


def test_otherwise_its_own_words_are_told(tmp_path: Path) -> None:
    words = said(tmp_path, HEAD + RUNS + STOPS + RUNS + WORDS)
    assert "SIGBUS" not in words
    assert "Assertion `0' failed" in words


def test_one_whose_memory_is_gone_ended_with_its_host(tmp_path: Path) -> None:
    assert "restarted" in said(tmp_path, HEAD + RUNS, free=0, memory=False)


def test_what_left_no_log_ended_as_it_was_told_to(tmp_path: Path) -> None:
    spec, files = left(tmp_path, "")
    files.stderr.unlink()
    assert asyncio.run(ending(host(tmp_path, 0), spec, files)) == ""


@pytest.mark.parametrize("told", [None, "{", "[]", '{"lost": 7}', '{"pager": null}'])
def test_memory_that_did_not_come_yet_is_no_cause(tmp_path: Path, told: str | None) -> None:
    spec, files = left(tmp_path, HEAD + RUNS)
    if told is not None:
        files.missing.write_text(told)
    assert "a signal ended its QEMU" in asyncio.run(ending(host(tmp_path, 1 << 30), spec, files))


def test_a_page_that_could_not_be_had_is_the_cause(tmp_path: Path) -> None:
    spec, files = left(tmp_path, HEAD + RUNS)
    files.missing.write_text('{"lost": "pack 07 is damaged"}')
    words = asyncio.run(ending(host(tmp_path, 1 << 30), spec, files))
    assert "(pack 07 is damaged): restore another checkpoint" in words
