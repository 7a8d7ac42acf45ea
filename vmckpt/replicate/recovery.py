"""After the death of the primary's service: the guest is the standby's, or goes on here alone.

Run by the dead-man's switch. The guard has let the guest run on, its output held. The standby had
the news first, and takes over at once, if it can: so nothing is done here before the dead service's
lease has ended.
"""

import asyncio
import json
from contextlib import suppress
from pathlib import Path

from vmckpt.epoch.capture import VCPU_TRACE
from vmckpt.epoch.guard import STOPPED_FOR_AN_EPOCH
from vmckpt.epoch.guarding import guard_command
from vmckpt.epoch.output import HeldOutput, holds_output
from vmckpt.errors import BusyError, RefusedError, VmckptError
from vmckpt.lease.lease import Lease
from vmckpt.lease.record import Span
from vmckpt.lease.rule import Claimant
from vmckpt.qemu import commands
from vmckpt.qemu.monitor import CommandRefusedError, session
from vmckpt.replicate.arbiter import open_arbiter
from vmckpt.replicate.request import Files, Request, read_request
from vmckpt.replicate.stale import remove_stale_home
from vmckpt.sequence.steps import finish
from vmckpt.vm.inventory import Vm, read_vm
from vmckpt.vm.lifecycle import owner
from vmckpt.vm.paths import lock_path

POLL_S, LOCK_S, CONT_POLLS = 0.1, 30.0, 1000


async def recover(directory: Path) -> None:
    """Settle where the guest goes on. Raises what keeps it from doing so."""
    request, files = read_request(directory), Files(directory)
    host = request.primary
    lock = lock_path(host.state_dir, request.vm)
    given_up_s = asyncio.get_running_loop().time() + LOCK_S
    while True:
        try:
            async with host.lock(lock, owner("replicate --recover", request.run)):
                await _settle(request, files)
                return
        except BusyError:
            if asyncio.get_running_loop().time() > given_up_s:
                raise
        await asyncio.sleep(POLL_S)


async def _settle(request: Request, files: Files) -> None:
    vm = await read_vm(request.primary, request.vm)
    if vm is None:
        return  # the standby has taken over, and removed what was here
    if await _takes_term(request):
        for process in await vm.host.find_processes("\0".join(guard_command(vm.qemu))):
            await vm.host.kill(process)
        if await vm.is_alive():
            await finish(_free(vm))
        said = "alone: the primary's service died, and the standby did not take over"
    else:
        await remove_stale_home(vm.host, vm.name, request.qemu_id)
        said = "replaced: the standby has taken over; this QEMU was ended"
    status = json.loads(files.status.read_text()) if files.status.exists() else {}
    about = {"role": "primary", "vm": vm.name, "run": request.run, "state": "ended", "why": said}
    await request.primary.write_text(files.status, json.dumps(status | about))


async def _takes_term(request: Request) -> bool:
    """Wait until it is clear who goes on; True when it is this side."""
    dead = f"{request.primary.name}/{request.run}"
    claimant = Claimant(f"{dead}/recovery", succeeds=dead)
    store, span = open_arbiter(request.options.arbiter), Span(request.options.lease_s)
    lease = Lease(store, request.vm, claimant, span)
    while True:
        with suppress(VmckptError):  # the lease may still run, or the arbiter be silent
            seen = await lease.look()
            if seen is not None and seen.now.record.holder != dead:
                return seen.now.record.holder == claimant.name
            with suppress(RefusedError):
                await lease.take()
                return True
        await asyncio.sleep(POLL_S)


async def _free(vm: Vm) -> None:
    """Let its output go, put QEMU's settings back, and let it run."""
    async with session(await vm.host.connect(vm.qemu.files.operator), vm.name) as monitor:
        await HeldOutput(monitor, await holds_output(monitor)).let_go()
        for _ in range(CONT_POLLS):
            state = await commands.query_status(monitor)
            if state.status not in STOPPED_FOR_AN_EPOCH:
                break
            with suppress(CommandRefusedError):  # QEMU is still ending what the epoch began
                await commands.cont(monitor)
            await asyncio.sleep(0.005)
        await commands.migrate_set_capabilities(monitor, {"x-ignore-shared": False})
        await commands.trace(monitor, VCPU_TRACE, enabled=True)
