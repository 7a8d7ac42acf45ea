"""Memory that is loaded while the guest runs: the pager's process, seen from outside."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeVar

from vmckpt.errors import OperationFailedError, StorageError, VmLostError
from vmckpt.hosts.host import Host
from vmckpt.hosts.processes.process import ProcessId, identify
from vmckpt.memory.missing_pages import AnonymousRam
from vmckpt.sequence.in_thread import in_thread
from vmckpt.sequence.steps import finish
from vmckpt.state.documents import Schema, load_from, save_to
from vmckpt.vm.paths import QemuDir
from vmckpt.vm.record import Qemu

T = TypeVar("T")
ANSWER_S, POLL_S = 30.0, 0.02


@dataclass(frozen=True, slots=True)
class Missing:
    """missing.json, while memory of a QEMU is being loaded: from where, by whom, into what.

    The guest's RAM is `ram_file`, or else `private` memory of QEMU. `key` is the file with the
    store's secret, `descriptor` the number of the userfaultfd in QEMU, `lost` why a page could not
    be loaded. `qemu`: the process, if no record of a VM names it (a domain's).
    """

    store: str
    checkpoint: str
    ram_file: Path | None = None
    key: Path | None = None
    descriptor: int | None = None
    pager: ProcessId | None = None
    lost: str | None = None
    private: AnonymousRam | None = None
    qemu: ProcessId | None = None


MISSING = Schema(
    Missing,
    "vmckpt vm stop {directory.parent.name} --force, and restore its checkpoint again",
    omits_none=True,
)


class PagerProcess:
    """A pager's process, and the orders to it."""

    def __init__(
        self,
        process: "subprocess.Popen[bytes]",
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        log: Path,
        missing: Missing,
    ) -> None:
        self._process, (self._reader, self._writer), self._log = process, streams, log
        self._missing = missing

    @classmethod
    async def start(
        cls,
        location: str,
        checkpoint_id: str,
        log: Path,
        ram_file: Path | None,
        *,
        noted: Path | None = None,
        key: Path | None = None,
    ) -> Self:
        """Start a pager, which opens the checkpoint concurrently; see `opened`. Raises OSError.

        The pages in `noted` (see `first_pages.py`) are put into the RAM file before it is used;
        without such a file `attach` says where the memory is.
        `key` opens an encrypted store (`checkpoint/secret.py`); it is removed with the last page.
        """
        ours, theirs = socket.socketpair()
        with theirs, log.open("ab") as words, _signals_blocked():
            process = subprocess.Popen(  # noqa: ASYNC220 - it does not wait for anything
                [sys.executable, "-I", "-m", "vmckpt.checkpoint.restore.pager"],
                stdin=theirs.fileno(),
                stdout=words,
                stderr=words,
                start_new_session=True,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            )
        ours.setblocking(False)
        missing = Missing(location, checkpoint_id, ram_file, key)
        pager = cls(process, await asyncio.open_connection(sock=ours), log, missing)
        pager._tell(
            {
                "store": location,
                "checkpoint": checkpoint_id,
                "ram_file": str(ram_file) if ram_file else None,
                "noted": str(noted) if noted else None,
                "key": str(key) if key else None,
            }
        )
        return pager

    async def opened(self) -> None:
        """Wait until it has opened the checkpoint. Raises OperationFailedError."""
        await self._answer()

    async def attach(
        self, pid: int, again: int | None = None, *, private: AnonymousRam | None = None
    ) -> None:
        """From here on the QEMU of that pid waits at missing pages, and the pager serves them.

        Raises OperationFailedError.
        """
        self._tell({"pid": pid, "again": again, "private": private and private.blocks})
        answer = await self._answer()
        self._missing = replace(
            self._missing,
            descriptor=answer["missing"],
            pager=identify(self._process.pid),
            private=private,
            qemu=identify(pid) if private else None,
        )

    async def go(self, host: Host, files: QemuDir) -> None:
        """Fetch all other pages too, even if this process dies. Raises StorageError."""
        await save_to(host, files.missing, MISSING, self._missing)
        self._tell({"go": str(files.missing)})

    async def ended(self) -> int:
        """Wait for its end; returns the exit status."""
        status = await in_thread(self._process.wait)
        self._writer.close()
        return status

    async def alive_during(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work`, which may wait for pages. Raises OperationFailedError if the pager dies."""
        waiting, working = asyncio.ensure_future(self.ended()), asyncio.ensure_future(work)
        try:
            await asyncio.wait({waiting, working}, return_when=asyncio.FIRST_COMPLETED)
            if working.done() or waiting.result() == 0:  # it has loaded everything, or QEMU ended
                return await working
            raise OperationFailedError(
                "the guest's memory could not be read",
                why=self._last_words() or "its pager was killed",
                remedy="`vmckpt checkpoint verify` says whether the checkpoint is intact",
            )
        finally:
            for task in (waiting, working):
                task.cancel()
            await asyncio.wait({waiting, working})

    async def end(self) -> None:
        """End a pager that serves no guest yet, or whose VM is being ended."""
        self._writer.close()
        with suppress(ProcessLookupError):
            self._process.kill()
        await self.ended()

    def _tell(self, words: dict[str, Any]) -> None:
        self._writer.write(json.dumps(words).encode() + b"\n")

    async def _answer(self) -> dict[str, Any]:
        try:
            async with asyncio.timeout(ANSWER_S):
                line = await self._reader.readline()
            answer: dict[str, Any] = json.loads(line)
        except (OSError, TimeoutError, ValueError) as exc:
            raise OperationFailedError(
                "the pager did not start",
                why=self._last_words() or str(exc) or "it did not answer",
                remedy="restore with --eager, or verify the checkpoint: vmckpt checkpoint verify",
            ) from exc
        return answer

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Processes started in the block have all signals blocked from their first moment.

    That includes threads that imported libraries start.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


async def is_whole(host: Host, qemu: Qemu) -> bool:
    """Whether a QEMU's memory is complete. Raises VmLostError: a page could not be loaded."""
    try:
        missing = await load_from(host, qemu.files.missing, MISSING)
    except StorageError:
        if not await host.is_alive(qemu.process):
            return True  # the missing memory is gone with QEMU
        raise
    if missing is None:
        return True
    if missing.lost is not None:
        raise VmLostError(
            f"'{qemu.files.vm_name}' was ended: a page of its memory could not be read",
            why=missing.lost,
            remedy="restore another checkpoint; `vmckpt checkpoint verify` says which are intact",
        )
    return False


async def see_to_pages(host: Host, qemu: Qemu) -> None:
    """Wait until a QEMU's memory is complete; replace a pager that died.

    Raises VmLostError, OperationFailedError.
    """
    while not await is_whole(host, qemu) and await host.is_alive(qemu.process):
        missing = await load_from(host, qemu.files.missing, MISSING)
        if missing and not (missing.pager and await host.is_alive(missing.pager)):
            log = qemu.files.path / "pager.log"
            where = missing.store, missing.checkpoint, log, missing.ram_file
            successor = await PagerProcess.start(*where, key=missing.key)
            try:
                await successor.opened()
                await successor.attach(
                    qemu.process.pid, missing.descriptor, private=missing.private
                )
                await successor.go(host, qemu.files)
            except BaseException:
                await finish(successor.end())
                raise
            await successor.ended()
        await asyncio.sleep(POLL_S)
