"""A guard's command: run here, on the VM's host, or in the guest."""

import asyncio
import os
import subprocess
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from vmckpt.codec import convert
from vmckpt.drivers.driver import Driver
from vmckpt.errors import HostDownError, OperationFailedError, VmckptError
from vmckpt.fleet.guard.ending import END_S, Left
from vmckpt.fleet.guard.health import as_variable, variables
from vmckpt.fleet.guard.record import GuardRecord, GuardWorker, Where
from vmckpt.fleet.guard.worker import KILL_S, RESULT, CommandResult
from vmckpt.foreign import MalformedError, parse
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory.inventory import local_host
from vmckpt.sequence.steps import finish

POLL_S, HERE_POLL_S = 0.1, 0.02
GUEST_POLL_S = 0.5
# A rebooting guest has no agent for a while; one that does not come back is a failure.
AGENT_SILENT_S = 120.0
WORK_DIRECTORY = "guarded"
# On a host, shown output is freed in steps of this size.
SHOWN_BYTES = 16 << 20
WORKER_MODULE, ENDING_MODULE = "vmckpt.fleet.guard.worker", "vmckpt.fleet.guard.ending"

# Records the worker before it exists.
Begun = Callable[[GuardWorker], Awaitable[None]]
Print = Callable[[str], None]


async def run_command(
    vm: Driver, record: GuardRecord, begun: Begun, say: Print, output: int
) -> str:
    """Run it to its end; returns why it failed, or "".

    Processes that it leaves running stay until `end_worker`, or permanently after `release_worker`.
    Its output goes to descriptor `output` if it runs here, otherwise to `say`. It is ended with all
    its processes on a timeout or cancellation.
    """
    request = record.request
    try:
        async with asyncio.timeout(request.command_timeout_s):
            match request.where:
                case Where.HERE:
                    return await _here(vm, record, begun, output)
                case Where.HOST:
                    return await _on_host(vm.host, record, begun, say)
                case Where.GUEST:
                    return await _in_guest(vm, request.command, say)
    except TimeoutError:
        return f"the command did not end within {request.command_timeout_s:g} s"
    except VmckptError as exc:
        return str(exc)
    except MalformedError as exc:
        return f"how the command ended is not known: {exc}"


def _worker_command(own: list[str], result: Path, command: tuple[str, ...]) -> list[str]:
    # By its module: vmckpt's whole command line takes 80 ms more.
    return [own[0], "-m", WORKER_MODULE, str(result), *command]


async def _here(vm: Driver, record: GuardRecord, begun: Begun, output: int) -> str:
    host = local_host()
    own = await host.own_command()
    directory = await _directory(host, record)
    worker = GuardWorker(host.name, str(directory))
    await begun(worker)
    try:
        command = _worker_command(own, directory / RESULT, record.request.command)
        child = _begin_here(command, environment(record, vm.host.name), output)
        while True:
            over = child.returncode is not None  # in this order: it writes the result, then it ends
            if (text := await host.read_text(directory / RESULT)) or over:
                return _verdict(text)
            await asyncio.sleep(HERE_POLL_S)
    except BaseException:
        await finish(end_worker(host, worker))
        raise


def _begin_here(
    command: list[str], environ: Mapping[str, str], output: int
) -> "subprocess.Popen[bytes]":
    """In the terminal's foreground, as the command would be without its workers."""
    child = subprocess.Popen(command, stdout=output, env=environ)
    # It may outlive this guard, and is reaped if it does not.
    threading.Thread(target=child.wait, daemon=True).start()
    return child


async def _on_host(host: Host, record: GuardRecord, begun: Begun, say: Print) -> str:
    directory = await _directory(host, record)
    result, log = directory / RESULT, directory / "output"
    own = await host.own_command()
    command = _worker_command(own, result, record.request.command)
    worker, told_bytes, freed_bytes = GuardWorker(host.name, str(directory)), 0, 0
    await begun(worker)
    try:
        process = await host.spawn(command, log)
        while True:
            # In this order: its last output is read after its end.
            over = await host.exists(result) or not await host.is_alive(process)
            while more := await host.read_from(log, told_bytes):
                told_bytes += len(more)
                say(more.decode(errors="replace"))
                if told_bytes - freed_bytes >= SHOWN_BYTES:
                    freed_bytes = told_bytes
                    await _free(host, log, told_bytes)
            if over:
                return _verdict(await host.read_text(result))
            await asyncio.sleep(POLL_S)
    except BaseException:
        await finish(end_worker(host, worker))
        raise


