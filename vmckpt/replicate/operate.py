"""The operator's side: begin, look at, end a replication, or have the standby take over."""

import asyncio
import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from vmckpt.errors import (
    HostDownError,
    NotFoundError,
    OperationFailedError,
    RefusedError,
    TimedOutError,
    VmckptError,
)
from vmckpt.hosts.every import Answers, ask_every
from vmckpt.hosts.host import Host
from vmckpt.hosts.process import ProcessId
from vmckpt.hosts.remote.tls import have_listen
from vmckpt.qemu.compare import Machine, describe, differences
from vmckpt.qemu.monitor import session
from vmckpt.replicate.checks import check
from vmckpt.replicate.control import ask
from vmckpt.replicate.request import DIRECTORY, PROMOTED, Files, Options, Request, as_itself
from vmckpt.replicate.stale import remove_stale_home
from vmckpt.sequence.steps import finish
from vmckpt.vm.check import REFUSE, WARN, refusal
from vmckpt.vm.inventory import Vm, read_vm
from vmckpt.vm.lifecycle import owner
from vmckpt.vm.paths import QEMU_PREFIX, QemuDir, lock_path, vm_dir
from vmckpt.vm.spec import parse_spec
from vmckpt.vm.start import sweep

POLL_S, BEGIN_S = 0.05, 60.0
PROTECTED = "protected"


class Side(NamedTuple):
    """What one host's service says of a VM; `answers`: it lives. Else it is its last word."""

    host: Host
    status: dict[str, Any]
    answers: bool


async def start(vm: Vm, standby: Host, options: Options, run: str) -> dict[str, Any]:
    """Have the VM protected by `standby`; returns the primary's status once it is.

    Raises RefusedError (nothing was changed), OperationFailedError (undone: the VM runs on where it
    was, unprotected), HostDownError.
    """
    checks = await check(vm, standby, holds_output=options.holds_output)
    if any(found.verdict == REFUSE for found in checks):
        raise refusal(checks, vm.name, standby.name, "be replicated")
    await _require_new(vm, standby)
    request = Request(
        run=run,
        vm=vm.name,
        spec=vm.spec.text,
        platform=vm.qemu.platform._asdict(),
        primary=as_itself(vm.host),
        standby=as_itself(standby),
        options=options,
        one_machine=vm.host.is_this_machine and standby.is_this_machine,
        qemu_id=vm.qemu.files.qemu_id,
    )
    ours, theirs = Files.of(vm.host, vm.name), Files.of(standby, vm.name)
    try:
        await _write(standby, theirs, request)
        place = await have_listen(standby, theirs.path, ("replica", "standby"))
        await _require_same(vm, standby)
        await _write(vm.host, ours, replace(request, place=place))
        command = [*await vm.host.own_command(), "replica", "primary", str(ours.path)]
        service = await vm.host.spawn(command, ours.log)
        status = await _until_protected(vm, ours, service)
    except BaseException:
        await finish(_undo(vm.host, ours, standby, theirs))
        raise
    return status | {"warnings": [found.reason for found in checks if found.verdict == WARN]}


async def sides(name: str, hosts: Iterable[Host]) -> list[Side]:
    """What every host's service says of the VM's replication, or said last; the primary's first.

    Hosts that give no answer are passed over. Raises HostDownError when only they may know.
    """
    answers = await ask_every(hosts, lambda host: _side(host, name))
    found = [side for side in answers.given if side is not None]
    if not found and answers.silent:
        raise answers.silent[0]
    return sorted(found, key=lambda side: str(side.status["role"]))


async def all_sides(hosts: Iterable[Host]) -> Answers[list[Side]]:
    """What every host's services say of all replications; by host."""

    async def ask_host(host: Host) -> list[Side]:
        names = await host.list_dir(host.state_dir / DIRECTORY)
        found = [await _side(host, name) for name in names]
        return [side for side in found if side is not None]

    return await ask_every(hosts, ask_host)


