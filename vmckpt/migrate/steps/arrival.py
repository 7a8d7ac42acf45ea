"""The switchover and after it: run the guest, prove that it is alive, correct its clock."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from vmckpt.deadlines import poll
from vmckpt.errors import OperationFailedError, OutcomeUnknownError, VmckptError
from vmckpt.hosts.processes.process import ProcessId
from vmckpt.migrate.outcome.ends import End
from vmckpt.qemu import commands
from vmckpt.qemu.agent import GuestAgent

RESUME_TIMEOUT_S = 5.0
# A waking guest runs code that is new to its QEMU: under TCG it must be translated, which takes 20
# ms until the first packet. This command's own work can wait that long; on a machine with two
# processors it made that half as long again.
WAKING_S = 0.02
PROGRESS_TIMEOUT_S = 5.0
POLL_S = 0.001


async def resume(destination: End) -> None:
    """Run the guest on the destination. Raises OperationFailedError if it does not run within 5
    s.
    """
    monitor = await destination.monitor()
    with monitor.events("RESUME") as events:
        await commands.cont(monitor)
        # In post-copy the destination may still be loading devices, and runs afterwards.
        while not (state := await commands.query_status(monitor)).running:
            if await events.next(RESUME_TIMEOUT_S) is None:
                raise OperationFailedError(
                    "the destination does not run the VM",
                    why=f"its state is '{state.status}'",
                    remedy="see the destination's stderr.log",
                )


async def let_wake() -> None:
    """Stay idle while the resumed guest does its first work."""
    await asyncio.sleep(WAKING_S)


async def prove_alive(destination: End, process: ProcessId) -> None:
    """Return once a vCPU has made progress since this call.

    Raises OutcomeUnknownError if none does for 5 s: then the source must not be released.
    OperationFailedError: the QEMU has ended.
    """
    monitor = await destination.monitor()
    threads = [cpu.thread_id for cpu in await commands.query_cpus(monitor)]
    paths = [Path(f"/proc/{process.pid}/task/{thread}/schedstat") for thread in threads]
    before = [await destination.host.read_text(path) for path in paths]

    async def has_moved() -> bool:
        now = [await destination.host.read_text(path) for path in paths]
        # A dead QEMU's unreadable state differs too, and proves nothing.
        if not await destination.host.is_alive(process):
            raise OperationFailedError(
                f"the QEMU on {destination.host.name} has ended",
                why="it died after it had taken the guest over",
                remedy="see its stderr.log",
            )
        return now != before

    if not await poll(has_moved, every_s=POLL_S, within_s=PROGRESS_TIMEOUT_S):
        raise OutcomeUnknownError(
            f"'{destination.files.vm_name}' makes no progress on {destination.host.name}",
            why=f"QEMU says that it runs, but no vCPU has moved for {PROGRESS_TIMEOUT_S:g} s",
            remedy="see its console; the source still holds its state from the switchover",
        )


async def announce(destination: End) -> None:
    """Have the destination announce the guest's NICs to the network for 3 s."""
    await commands.announce_self(await destination.monitor())


async def set_clock(destination: End, note: Callable[[str, str], None]) -> None:
    """Correct the guest's clock for the pause; a failure is only noted."""
    try:
        agent = await GuestAgent.connect(await destination.host.connect(destination.files.agent))
        try:
            await agent.set_time()
        finally:
            await agent.close()
    except VmckptError as exc:
        note("clock", f"the guest's clock was not set: {exc.what}: {exc.why}")
