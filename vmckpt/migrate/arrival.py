"""After the switch: the guest is proved alive, the network told, and its clock put right."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from vmckpt.errors import OperationFailedError, OutcomeUnknownError, VmckptError
from vmckpt.hosts.process import ProcessId
from vmckpt.migrate.ends import End
from vmckpt.qemu import commands
from vmckpt.qemu.agent import GuestAgent

PROGRESS_TIMEOUT_S = 5.0
POLL_S = 0.003


async def prove_alive(target: End, process: ProcessId) -> None:
    """Return when a vCPU has got on since this was called.

    Raises OutcomeUnknownError when none does for 5 s: then the source must not be let go.
    OperationFailedError: the QEMU has ended.
    """
    monitor = await target.monitor()
    threads = [cpu.thread_id for cpu in await commands.query_cpus(monitor)]
    paths = [Path(f"/proc/{process.pid}/task/{thread}/schedstat") for thread in threads]
    before = [await target.host.read_text(path) for path in paths]
    deadline = asyncio.get_running_loop().time() + PROGRESS_TIMEOUT_S
    while True:
        now = [await target.host.read_text(path) for path in paths]
        # What a QEMU that died leaves unreadable differs too, and proves nothing.
        if not await target.host.is_alive(process):
            raise OperationFailedError(
                f"the QEMU on {target.host.name} has ended",
                why="it died after it had taken the guest over",
                remedy="see its stderr.log",
            )
        if now != before:
            return
        if asyncio.get_running_loop().time() > deadline:
            raise OutcomeUnknownError(
                f"'{target.files.vm_name}' does not get on at {target.host.name}",
                why=f"QEMU says that it runs, but no vCPU has moved for {PROGRESS_TIMEOUT_S:g} s",
                remedy="look at its console; the source still holds its state from the switchover",
            )
        await asyncio.sleep(POLL_S)


async def announce(target: End) -> None:
    """Have the target tell the network for 3 s where the guest's NICs are now."""
    await commands.announce_self(await target.monitor())


async def set_clock(target: End, note: Callable[[str, str], None]) -> None:
    """Put the guest's clock right, which stood still with the guest; a failure is only noted."""
    try:
        agent = await GuestAgent.connect(await target.host.connect(target.files.agent))
        try:
            await agent.set_time()
        finally:
            await agent.close()
    except VmckptError as exc:
        note("clock", f"the guest's clock was not put right: {exc.what}: {exc.why}")
