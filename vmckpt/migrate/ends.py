"""The two QEMUs of a migration: looking at both, and acting until one place has the guest."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vmckpt.errors import HostDownError, OutcomeUnknownError
from vmckpt.hosts.host import Host
from vmckpt.migrate.ownership import Move, Side, View, decide
from vmckpt.qemu import commands
from vmckpt.qemu.monitor import CommandRefusedError, Monitor
from vmckpt.vm.paths import QemuDir
from vmckpt.vm.start import end_qemu

LOOK_TIMEOUT_S = 3.0
POLL_S = 0.01
# QEMU's trace line for vCPUs starting; it stands in the log before the first guest instruction.
RAN_MARK = "vm_state_notify running 1"
ENDINGS = frozenset({Move.SOURCE_OWNS, Move.TARGET_OWNS, Move.LOST, Move.UNKNOWN})


class End:
    """One QEMU of the pair, reached through its operator monitor; reconnects when that was lost."""

    def __init__(self, host: Host, files: QemuDir) -> None:
        self.host, self.files = host, files
        self._monitor: Monitor | None = None

    @property
    def label(self) -> str:
        """For errors."""
        return f"{self.files.vm_name} on {self.host.name}"

    @property
    def alive(self) -> bool:
        """Whether its process runs."""
        return bool(self.host.find_processes(self.files.mark))

    @property
    def ever_ran(self) -> bool:
        """Whether its vCPUs have ever run, by its own log, which outlives it."""
        return RAN_MARK in (self.host.read_text(self.files.stderr) or "")

    async def monitor(self) -> Monitor:
        """The open session. Raises HostDownError when QEMU cannot be reached."""
        if self._monitor is None or not self._monitor.is_open:
            await self.close()
            sock = await self.host.connect(self.files.operator)
            self._monitor = await Monitor.connect(sock, self.label, LOOK_TIMEOUT_S)
        return self._monitor

    async def close(self) -> None:
        """Drop the session; the guest does not notice."""
        if self._monitor is not None:
            monitor, self._monitor = self._monitor, None
            await monitor.close()

    async def look(self) -> Side:
        """How this end is, by its monitor, its process and its log. A dead QEMU is an answer."""
        try:
            monitor = await self.monitor()
            run = await commands.query_status(monitor, LOOK_TIMEOUT_S)
            migration = await commands.query_migrate(monitor, LOOK_TIMEOUT_S)
        except HostDownError:
            await self.close()
            return Side(self.alive, ever_ran=self.ever_ran)
        return Side(True, run, migration, self.ever_ran)

    async def yank(self) -> bool:
        """Cut the migration's sockets, through the rescue monitor: it works while QEMU is stuck."""
        try:
            sock = await self.host.connect(self.files.rescue)
            rescue = await Monitor.connect(sock, self.label, LOOK_TIMEOUT_S)
        except HostDownError:
            return False
        try:
            return await commands.yank_migration(rescue)
        except OutcomeUnknownError:
            return False
        finally:
            await rescue.close()


@dataclass(frozen=True, slots=True)
class Pair:
    """Source and target of one migration. `ram_dir` is where the target's RAM file stands."""

    source: End
    target: End
    was_running: bool
    ram_dir: Path

    async def view(self) -> View:
        """Both ends, looked at concurrently."""
        source, target = await asyncio.gather(self.source.look(), self.target.look())
        return View(source, target, self.was_running)

    async def close(self) -> None:
        """Drop both sessions."""
        await asyncio.gather(self.source.close(), self.target.close())


async def settle(pair: Pair, note: Callable[[str], None], timeout_s: float = 30.0) -> Move:
    """Give the migration up, or let it end if it is too late, until one place has the guest.

    Returns SOURCE_OWNS, TARGET_OWNS, LOST or UNKNOWN (an end gave no answer for `timeout_s`; then
    nothing was done that could make the guest run twice). `note` is told every move.
    """
    clock = asyncio.get_running_loop().time
    deadline = clock() + timeout_s
    last: Move | None = None
    sent_bytes = 0
    while True:
        view = await pair.view()
        move = decide(view)
        if view.source.migration and view.source.migration.transferred_bytes != sent_bytes:
            # Post-copy under way takes as long as it takes.
            sent_bytes, deadline = view.source.migration.transferred_bytes, clock() + timeout_s
        late = clock() > deadline
        if move in ENDINGS - {Move.UNKNOWN}:
            return move
        if late:
            return Move.UNKNOWN
        if move is not last and move not in (Move.WAIT, Move.UNKNOWN):
            note(move.value)
        await _act(move, pair, repeated=move is last)
        last = move
        await asyncio.sleep(POLL_S)


async def _act(move: Move, pair: Pair, *, repeated: bool) -> None:
    """One move; a refusal or a lost monitor shows in the next look."""
    try:
        match move:
            case Move.CANCEL:
                await commands.migrate_cancel(await pair.source.monitor(), LOOK_TIMEOUT_S)
            case Move.RUN_TARGET:
                await commands.cont(await pair.target.monitor())
            case Move.RUN_SOURCE:
                await commands.cont(await pair.source.monitor())
            case Move.KILL_TARGET:
                await pair.target.close()
                await kill(pair.target)
            case Move.YANK if not repeated:
                await pair.source.yank()
            case _:
                pass
    except (CommandRefusedError, OutcomeUnknownError, HostDownError):
        await asyncio.sleep(POLL_S)


async def kill(end: End) -> None:
    """End a QEMU for certain, keeping its files (its log says whether it ever ran)."""
    for process in end.host.find_processes(end.files.mark):
        await end.host.kill(process)


async def discard(end: End, ram_dir: Path) -> None:
    """End a QEMU and remove its files."""
    await end.close()
    await end_qemu(end.host, ram_dir, end.files)