async def _free(host: Host, log: Path, shown_bytes: int) -> None:
    """Free the space of shown output; a file system without holes (fallocate(1)) keeps it."""
    await host.run(["fallocate", "-p", "-o", "0", "-l", str(shown_bytes), "--", str(log)])


async def _directory(host: Host, record: GuardRecord) -> Path:
    path = host.state_dir / WORK_DIRECTORY / record.run
    await host.make_dir(path)
    return path


async def end_worker(host: Host, worker: GuardWorker, *, is_confirmed: bool = False) -> None:
    """End a guard's command, if it was begun, with all that it started, and remove its files.

    Raises HostDownError if some process does not end, or may run undetected: its workers were
    killed and it had no control group. With `is_confirmed` the operator has ruled out the latter.
    """
    found = await _have_it(host, "end", worker)
    if found.left:
        raise _goes_on(
            f"process {found.left[0]} on {host.name} does not end",
            f"end it by hand on {host.name}: kill -9 {' '.join(map(str, found.left))}",
        )
    if not found.sure and not is_confirmed:
        raise _goes_on(
            f"the processes on {host.name} that supervised it were killed, "
            "and what it had started is not known",
            f"see on {host.name} whether any of it still runs",
        )
    await host.remove(Path(worker.directory))


async def release_worker(host: Host, worker: GuardWorker) -> None:
    """Release processes that the command left running. A command that is not over is ended."""
    await _have_it(host, "release", worker)
    await host.remove(Path(worker.directory))


async def _have_it(host: Host, verb: str, worker: GuardWorker) -> Left:
    own = await host.own_command()
    done = await host.run([own[0], "-m", ENDING_MODULE, verb, worker.directory], END_S + KILL_S)
    try:
        return convert(Left, parse(done.stdout))
    except MalformedError as exc:
        why = done.stderr.strip().splitlines()[-1:] or [str(exc)]
        raise _goes_on(
            f"{host.name} does not say whether it has ended: {why[0]}",
            f"see whether {host.name} has this version of vmckpt",
        ) from exc


def _goes_on(why: str, first: str) -> HostDownError:
    return HostDownError(
        "the guard's command may still run",
        why=why,
        remedy=f"{first}; then: vmckpt guard rollback or commit",
    )


def _verdict(text: str | None) -> str:
    if not text:
        return "the command: its worker was killed"
    ended = convert(CommandResult, parse(text))
    if ended.error is not None:
        return f"the command: {ended.error}"
    if ended.returncode is None:
        raise MalformedError("it has neither an exit status nor an error")
    return f"the command's exit status is {ended.returncode}" if ended.returncode else ""


async def _in_guest(vm: Driver, command: tuple[str, ...], say: Print) -> str:
    async with vm.agent() as agent:
        pid = await agent.start(command)
    heard_s = time.monotonic()
    while True:
        await asyncio.sleep(GUEST_POLL_S)
        try:
            async with vm.agent() as agent:
                done = await agent.ended(pid)
            heard_s = time.monotonic()
        except HostDownError:
            if time.monotonic() > heard_s + AGENT_SILENT_S:
                raise
            continue
        except OperationFailedError as exc:
            return f"the command's end is not known: {exc.why}"
        if done is not None:
            break
    say((done.out + done.err).decode(errors="replace"))
    return f"the command's exit status is {done.returncode}" if done.returncode else ""


def environment(record: GuardRecord, host: str) -> dict[str, str]:
    """The environment of commands after a rollback."""
    more = {
        "VMCKPT_GUARD": record.run,
        "VMCKPT_CHECKPOINT": record.checkpoint or "",
        "VMCKPT_WHY": as_variable(record.why),
        "VMCKPT_SINCE": f"{record.command_unix_s or record.began_unix_s:.3f}",
    }
    return {**os.environ, **variables(record.vm, host), **more}
