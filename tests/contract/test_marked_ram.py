"""A guest's RAM is found in a process by what its first page holds."""

import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from vmckpt.memory.private.marked import find_marked

pytestmark = pytest.mark.contract
SIZE = 8 << 20
# Memory aligned to 2 MiB that begins with a mark, perhaps within a larger piece of memory.
HOLDER = """
import ctypes, mmap, sys
mark, size, before = bytes.fromhex(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
ram = mmap.mmap(-1, before + size + (4 << 20), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
base = ctypes.addressof(ctypes.c_char.from_buffer(ram))
at = -base % (2 << 20) + before
ram[at : at + len(mark)] = mark
print(base + at, flush=True)
sys.stdin.read()
"""


@contextmanager
def holding(mark: bytes, size: int, before: int) -> Iterator[tuple[int, int]]:
    """The pid of a process that has such memory, and the address."""
    words = [sys.executable, "-c", HOLDER, mark.hex(), str(size), str(before)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout
        yield child.pid, int(child.stdout.readline())
        child.kill()


@pytest.mark.parametrize("before", [0, 2 << 20, 64 << 20])
def test_it_is_found_by_its_mark(before: int) -> None:
    mark = secrets.token_bytes(4096)
    with holding(mark, SIZE, before) as (pid, address):
        found = find_marked(pid, SIZE, mark)
        assert found == (address, address + SIZE)
        assert find_marked(pid, SIZE, secrets.token_bytes(4096)) is None
        assert find_marked(pid, SIZE << 10, mark) is None  # no memory is that large


def test_a_process_that_has_ended_has_none() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    with pytest.raises(ProcessLookupError):
        find_marked(child.pid, SIZE, b"mark")
