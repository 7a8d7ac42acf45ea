"""Memory is promised once: what others may still touch is not free."""

import errno
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

import pytest

from vmckpt.hosts.host import FreeMemory, Promise
from vmckpt.hosts.processes import memory, process, promises

MIB = 1 << 20
NOBODY = "-pidfile\0/nowhere/vmckpt-test"


def promise(place: Path, name: str, size_bytes: int, *, is_private: bool = False) -> Promise:
    directory = place / f"vmckpt-{name}"
    directory.mkdir(mode=0o700, exist_ok=True)
    return Promise(directory / "promised", size_bytes, directory / "ram", is_private, NOBODY)


def ask(place: Path, one: Promise, have_bytes: int, *, overcommit: bool = False) -> FreeMemory:
    return promises.promise(one, lambda: have_bytes, overcommit=overcommit, records_dir=place)


@pytest.mark.parametrize("is_private", [False, True])
def test_two_that_do_not_fit_together_are_not_both_given(tmp_path: Path, is_private: bool) -> None:
    first = promise(tmp_path, "one", 60 * MIB, is_private=is_private)
    assert ask(tmp_path, first, 100 * MIB).is_given
    second = promise(tmp_path, "two", 60 * MIB)
    # The first has touched nothing yet: nothing less is free than before.
    found = ask(tmp_path, second, 100 * MIB)
    assert (found.is_given, found.free_bytes) == (False, 40 * MIB)
    assert found.promised_bytes == 60 * MIB
    assert not second.record.exists()
    assert promises.room(tmp_path, 100 * MIB, tmp_path).free_bytes == 40 * MIB
    assert ask(tmp_path, promise(tmp_path, "three", 40 * MIB), 100 * MIB).is_given
    assert ask(tmp_path, second, 100 * MIB, overcommit=True).is_given


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be given another user's files")
def test_what_another_user_puts_there_neither_counts_nor_is_waited_for(tmp_path: Path) -> None:
    mine = promise(tmp_path, "one", 60 * MIB)
    assert ask(tmp_path, mine, 100 * MIB).is_given
    theirs, pipe = tmp_path / "theirs", tmp_path / "pipe"
    for directory in (theirs, pipe):
        directory.mkdir()
    (theirs / "promised").write_text(mine.record.read_text())
    os.mkfifo(pipe / "promised")
    for path in (theirs, theirs / "promised", pipe, pipe / "promised"):
        os.chown(path, 65534, 65534)
    (tmp_path / "link").symlink_to(mine.record.parent)
    assert promises.room(tmp_path, 100 * MIB, tmp_path).free_bytes == 40 * MIB


@pytest.mark.parametrize("to", ["a" * 300, "loop", "/nowhere/at/all"])
def test_a_link_of_another_users_is_not_followed(tmp_path: Path, to: str) -> None:
    """It kept every VM of the host from being started."""
    assert ask(tmp_path, promise(tmp_path, "one", 60 * MIB), 100 * MIB).is_given
    (tmp_path / "loop").symlink_to(to)
    assert promises.room(tmp_path, 100 * MIB, tmp_path).free_bytes == 40 * MIB
    assert ask(tmp_path, promise(tmp_path, "two", 30 * MIB), 100 * MIB).is_given


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_link_to_what_is_closed_hides_no_promise() -> None:
    """What other VMs were promised was promised again."""
    with TemporaryDirectory() as name:
        place = Path(name)
        place.chmod(0o755)
        closed = place / "closed"
        closed.mkdir(mode=0o700)
        for number in range(8):
            (place / f"vm-{number}").mkdir()
            (place / f"vm-{number}/promised").touch()
            (place / f"link-{number}").symlink_to(closed / "inside")
        os.seteuid(65534)
        try:
            found = list(promises._written(place))
        finally:
            os.seteuid(0)
    assert len(found) == 8


def test_what_has_been_touched_is_not_counted_twice(tmp_path: Path) -> None:
    first = promise(tmp_path, "one", 60 * MIB)
    assert ask(tmp_path, first, 100 * MIB).is_given
    assert first.file is not None
    first.file.write_bytes(b"x" * (50 * MIB))  # the kernel says 50 MiB less are available now
    assert ask(tmp_path, promise(tmp_path, "two", 40 * MIB), 50 * MIB).is_given


