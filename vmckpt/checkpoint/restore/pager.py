"""The pager, a program: gives a running guest the pages of its memory from a checkpoint.

    python -I -m vmckpt.checkpoint.restore.pager <socket

Each step is a line of JSON from the socket, with one line as answer:

    {"store", "checkpoint", "key", "ram_file", "noted"}        -> {"open": pages that are not zero}
    {"pid", "again": null or the descriptor, "private"}        -> {"missing": the descriptor}
    {"go": the file that says that pages are missing}          -> nothing

Then it serves faults and fetches all other pages until the memory is complete. The guest's RAM is
`ram_file`, or, if that is null, `private` memory of QEMU: of each of its blocks the first address
and the one behind the last.
`noted` is a file of page numbers to preload (`first_pages.py`), or null for a pager that replaces
another, and for private memory; `key` is the file with an encrypted store's secret, or missing.

Its parent may die meanwhile. It blocks all signals and has one thread. The VM's QEMU keeps a copy
of the descriptor (`memory/missing_pages.py`): if the pager is killed all the same, the guest waits
for its next page, and another pager can continue. It also waits, for up to ten minutes, while the
store does not answer, or one of its disks cannot read. If the store's content of a page is damaged,
the guest is killed; it never gets other content. The file then says why; it is removed once all
pages are there.

Each page is given once: a page that the guest has returned since (by free page reporting, or a
balloon) is zeroes when it is next used.
"""

import dataclasses
import itertools
import json
import math
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import numpy as np

from vmckpt.checkpoint.restore.first_pages import next_noted, note, put_first, read_noted, runs
from vmckpt.errors import OperationFailedError, StorageError, VmckptError
from vmckpt.memory.missing_pages import AnonymousRam, MissingPages, SharedRam
from vmckpt.memory.process_call import be_undisturbed
from vmckpt.memory.ram_file import PAGE_BYTES, open_fd
from vmckpt.state.durable import replace
from vmckpt.store.errors import DamagedError, UnreadableError
from vmckpt.store.open import Access, open_store

# Streamed between two polls for faults.
PIECE_PAGES = 32
_NICE = 5
# Poll interval for faults when idle.
IDLE_MS = 1
# Note the pages that the guest waits for in this time after it runs.
NOTED_S = 0.5
# Time after the guest runs in which it gets only the pages it waits for.
ALONE_S = 0.15
# Retry interval for a store that does not answer, and how long after the last page to retry.
AGAIN_S, PATIENCE_S = 1.0, 600.0