async def stop(name: str, hosts: Iterable[Host]) -> dict[str, Any]:
    """End the VM's replication: it runs on where it is, unprotected.

    What services that have ended left to read goes too. Raises NotFoundError, RefusedError when a
    standby whose primary is silent may have the only copy of the guest.
    """
    found = await sides(name, hosts)
    if not found:
        raise _not_replicated(name)
    answering = {str(side.status["role"]): side.host for side in found if side.answers}
    if "standby" in answering and "primary" not in answering:
        raise RefusedError(
            f"the primary of '{name}' gives no answer",
            why=f"{answering['standby'].name} may have the only copy of the guest by now",
            remedy=f"vmckpt replicate failover {name}",
        )
    last = found[0].status
    for side in found:
        if side.answers and side.status["role"] == "primary":
            last = await ask(side.host, Files.of(side.host, name), "stop")
    for side in found:
        await _until_gone(side.host, name)
        if side.status["role"] == "standby":
            await _end_waiting(side.host, name)
        await side.host.remove(Files.of(side.host, name).path)
    return last


async def failover(name: str, hosts: Iterable[Host]) -> dict[str, Any]:
    """Have the standby go on with the guest; its status then.

    A primary that answers hands the guest over, and nothing is lost. Raises NotFoundError,
    OperationFailedError when the standby did not take over (the error says why), TimedOutError when
    it still waits until it may.
    """
    hosts = tuple(hosts)
    found = await sides(name, hosts)
    standbys = [side for side in found if side.status["role"] == "standby"]
    if not standbys:
        raise _not_replicated(name)
    standby = standbys[0]
    if standby.status["state"] == PROMOTED:
        return standby.status
    for side in found:
        if side.answers and side.status["role"] == "primary":
            with suppress(HostDownError):  # it died over it: the standby sees to that
                await ask(side.host, Files.of(side.host, name), "failover")
    files = Files.of(standby.host, name)
    with suppress(HostDownError):  # it may have taken over already, and ended
        await ask(standby.host, files, "failover")
    await _await_decision(standby.host, name)
    status = (await _last_word(standby.host, files)) or standby.status
    if status["state"] != PROMOTED:
        raise OperationFailedError(
            f"{standby.host.name} did not take '{name}' over",
            why=str(status["why"]) or "its service has ended without a word",
            remedy="see `vmckpt replicate status` and `vmckpt vm list`",
        )
    await settle(name, hosts)
    return status


async def settle(name: str, hosts: Iterable[Host]) -> bool:
    """End and remove what the old primary still has of a VM that its standby has taken over.

    False when no standby has. Raises HostDownError when the old primary does not answer.
    """
    all_hosts = tuple(hosts)
    for side in await sides(name, all_hosts):
        told = side.status
        if told["role"] != "standby" or told["state"] != PROMOTED:
            continue
        home = await read_vm(side.host, name)
        if home is None or home.qemu.files.qemu_id != told["qemu_id"]:
            continue  # it has moved on since
        for host in all_hosts:
            if host.name == told["primary"] and host.name != side.host.name:
                await remove_stale_home(host, name, told["primary_qemu_id"])
        return True
    return False


async def require_decided(vm: Vm) -> None:
    """Raises RefusedError while a standby may be about to go on with a VM that is off here."""
    side = await _side(vm.host, vm.name)
    if side is None or side.status["role"] != "primary" or side.status["state"] == "ended":
        return
    raise RefusedError(
        f"a standby may be about to go on with '{vm.name}'",
        why=f"its replication from {vm.host.name} was cut off, and its end is not known there",
        remedy=f"vmckpt replicate failover {vm.name}; if the standby is gone for good: "
        f"vmckpt replicate stop {vm.name}",
    )


async def _end_waiting(host: Host, name: str) -> None:
    """End the QEMU that a standby's service left waiting when it was killed."""
    directory = vm_dir(host.state_dir, name)
    async with host.lock(lock_path(host.state_dir, name), owner("replicate stop")):
        text = await host.read_text(directory.spec)
        if text is None or await host.exists(directory.current):
            return  # there is none, or the VM is at home there
        await sweep(host, parse_spec(text, str(directory.spec), directory.path), directory, None)
        await host.remove(directory.path)


async def _require_new(vm: Vm, standby: Host) -> None:
    """Services of another replication of it that still answer are not pushed aside."""
    for side in await sides(vm.name, (vm.host, standby)):
        if side.answers:
            raise OperationFailedError(
                f"'{vm.name}' is being replicated",
                why=f"the {side.status['role']}'s service on {side.host.name} answers",
                remedy=f"vmckpt replicate stop {vm.name}",
            )
        await side.host.remove(Files.of(side.host, vm.name).path)


async def _write(host: Host, files: Files, request: Request) -> None:
    await host.make_dir(files.path)
    await host.write_text(files.request, json.dumps(request.to_json()))


