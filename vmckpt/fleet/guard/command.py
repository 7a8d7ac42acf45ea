"""A guard's command: run here, on the VM's host, or in the guest."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from vmckpt.errors import HostDownError, OperationFailedError, VmckptError
from vmckpt.fleet.guard.health import variables
from vmckpt.fleet.guard.record import Record, Where, Worker
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory import local_host
from vmckpt.hosts.process import ProcessId
from vmckpt.qemu.agent import GuestAgent
from vmckpt.sequence.steps import finish
from vmckpt.vm.inventory import Vm

POLL_S = 0.1
GUEST_POLL_S = 0.5
# A guest that reboots has no agent for a while; one that never comes back is no success.
AGENT_SILENT_S = 120.0
WORK_DIRECTORY, WORKER_MODULE = "guarded", "vmckpt.fleet.guard.worker"

# Has the worker written down before there is one.
Begun = Callable[[Worker], Awaitable[None]]
Print = Callable[[str], None]


async def run_command(vm: Vm, record: Record, begun: Begun, say: Print, output: int) -> str:
    """Run it to its end: why it failed, or nothing. What it leaves running stays.

    `output` is the descriptor that what it prints goes to when it is run here; elsewhere `say` is
    told. Ended with all that it started when it outlasts its time, and when this is cancelled.
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


def _worker_command(own: list[str], result: Path, command: tuple[str, ...]) -> list[str]:
    # By its module: the whole command line takes 80 ms more.
    return [own[0], "-m", WORKER_MODULE, str(result), *command]


def _result_in(directory: Path) -> Path:
    return directory / "result"


async def _here(vm: Vm, record: Record, begun: Begun, output: int) -> str:
    host = local_host()
    own = await host.own_command()
    directory = await _directory(host, record)
    result = _result_in(directory)
    await begun(Worker(host.name, str(directory)))
    child = await asyncio.create_subprocess_exec(
        *_worker_command(own, result, record.request.command),
        stdout=output,
        env=environment(record, vm.host.name),
    )
    try:
        await child.wait()
        return _verdict(await host.read_text(result))
    except BaseException:
        with suppress(ProcessLookupError):
            child.terminate()
        await finish(child.wait())
        raise
    finally:
        await finish(host.remove(directory))


async def _on_host(host: Host, record: Record, begun: Begun, say: Print) -> str:
    directory = await _directory(host, record)
    result, log = _result_in(directory), directory / "output"
    own = await host.own_command()
    command = _worker_command(own, result, record.request.command)
    worker, told_bytes = Worker(host.name, str(directory)), 0
    try:
        await begun(worker)
        process = await host.spawn(command, log)
        while True:
            alive = await host.is_alive(process)
            while more := await host.read_from(log, told_bytes):
                told_bytes += len(more)
                say(more.decode(errors="replace"))
            if not alive:
                return _verdict(await host.read_text(result))
            await asyncio.sleep(POLL_S)
    except BaseException:
        await finish(end_worker(host, worker))
        raise
    finally:
        await finish(host.remove(directory))


async def _directory(host: Host, record: Record) -> Path:
    path = host.state_dir / WORK_DIRECTORY / record.run
    await host.make_dir(path)
    return path


async def end_worker(host: Host, worker: Worker) -> None:
    """End a guard's command, if it was begun, with all that it started, and remove its files.

    Raises HostDownError when it does not end.
    """
    directory = Path(worker.directory)
    mark = "\0".join([WORKER_MODULE, str(_result_in(directory)), ""])
    told = set[ProcessId]()
    given_up_s = time.monotonic() + 30
    while found := set(await host.find_processes(mark)):
        for process in found - told:
            await host.interrupt(process)
        told |= found
        if time.monotonic() > given_up_s:
            raise HostDownError(
                "a guard's command does not end",
                why=f"its process {next(iter(found)).pid} on {host.name} was told to",
                remedy="end it by hand, then: vmckpt guard rollback or commit",
            )
        await asyncio.sleep(POLL_S)
    await host.remove(directory)


def _verdict(text: str | None) -> str:
    told = json.loads(text) if text else {"error": "it was killed"}
    if "error" in told:
        return f"the command: {told['error']}"
    return f"the command's exit status is {told['returncode']}" if told["returncode"] else ""


async def _in_guest(vm: Vm, command: tuple[str, ...], say: Print) -> str:
    async with _agent(vm) as agent:
        pid = await agent.start(command)
    heard_s = time.monotonic()
    while True:
        await asyncio.sleep(GUEST_POLL_S)
        try:
            async with _agent(vm) as agent:
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


@asynccontextmanager
async def _agent(vm: Vm) -> AsyncIterator[GuestAgent]:
    agent = await GuestAgent.connect(await vm.host.connect(vm.qemu.files.agent))
    try:
        yield agent
    finally:
        await finish(agent.close())


def environment(record: Record, host: str) -> dict[str, str]:
    """What commands after a rollback find in their environment."""
    more = {
        "VMCKPT_GUARD": record.run,
        "VMCKPT_CHECKPOINT": record.checkpoint or "",
        "VMCKPT_WHY": record.why,
        "VMCKPT_SINCE": f"{record.command_unix_s or record.began_unix_s:.3f}",
    }
    return {**os.environ, **variables(record.vm, host), **more}
