"""Having the target's kernel find memory for the guest beforehand.

The file that is to be the guest's RAM is empty, and for each page that arrives, one of zeroes too,
the kernel has to find and clear one while the stream waits. Found by another process meanwhile, on
another processor, they are there when the stream comes to them.

Never where a migration may come to post-copy: QEMU waits there for pages that are missing
(userfaultfd), and one that was filled with zeroes is not.
"""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from vmckpt.errors import HostDownError, OutcomeUnknownError
from vmckpt.hosts.host import Host

# Twice what a busy machine here took.
_S_PER_GIB = 10.0


def may_fill(capabilities: Mapping[str, bool]) -> bool:
    """Whether a migration with these capabilities can never come to post-copy."""
    return not capabilities.get("postcopy-ram", False)


class Populating:
    """Fills the holes of the RAM file that the target's QEMU has made, from `start` to `stop`.

    Without it the migration only takes longer: what hinders it is told to `note`.
    """

    def __init__(self, note: Callable[[str, str], None]) -> None:
        self._note = note
        self._task: asyncio.Task[None] | None = None

    def start(self, host: Host, ram: Path, size_bytes: int) -> None:
        """Begin. A file that is not there stays so: the guest's memory is elsewhere then."""
        self._task = asyncio.create_task(self._populate(host, ram, size_bytes))

    async def stop(self) -> None:
        """It has ended, done or not."""
        if self._task:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _populate(self, host: Host, ram: Path, size_bytes: int) -> None:
        limit_s = 10.0 + _S_PER_GIB * size_bytes / 2**30
        words = ["fallocate", "--length", str(size_bytes), str(ram)]
        try:
            if not await host.exists(ram):
                return
            done = await host.run(words, limit_s)
        except (HostDownError, OutcomeUnknownError) as exc:
            self._note("memory", f"{ram} was not filled beforehand: {exc.why}")
            return
        if done.returncode:
            self._note("memory", f"{ram} was not filled beforehand: {done.stderr.strip()}")