class PageServer:
    """The pages of one guest, from one checkpoint."""

    def __init__(
        self, area: Any, missing: MissingPages, there: np.ndarray, noted: Sequence[int]
    ) -> None:
        self._area, self._missing = area, missing
        # Noted and preloaded: the guest finds them without a fault.
        self._laid_out = [number for number in noted if 0 <= number < len(there)]
        self._used: set[int] | None = None
        self._left = ~there
        empty = np.ones(len(there), bool)
        empty[area.numbers()] = False
        self._left[empty] = False
        # In the guest's first moments, in order.
        self.waited_for: list[int] = []
        self._began_s = math.inf

    def read_from(self, area: Any) -> None:
        """Load the remaining pages from `area`: the same one, of the reopened store."""
        self._area = area

    @property
    def left(self) -> int:
        """The number of pages still to load."""
        return int(np.count_nonzero(self._left))

    def serve(self) -> None:
        """Serve until all is loaded. Raises VmckptError (the store), OSError (the VM ended)."""
        self._began_s = time.monotonic()
        while time.monotonic() < self._began_s + ALONE_S:
            self.answer(IDLE_MS)
        for numbers, contents in self._area.stream():
            for at in range(0, len(numbers), PIECE_PAGES):
                start, end = at * PAGE_BYTES, (at + PIECE_PAGES) * PAGE_BYTES
                self._give(numbers[at : at + PIECE_PAGES], memoryview(contents)[start:end])
                self.answer()
                if self._used is None and time.monotonic() > self._began_s + NOTED_S:
                    self._used = self._accessed()
        if self._left.any():
            raise OperationFailedError(
                f"{self.left} pages of the guest's memory were not delivered",
                why="the checkpoint lists them, and its stream does not have them",
                remedy="check the store: vmckpt store check",
            )
        self._missing.end()

    def noted(self) -> list[int]:
        """The pages to note for the next time. Raises ProcessLookupError: the VM has ended."""
        used = self._accessed() if self._used is None else self._used
        return next_noted(self._laid_out, self.waited_for, used)

    def _accessed(self) -> set[int]:
        """The preloaded pages that the guest has accessed."""
        accessed = self._missing.accessed([number * PAGE_BYTES for number in self._laid_out])
        return set(itertools.compress(self._laid_out, accessed))

    def answer(self, wait_ms: int = 0) -> None:
        """Serve pages that the guest waits for, and those loaded along with them."""
        while waited_for := self._missing.faults(wait_ms):
            wait_ms = 0
            along = []
            for offset in waited_for:
                number = offset // PAGE_BYTES
                if time.monotonic() < self._began_s + NOTED_S:
                    self.waited_for.append(number)
                if not self._left[number]:
                    self._missing.zero(offset)
                    continue
                numbers, contents = self._area.read_around(number)
                start = int(np.flatnonzero(numbers == number)[0]) * PAGE_BYTES
                self._missing.fill(offset, memoryview(contents)[start : start + PAGE_BYTES])
                self._left[number] = False
                along.append((numbers, memoryview(contents)))
            for numbers, view in along:
                self._give(numbers, view)

    def _give(self, numbers: "np.ndarray", contents: memoryview) -> None:
        """Give those pages that were not given yet."""
        chosen = np.flatnonzero(self._left[numbers])
        for first, count in runs(numbers, chosen):
            data = contents[first * PAGE_BYTES : (first + count) * PAGE_BYTES]
            self._missing.fill(int(numbers[first]) * PAGE_BYTES, data)
            self._left[numbers[first : first + count]] = False


def main() -> None:
    """Follow the orders on the socket."""
    be_undisturbed()
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    with socket.socket(fileno=os.dup(0)) as control, control.makefile("rw") as lines:
        where = json.loads(lines.readline())
        key = Path(where["key"]) if where["key"] else None
        secret = bytes.fromhex(key.read_text()) if key else None
        try:
            with closing(_RamSource(where["store"], secret, where["checkpoint"])) as source:
                _page(control, lines, where, source)
        except VmckptError as exc:
            sys.exit(f"{exc.what}: {exc.why}")


class _RamSource:
    """The RAM of a checkpoint, which is not removed meanwhile. Raises VmckptError."""

    def __init__(self, location: str, secret: bytes | None, checkpoint_id: str) -> None:
        self._location, self._secret, self._checkpoint_id = location, secret, checkpoint_id
        self._opened, self.area = self._open()

    def open_again(self) -> None:
        """Reopen: the connection, or the lock in the store, may have been lost meanwhile.

        Raises VmckptError: nothing has changed.
        """
        before = self._opened
        self._opened, self.area = self._open()
        with suppress(VmckptError):
            before.close()

    def close(self) -> None:
        """Close it."""
        self._opened.close()

    def _open(self) -> tuple[ExitStack, Any]:
        with ExitStack() as opened:
            store = opened.enter_context(open_store(self._location, Access(self._secret)))
            area = opened.enter_context(store.read(self._checkpoint_id)).area("ram")
            return opened.pop_all(), area


