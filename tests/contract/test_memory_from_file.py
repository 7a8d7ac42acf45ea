"""A process's memory gets the content of a file, which it shares until it writes."""

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.contract.test_userfaultfd import CONFINED
from vmckpt.memory.missing_pages import AnonymousRam
from vmckpt.memory.private.backing import held_by_files
from vmckpt.memory.private.from_file import give_content
from vmckpt.memory.process_call import map_there

pytestmark = [
    pytest.mark.contract,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may trace another user's process"),
]
SIZE, PAGE = 4 << 20, 4096
NOBODY = "65534"
NOWHERE = AnonymousRam(((1 << 30, (1 << 30) + SIZE),))
# Has memory full of "a". Then, for each line: the content of two pages; a line "w" writes one.
HOLDER = """
import ctypes, mmap, sys
ram = mmap.mmap(-1, int(sys.argv[1]), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
ram[:] = b"a" * len(ram)
print(ctypes.addressof(ctypes.c_char.from_buffer(ram)), flush=True)
for line in sys.stdin:
    if line == "w\\n":
        ram[:4096] = b"w" * 4096
    print(ram[:4096].hex(), ram[4096:8192].hex(), flush=True)
"""


class Holder:
    """The process; `ram` is where its memory is."""

    def __init__(self, child: "subprocess.Popen[str]") -> None:
        self.child, self.pid = child, child.pid
        self.start = int(self._line())
        self.ram = AnonymousRam(((self.start, self.start + SIZE),))

    def _line(self) -> str:
        assert self.child.stdout
        return self.child.stdout.readline()

    def pages(self, word: str = "r") -> list[bytes]:
        assert self.child.stdin
        self.child.stdin.write(f"{word}\n")
        self.child.stdin.flush()
        return [bytes.fromhex(one) for one in self._line().split()]

    @property
    def flags(self) -> set[str]:
        text = Path(f"/proc/{self.pid}/smaps").read_text()
        return set(text.split(f"\n{self.start:x}-")[1].split("VmFlags:")[1].split("\n")[0].split())


@contextmanager
def holder(*become: str) -> Iterator[Holder]:
    words = [*become, sys.executable, "-I", "-S", "-c", HOLDER.replace("\\\\", "\\"), str(SIZE)]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/"
    ) as child:
        try:
            yield Holder(child)
        finally:
            child.kill()


@pytest.fixture
def content() -> Iterator[Path]:
    """A file in a directory of its own that no other user may enter."""
    directory = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        path = directory / "ram"
        path.touch(0o600)
        path.write_bytes(secrets.token_bytes(PAGE))
        os.truncate(path, SIZE)
        yield path
    finally:
        shutil.rmtree(directory)


def is_private(path: Path) -> bool:
    modes = [one.stat().st_mode & 0o777 for one in (path.parent, path)]
    return modes == [0o700, 0o600] and path.stat().st_uid == os.geteuid()


@pytest.mark.parametrize("become", [(), ("setpriv", f"--reuid={NOBODY}", "--clear-groups")])
def test_the_content_is_the_files_until_it_is_written(content: Path, become: list[str]) -> None:
    first = content.read_bytes()[:PAGE]
    with holder(*become) as one, holder(*become) as two:
        for each in (one, two):
            assert each.pages() == [b"a" * PAGE] * 2
            give_content(each.pid, each.ram, content)
            assert is_private(content)
            assert each.pages() == [first, bytes(PAGE)]
            assert {"dc", "dd"} <= each.flags  # as QEMU has it
            assert sorted(os.listdir(f"/proc/{each.pid}/fd")) == ["0", "1", "2"]
        assert one.pages("w") == [b"w" * PAGE, bytes(PAGE)]
        assert two.pages() == [first, bytes(PAGE)]
        assert content.read_bytes()[:PAGE] == first
        # What it only read is found as well, though nothing has the file open.
        content.unlink()
        span = one.start, one.start + SIZE
        assert held_by_files(one.pid, span) == [(span[0], span[0] + 2 * PAGE)]