async def _require_same(vm: Vm, standby: Host) -> None:
    """Both QEMUs are the same machine to the guest. Raises OperationFailedError."""
    directory = vm_dir(standby.state_dir, vm.name)
    names = [
        name for name in await standby.list_dir(directory.path) if name.startswith(QEMU_PREFIX)
    ]
    waiting = directory.qemu(names[-1].removeprefix(QEMU_PREFIX))
    here, there = await _machine(vm.host, vm.qemu.files), await _machine(standby, waiting)
    if found := differences(here, there):
        raise OperationFailedError(
            f"the QEMU on {standby.name} is another machine",
            why="; ".join(found),
            remedy="use the same QEMU on both hosts, or a machine type and CPU that both have",
        )


async def _machine(host: Host, files: QemuDir) -> Machine:
    async with session(await host.connect(files.onlooker), files.vm_name) as monitor:
        return await describe(monitor)


async def _until_protected(vm: Vm, files: Files, service: ProcessId) -> dict[str, Any]:
    while True:
        with suppress(HostDownError):  # it has no ear yet, or has ended
            status = await ask(vm.host, files, "status")
            if status["state"] == PROTECTED:
                return status
        if not await vm.host.is_alive(service):
            ended = await _last_word(vm.host, files)
            words = (await vm.host.read_text(files.log) or "").strip().splitlines()
            raise OperationFailedError(
                f"'{vm.name}' could not be protected",
                why=ended["why"] if ended else "; ".join(words[-3:]) or "its service ended",
                remedy="the VM runs on where it was, unprotected; mend that, and start again",
            )
        await asyncio.sleep(POLL_S)


async def _undo(primary: Host, ours: Files, standby: Host, theirs: Files) -> None:
    """End both services, the primary's in good order: the guest runs, its output is let go."""
    with suppress(VmckptError):
        await ask(primary, ours, "stop")
    for host, files in ((primary, ours), (standby, theirs)):
        with suppress(VmckptError):  # what failed before says more
            await _until_gone(host, files.path.name)
            await host.remove(files.path)


async def _until_gone(host: Host, name: str) -> None:
    """Wait until the service there has ended; one that does not is killed."""
    given_up_s = asyncio.get_running_loop().time() + BEGIN_S
    while left := await _services(host, name):
        if asyncio.get_running_loop().time() > given_up_s:
            for process in left:
                await host.kill(process)
        await asyncio.sleep(POLL_S)


async def _services(host: Host, name: str) -> list[ProcessId]:
    """The processes that replicate the VM there."""
    path = Files.of(host, name).path
    marks = (f"replica\0{role}\0{path}\0" for role in ("standby", "primary"))
    return [process for mark in marks for process in await host.find_processes(mark)]


async def _await_decision(standby: Host, name: str) -> None:
    """Wait until the standby's service has ended. Raises TimedOutError: it is left to go on."""
    given_up_s = asyncio.get_running_loop().time() + BEGIN_S
    while await _services(standby, name):
        if asyncio.get_running_loop().time() > given_up_s:
            raise TimedOutError(
                f"{standby.name} has not taken '{name}' over within {BEGIN_S:g} s",
                why="it may not before it is certain that the primary cannot act any more",
                remedy="it goes on trying: see to the arbiter, and `vmckpt replicate status`",
            )
        await asyncio.sleep(POLL_S)


async def _side(host: Host, name: str) -> Side | None:
    files = Files.of(host, name)
    if not await host.exists(files.request):
        return None
    try:
        return Side(host, await ask(host, files, "status"), answers=True)
    except HostDownError:
        status = await _last_word(host, files) or await _without_a_word(host, files)
        return Side(host, status, answers=False)


async def _without_a_word(host: Host, files: Files) -> dict[str, Any]:
    """The status of a service that was killed."""
    asked = json.loads(await host.read_text(files.request) or "{}")
    role = "primary" if asked.get("primary", {}).get("name") == host.name else "standby"
    about = {name: asked.get(name) for name in ("vm", "run")}
    why = "its service has died without a word"
    return {"role": role, **about, "state": "dead", "why": why}


async def _last_word(host: Host, files: Files) -> dict[str, Any] | None:
    text = await host.read_text(files.status)
    if text is None:
        return None
    found: dict[str, Any] = json.loads(text)
    return found


def _not_replicated(name: str) -> NotFoundError:
    return NotFoundError(
        f"'{name}' is not replicated",
        why="no host has a service for it",
        remedy=f"vmckpt replicate start {name} STANDBY",
    )