def _page(control: socket.socket, lines: Any, where: dict[str, Any], source: _RamSource) -> None:
    area, noted = source.area, where["noted"]
    ram_file = Path(where["ram_file"]) if where["ram_file"] else None
    laid_out = read_noted(Path(noted)) if noted and ram_file else []
    first = put_first(ram_file, area, laid_out) if ram_file else None
    _say(lines, {"open": len(area.numbers())})
    line = lines.readline()
    if not line:
        return
    vm = json.loads(line)
    ram = SharedRam(ram_file) if ram_file else AnonymousRam(tuple((a, b) for a, b in vm["private"]))
    if vm["again"] is None:
        try:
            missing = MissingPages.begin(vm["pid"], ram)
        except OSError as exc:
            sys.exit(exc.strerror or str(exc))
        there = ram.present(vm["pid"])
        if ram_file is not None and first is not None:
            put_right(ram_file, area, there & ~first)
    else:
        missing = MissingPages.again(vm["pid"], ram, vm["again"])
        there = ram.present(vm["pid"])
    _say(lines, {"missing": missing.number})
    pager = PageServer(area, missing, there, laid_out)
    # Loading the devices' state touches pages too: serve from here on.
    marker = _until_go(control, pager)
    if marker is not None:
        _serve(pager, source, vm["pid"], marker)
        if where["key"]:
            Path(where["key"]).unlink(missing_ok=True)
        if noted:
            with suppress(ProcessLookupError):  # its further page faults are unknown
                note(Path(noted), pager.noted())


def _until_go(control: socket.socket, pager: PageServer) -> Path | None:
    """Serve faults until the order to fetch all pages; None: it will not come."""
    control.setblocking(False)
    output = ""
    while not output.endswith("\n"):
        try:
            pager.answer(IDLE_MS)
        except ProcessLookupError:
            return None
        try:
            came = control.recv(4096).decode()
        except BlockingIOError:
            continue
        if not came:
            return None
        output += came
    return Path(json.loads(output)["go"])


def _serve(pager: PageServer, source: _RamSource, pid: int, marker: Path) -> None:
    try:
        pidfd = os.pidfd_open(pid)
        os.nice(_NICE)
        _serve_patiently(pager, source, pidfd)
        marker.unlink(missing_ok=True)
    except VmckptError as exc:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        from vmckpt.checkpoint.restore.paging import (
            MISSING,  # asyncio and hosts, which this program does not need
        )

        missing = MISSING.decode(marker.read_bytes(), marker)
        replace(marker, MISSING.encode(dataclasses.replace(missing, lost=str(exc))))
        sys.exit(1)
    except ProcessLookupError:
        marker.unlink(missing_ok=True)


def _serve_patiently(pager: PageServer, source: _RamSource, pidfd: int) -> None:
    """Serve; while the store does not answer the guest waits. Raises as `PageServer.serve`."""
    left, since_s = pager.left, time.monotonic()
    while True:
        try:
            pager.serve()
            return
        except StorageError as exc:
            is_damaged = isinstance(exc, DamagedError) and not isinstance(exc, UnreadableError)
            if pager.left < left:
                left, since_s = pager.left, time.monotonic()
            if is_damaged or time.monotonic() > since_s + PATIENCE_S:
                raise
            sys.stderr.write(f"retrying: {exc.what}: {exc.why}\n")
        if select.select([pidfd], [], [], AGAIN_S)[0]:
            raise ProcessLookupError
        with suppress(VmckptError, OSError):  # no answer yet
            source.open_again()
            pager.read_from(source.area)


def put_right(ram_file: Path, area: Any, written: "np.ndarray") -> None:
    """Restore pages that QEMU itself has written: no guest runs yet."""
    with open_fd(os.open(ram_file, os.O_RDWR | os.O_CLOEXEC)) as fd:
        for number in np.flatnonzero(written).tolist():
            os.pwrite(fd, area.read(np.array([number])), number * PAGE_BYTES)


def _say(lines: Any, words: dict[str, Any]) -> None:
    with suppress(OSError):  # its parent has died
        lines.write(json.dumps(words) + "\n")
        lines.flush()


if __name__ == "__main__":
    main()
