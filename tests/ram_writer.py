"""A process that writes a RAM file when it is told to, as a QEMU does when its guest runs."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile

from vmckpt.memory.ram_file import PAGE_BYTES

PAGES, CARD_PAGES = 1024, 64
# Maps the file at the second page, as a QEMU may; writes or reads the pages it is told. "card":
# writes to memory of its own, as a QEMU does for a graphics card; "drop": gives it back.
WRITER = """
import ctypes, mmap, os, sys
file = open(sys.argv[1], "r+b")
ram = mmap.mmap(file.fileno(), 0)
below = os.open(sys.argv[3], os.O_RDONLY) if sys.argv[3] else -1
card = mmap.mmap(below, int(sys.argv[2]) * 4096, flags=mmap.MAP_PRIVATE)
print(ctypes.addressof(ctypes.c_char.from_buffer(card)), flush=True)
for line in sys.stdin:
    what, *pages = line.split()
    for page in map(int, pages):
        if what == "write":
            ram[page * 4096 + 7] = ram[page * 4096 + 7] ^ 1 | 2
        elif what == "card":
            card[page * 4096 + 7] += 1
        elif what == "drop":
            card.madvise(mmap.MADV_DONTNEED, page * 4096, 4096)
        else:
            ram[page * 4096]
    print("done", flush=True)
"""


class Writer:
    """A process that maps a RAM file; `card` is the address of memory of its own.

    `below`: what that holds before it is written. `words` end its command line.
    """

    def __init__(self, path: Path, below: Path | None = None, words: Sequence[str] = ()) -> None:
        self.path = path
        self.child = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(CARD_PAGES), str(below or ""), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.card = int(self._answer())

    @property
    def pid(self) -> int:
        return self.child.pid

    def does(self, what: str, *pages: int) -> None:
        assert self.child.stdin
        self.child.stdin.write(f"{what} {' '.join(map(str, pages))}\n")
        self.child.stdin.flush()
        self._answer()

    def _answer(self) -> str:
        assert self.child.stdout
        line = self.child.stdout.readline()
        assert line
        return line

    def descriptors(self) -> list[str]:
        return sorted(str(path.readlink()) for path in Path(f"/proc/{self.pid}/fd").iterdir())


@contextmanager
def writing(
    pages: int = PAGES, below: Path | None = None, words: Sequence[str] = ()
) -> Iterator[Writer]:
    """One for the block, whose file has so many pages."""
    with NamedTemporaryFile(dir="/dev/shm", prefix="vk-test-") as file:
        file.truncate(pages * PAGE_BYTES)
        made = Writer(Path(file.name), below, words)
        try:
            yield made
        finally:
            made.child.kill()
            made.child.communicate()
