"""At the switch and after it: the guest runs, is proved alive, and its clock is put right."""

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
# What a guest does when it wakes up is new to its QEMU: under TCG it is translated anew, and takes
# 20 ms until its first packet. What this command has to do then can wait for so long; it made that
# half as long again on a machine with two processors.
WAKING_S = 0.02
PROGRESS_TIMEOUT_S = 5.0
POLL_S = 0.001


async def resume(target: End) -> None:
    """Have the target run the guest. Raises OperationFailedError when it does not within 5 s."""
    monitor = await target.monitor()
    with monitor.events("RESUME") as events:
        await commands.cont(monitor)
        # In post-copy the target may still be loading devices, and runs when it has.
        while not (state := await commands.query_status(monitor)).running:
            if await events.next(RESUME_TIMEOUT_S) is None:
                raise OperationFailedError(
                    "the target does not run the VM",
                    why=f"its state is '{state.status}'",
                    remedy="see the target's stderr.log",
                )


async def let_wake() -> None:
    """Keep still while the guest, that has just been resumed, does its first work."""
    await asyncio.sleep(WAKING_S)


async def prove_alive(target: End, process: ProcessId) -> None:
    """Return when a vCPU has got on since this was called.

    Raises OutcomeUnknownError when none does for 5 s: then the source must not be let go.
    OperationFailedError: the QEMU has ended.
    """
    monitor = await target.monitor()
    threads = [cpu.thread_id for cpu in await commands.query_cpus(monitor)]
    paths = [Path(f"/proc/{process.pid}/task/{thread}/schedstat") for thread in threads]
    before = [await target.host.read_text(path) for path in paths]

    async def has_moved() -> bool:
        now = [await target.host.read_text(path) for path in paths]
        # What a QEMU that died leaves unreadable differs too, and proves nothing.
        if not await target.host.is_alive(process):
            raise OperationFailedError(
                f"the QEMU on {target.host.name} has ended",
                why="it died after it had taken the guest over",
                remedy="see its stderr.log",
            )
        return now != before

    if not await poll(has_moved, every_s=POLL_S, within_s=PROGRESS_TIMEOUT_S):
        raise OutcomeUnknownError(
            f"'{target.files.vm_name}' does not get on at {target.host.name}",
            why=f"QEMU says that it runs, but no vCPU has moved for {PROGRESS_TIMEOUT_S:g} s",
            remedy="look at its console; the source still holds its state from the switchover",
        )


async def announce(target: End) -> None:
    """Have the target tell the network for 3 s where the guest's NICs are now."""
    await commands.announce_self(await target.monitor())


async def set_clock(target: End, note: Callable[[str, str], None]) -> None:
    """Correct the guest's clock for the pause; a failure is only noted."""
    try:
        agent = await GuestAgent.connect(await target.host.connect(target.files.agent))
        try:
            await agent.set_time()
        finally:
            await agent.close()
    except VmckptError as exc:
        note("clock", f"the guest's clock was not put right: {exc.what}: {exc.why}")
