"""A program: gives a guest that runs already the pages of its memory, from a checkpoint.

    python -I -m vmckpt.checkpoint.pager <socket

A line of JSON comes by the socket for each step, and one goes back:

    {"store", "checkpoint", "key": the file with what opens an encrypted store, or left out}
                                                               -> {"open": pages that are not zero}
    {"pid", "ram_file", "again": null or the descriptor}       -> {"missing": the descriptor}
    {"go": the file that says that pages are missing}          -> nothing

Then pages are served, and all others fetched, until all are there.

Whoever told it may die meanwhile. It lets no signal in and has one thread; the VM's QEMU keeps a
copy of the descriptor (`memory/missing_pages.py`), so were it killed all the same, the guest would
wait for its next page, and another pager can go on. A page that the store does not give as it was
ends the guest: it is killed, never given something else. The file then says why; at the end of all
pages it is removed.
"""

import json
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from vmckpt.errors import OperationFailedError, VmckptError
from vmckpt.memory.missing_pages import MissingPages
from vmckpt.memory.process_call import be_undisturbed
from vmckpt.memory.ram_file import PAGE_BYTES, extents
from vmckpt.store.open import open_store

# Streamed at once between two looks for faults.
PIECE_PAGES = 32
_NICE = 5
# How long nobody may wait for a page before it is looked whether there is news.
IDLE_MS = 1


class Pager:
    """The pages of one guest, from one checkpoint."""

    def __init__(self, area: Any, missing: MissingPages, ram_file: Path, there: np.ndarray) -> None:
        self._area, self._missing, self._ram_file = area, missing, ram_file
        self._wanted = np.zeros(len(there), bool)
        self._wanted[area.numbers()] = True
        self._left = self._wanted & ~there

    def serve(self) -> None:
        """Until all pages are there. Raises VmckptError (the store), OSError (the VM has ended)."""
        self.answer()
        for numbers, contents in self._area.stream():
            self._give(numbers, contents)
        if self._left.any():
            # A stream tells each page once; what came before it is there.
            rest = np.flatnonzero(self._left)
            self._give(rest, self._area.read(rest))
        self.answer()
        self._require_all()
        self._missing.end()

    def _require_all(self) -> None:
        """Every page is really there. Raises OperationFailedError."""
        there = np.zeros(len(self._wanted), bool)
        mark_present(there, self._ram_file)
        if missing := int(np.count_nonzero(self._wanted & ~there)):
            raise OperationFailedError(
                f"{missing} pages of the guest's memory could not be put there",
                why="the kernel took them, and does not have them",
                remedy="restore it with --eager",
            )

    def _give(self, numbers: "np.ndarray", contents: Any) -> None:
        view = memoryview(contents)
        for at in range(0, len(numbers), PIECE_PAGES):
            piece = numbers[at : at + PIECE_PAGES]
            for first, count in _runs(piece):
                start = (at + first) * PAGE_BYTES
                if self._left[piece[first] : piece[first] + count].any():
                    data = view[start : start + count * PAGE_BYTES]
                    self._missing.fill(int(piece[first]) * PAGE_BYTES, data)
            self._left[piece] = False
            self.answer()

    def answer(self, wait_ms: int = 0) -> None:
        """Whoever waits for a page gets it, and what is had along with it."""
        while waited_for := self._missing.faults(wait_ms):
            wait_ms = 0
            along = []
            for offset in waited_for:
                number = offset // PAGE_BYTES
                if not self._wanted[number]:
                    self._missing.zero(offset)
                    continue
                numbers, contents = self._area.read_around(number)
                place = int(np.flatnonzero(numbers == number)[0]) * PAGE_BYTES
                view = memoryview(contents)
                self._missing.fill(offset, view[place : place + PAGE_BYTES])
                self._left[number] = False
                along.append((numbers, view))
            for numbers, view in along:
                for first, count in _runs(numbers):
                    if self._left[numbers[first : first + count]].any():
                        start = first * PAGE_BYTES
                        data = view[start : start + count * PAGE_BYTES]
                        self._missing.fill(int(numbers[first]) * PAGE_BYTES, data)
                self._left[numbers] = False


def _runs(numbers: "np.ndarray") -> Iterator[tuple[int, int]]:
    """Where numbers follow one another: (place of the first, how many)."""
    ends = np.flatnonzero(np.diff(numbers) != 1) + 1
    first = 0
    for end in [*ends.tolist(), len(numbers)]:
        yield first, end - first
        first = end


def main() -> None:
    """Do as the lines say."""
    be_undisturbed()
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    with socket.socket(fileno=os.dup(0)) as told, told.makefile("rw") as lines:
        where = json.loads(lines.readline())
        key = Path(where["key"]) if "key" in where else None
        secret = bytes.fromhex(key.read_text()) if key else None
        with open_store(where["store"], secret).read(where["checkpoint"]) as point:
            area = point.area("ram")
            _say(lines, {"open": len(area.numbers())})
            line = lines.readline()
            if not line:
                return
            vm = json.loads(line)
            ram_file = Path(vm["ram_file"])
            there = np.zeros(ram_file.stat().st_size // PAGE_BYTES, bool)
            if vm["again"] is None:
                missing = MissingPages.begin(vm["pid"], ram_file)
            else:
                missing = MissingPages.again(vm["pid"], ram_file, vm["again"])
                mark_present(there, ram_file)
            _say(lines, {"missing": missing.number})
            pager = Pager(area, missing, ram_file, there)
            # The devices' state touches pages too: served from here on.
            marker = _until_go(told, pager)
            if marker is not None:
                _serve(pager, vm["pid"], marker)
                if key is not None:
                    key.unlink(missing_ok=True)


def _until_go(told: socket.socket, pager: Pager) -> Path | None:
    """Answer faults until all pages are to be fetched; None when that will never be."""
    told.setblocking(False)
    said = ""
    while not said.endswith("\n"):
        try:
            pager.answer(IDLE_MS)
        except ProcessLookupError:
            return None
        try:
            came = told.recv(4096).decode()
        except BlockingIOError:
            continue
        if not came:
            return None
        said += came
    return Path(json.loads(said)["go"])


def _serve(pager: Pager, pid: int, marker: Path) -> None:
    try:
        pidfd = os.pidfd_open(pid)
        os.nice(_NICE)
        pager.serve()
        marker.unlink(missing_ok=True)
    except VmckptError as exc:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        told = json.loads(marker.read_text()) | {"lost": str(exc)}
        marker.write_text(json.dumps(told))
        sys.exit(1)
    except ProcessLookupError:
        marker.unlink(missing_ok=True)


def mark_present(there: "np.ndarray", ram_file: Path) -> None:
    """The pages that have memory."""
    fd = os.open(ram_file, os.O_RDONLY | os.O_CLOEXEC)
    for start, end in extents(fd, len(there) * PAGE_BYTES):
        there[start // PAGE_BYTES : end // PAGE_BYTES] = True
    os.close(fd)


def _say(lines: Any, words: dict[str, Any]) -> None:
    try:
        lines.write(json.dumps(words) + "\n")
        lines.flush()
    except OSError:
        pass  # whoever told it has died


if __name__ == "__main__":
    main()