@pytest.mark.parametrize("become", [(), ("setpriv", f"--reuid={NOBODY}", "--clear-groups")])
def test_a_file_that_is_shared_is_the_memory_of_both(content: Path, become: list[str]) -> None:
    """What a standby writes into it is its waiting guest's."""
    with holder(*become) as one:
        give_content(one.pid, one.ram, content, shared=True)
        assert is_private(content)
        assert one.pages("w") == [b"w" * PAGE, bytes(PAGE)]
        with content.open("r+b") as file:
            assert file.read(PAGE) == b"w" * PAGE
            file.write(b"s" * PAGE)
        assert one.pages() == [b"w" * PAGE, b"s" * PAGE]
        content.unlink()
        assert one.pages() == [b"w" * PAGE, b"s" * PAGE]


def test_while_it_is_opened_its_user_may_read_the_file_and_nobody_may_write_it(
    content: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file was that user's for a moment: one of its QEMUs could keep it open for writing."""
    found = list[str]()

    def tried(user: str, *words: str) -> str:
        command = ["setpriv", f"--reuid={user}", "--clear-groups", *words, str(content)]
        done = subprocess.run(command, check=False, capture_output=True)
        return f"{words[0]} {done.returncode == 0}"

    def trying(*_: object, **__: object) -> "subprocess.CompletedProcess[str]":
        monkeypatch.undo()
        owner = ("cat",), ("chmod", "666"), ("truncate", "-s0"), ("rm", "-f")
        found.extend(tried(NOBODY, *words) for words in owner)
        found.append(tried("65533", "cat"))
        return subprocess.CompletedProcess([], 0, "0", "")

    with holder("setpriv", f"--reuid={NOBODY}", "--clear-groups") as one:
        monkeypatch.setattr(subprocess, "run", trying)
        give_content(one.pid, one.ram, content)
    assert found == ["cat True", "chmod False", "truncate False", "rm False", "cat False"]
    assert is_private(content)


def test_several_blocks_have_it_one_after_the_other(content: Path) -> None:
    """The file's first page is the last block's."""
    with holder() as one:
        half = one.start + SIZE // 2
        content.write_bytes(b"1" * (SIZE // 2) + b"2" * (SIZE // 2))
        give_content(one.pid, AnonymousRam(((half, one.start + SIZE), (one.start, half))), content)
        assert one.pages() == [b"2" * PAGE] * 2
        held = [(half, one.start + SIZE), (one.start, half)]
        assert [held_by_files(one.pid, span) for span in held] == [[span] for span in held]


@pytest.mark.parametrize(("call", "name"), [(2, "open"), (9, "mmap"), (28, "madvise")])
def test_a_filter_that_forbids_it_is_read_and_nothing_was_changed(
    content: Path, call: int, name: str
) -> None:
    command = [sys.executable, "-c", CONFINED, "1", str(call), "-sandbox", "on"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout
            assert child.stdout.readline() == b"ready\n"
            with pytest.raises(OSError, match=f"does not allow {name}"):
                give_content(child.pid, NOWHERE, content)
            assert child.poll() is None
        finally:
            child.kill()
    assert is_private(content)


def test_a_process_that_does_not_see_the_file_keeps_its_memory(content: Path) -> None:
    """As a QEMU whose libvirtd gave it a /dev of its own."""
    apart = ["unshare", "--mount", "--propagation", "private", "sh", "-c"]
    script = 'mount -t tmpfs none /dev/shm && exec "$@"'
    with holder(*apart, script, "sh") as one:
        with pytest.raises(FileNotFoundError):
            give_content(one.pid, one.ram, content)
        assert one.pages() == [b"a" * PAGE] * 2
    assert is_private(content)


def test_one_that_has_ended_has_no_memory(content: Path) -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    with pytest.raises(FileNotFoundError):
        give_content(child.pid, NOWHERE, content)
    assert is_private(content)


def test_a_path_that_has_no_room_below_the_stack_is_refused() -> None:
    with pytest.raises(OSError, match="name too long"):
        map_there(1, Path("/" + "x" * 900), [(0, PAGE)], ())