@pytest.mark.parametrize("what", ["cmdline", "promised"])
def test_without_a_free_descriptor_nothing_is_promised_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """What could not be read then was left out, and its memory promised to another VM."""
    mark = f"-pidfile\0{tmp_path}/pid"
    words = [sys.executable, "-c", "input()", *mark.split("\0")]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as holder:
        first = promise(tmp_path, "one", 60 * MIB)._replace(holder=mark)
        assert ask(tmp_path, first, 100 * MIB).is_given
        given = json.loads(first.record.read_text())
        first.record.write_text(json.dumps(given | {"asker": [1, 1]}))  # which has ended since
        second = promise(tmp_path, "two", 60 * MIB)
        assert not ask(tmp_path, second, 100 * MIB).is_given
        is_out = 0

        def no_descriptor(path: object, *_: object, **__: object) -> NoReturn:
            nonlocal is_out
            is_out += 1
            raise OSError(errno.EMFILE, "Too many open files", str(path))

        where, name = (process, "file_of") if what == "cmdline" else (promises, "_text")
        monkeypatch.setattr(where, name, no_descriptor)
        with pytest.raises(OSError, match="Too many open files"):
            ask(tmp_path, second, 100 * MIB)
        assert is_out
        assert not second.record.exists()
        holder.communicate(b"\n")


def test_one_of_a_process_that_is_gone_does_not_count(tmp_path: Path) -> None:
    first = promise(tmp_path, "one", 60 * MIB)
    assert ask(tmp_path, first, 100 * MIB).is_given
    words = json.loads(first.record.read_text())
    words["asker"] = [os.getpid(), 1]
    first.record.write_text(json.dumps(words))
    assert ask(tmp_path, promise(tmp_path, "two", 100 * MIB), 100 * MIB).is_given


def test_one_whose_holder_runs_counts_whoever_asked_for_it(tmp_path: Path) -> None:
    mark = f"-pidfile\0{tmp_path}/pid"
    words = [sys.executable, "-c", "input()", *mark.split("\0")]
    holder = subprocess.Popen(words, stdin=subprocess.PIPE)
    try:
        first = promise(tmp_path, "one", 60 * MIB)._replace(holder=mark)
        assert ask(tmp_path, first, 100 * MIB).is_given
        told = json.loads(first.record.read_text()) | {"asker": [os.getpid(), 1]}
        first.record.write_text(json.dumps(told))
        second = promise(tmp_path, "two", 60 * MIB)
        assert not ask(tmp_path, second, 100 * MIB).is_given
    finally:
        holder.communicate(b"\n")
    assert ask(tmp_path, second, 100 * MIB).is_given


def test_of_many_that_ask_at_once_as_many_are_given_as_fit(tmp_path: Path) -> None:
    for number in range(5):
        place = tmp_path / str(number)
        place.mkdir()
        asked = [promise(place, str(one), 30 * MIB) for one in range(8)]
        with ThreadPoolExecutor(8) as pool:
            given = sum(
                found.is_given
                for found in pool.map(partial(ask, place, have_bytes=100 * MIB), asked)
            )
        assert given == 3


def test_damaged_records_of_others_count_for_nothing(tmp_path: Path) -> None:
    for name, text in (("a", ""), ("b", "[]"), ("c", '{"size_bytes": "x"}')):
        promise(tmp_path, name, 1).record.write_text(text)
    assert ask(tmp_path, promise(tmp_path, "d", 100 * MIB), 100 * MIB).is_given


def test_a_vm_that_ends_meanwhile_keeps_no_other_from_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its directory goes between two looks: a migration of another VM failed."""
    (tmp_path / "vmckpt-gone").mkdir()
    real = os.scandir

    def scandir(path: Path) -> object:
        if str(path).endswith("gone"):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert ask(tmp_path, promise(tmp_path, "web", 1 << 20), 1 << 30).is_given


def test_a_cgroups_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inner = tmp_path / "site/inner"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    for name, text in (("max", "1000"), ("current", "700"), ("stat", "anon 1\ninactive_file 100")):
        (inner.parent / f"memory.{name}").write_text(text)
    names = ("memory.max", "memory.current", "inactive_file")
    assert list(memory._left(tmp_path, "/site/inner", *names)) == [400]
    assert memory.available_bytes("here") > 0

    def no_descriptor(path: Path) -> NoReturn:
        raise OSError(errno.EMFILE, "Too many open files", str(path))

    monkeypatch.setattr(Path, "read_text", no_descriptor)
    with pytest.raises(OSError, match="Too many open files"):  # it counted as no limit
        list(memory._left(tmp_path, "/site/inner", *names))


NAMES_ITSELF = """\
import ctypes, time
ctypes.CDLL(None).prctl(15, b"\\rRssAnon:\\tx")
print(flush=True)
time.sleep(600)
"""


def test_a_qemu_that_calls_itself_anything_keeps_no_other_from_memory(tmp_path: Path) -> None:
    mark = f"-pidfile\0{tmp_path}/pid"
    argv = [sys.executable, "-I", "-S", "-c", NAMES_ITSELF, *mark.split("\0")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout
            assert holder.stdout.readline() == b"\n"
            given = promise(tmp_path, "one", 600 * MIB, is_private=True)._replace(holder=mark)
            assert ask(tmp_path, given, 1000 * MIB).is_given
            assert ask(tmp_path, promise(tmp_path, "two", 300 * MIB), 1000 * MIB).is_given
        finally:
            holder.kill()
