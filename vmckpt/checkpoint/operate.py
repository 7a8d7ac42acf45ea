"""The operator's side: having a checkpoint made, restored or forked by the host it is to be on."""

import asyncio
import operator
import secrets
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from vmckpt.checkpoint import fork, restore, take
from vmckpt.checkpoint.catalogue import Entry
from vmckpt.checkpoint.facts import FILE, USUAL_PAUSE_S, usable_facts
from vmckpt.checkpoint.foreign import wanted
from vmckpt.checkpoint.meant import require_meant_to_restore, require_meant_to_take
from vmckpt.checkpoint.origin import digest, is_own, run_key
from vmckpt.checkpoint.place import Place, access_to, own, parse_place, remember_made
from vmckpt.checkpoint.recover import recover
from vmckpt.checkpoint.secret import written_on
from vmckpt.checkpoint.service import (
    CREATE,
    DIRECTORY,
    DONE,
    FAILED,
    FORK,
    RECOVER,
    RESTORE,
    RUNNING,
    SETTLED,
    WORKING,
    Asked,
    Files,
    request_for,
)
from vmckpt.checkpoint.tree import OriginShown
from vmckpt.checkpoint.whole import require_savable
from vmckpt.deadlines import poll
from vmckpt.errors import (
    BusyError,
    HostDownError,
    OperationFailedError,
    OutcomeUnknownError,
    RefusedError,
    StorageError,
)
from vmckpt.foreign import NUMBER, MalformedError, Shape, parse, require
from vmckpt.hosts.every import ask_every
from vmckpt.hosts.host import MOST_TEXT_BYTES, Host
from vmckpt.hosts.inventory import all_hosts, state_dir
from vmckpt.hosts.process import PROCESS, ProcessId
from vmckpt.hosts.remote.values import unpack_error
from vmckpt.sequence.in_thread import in_thread
from vmckpt.sequence.steps import finish
from vmckpt.state.documents import load_from
from vmckpt.store.checkpoint_file import CHECKPOINTS
from vmckpt.store.naming import IfTaken, dated
from vmckpt.store.open import Access
from vmckpt.store.sealing.keys import KeySource
from vmckpt.vm.inventory import Vm, read_vm
from vmckpt.vm.lifecycle import restore_is_cut_off
from vmckpt.vm.paths import vms_dir
from vmckpt.vm.spec import parse_spec

POLL_S = 0.02
# A service that is told to end undoes what it has begun, unless its storage keeps it.
END_S = 120.0
Tell = Callable[[str], None]


class Work(NamedTuple):
    """What a host is to be asked for; `access` opens the store at `place`."""

    host: Host
    asked: Asked
    wish: Mapping[str, Any]
    place: Place
    access: Access


async def create(
    vm: Vm, given: str | None, wish: take.Wish, tell: Tell, key: KeySource | None = None
) -> dict[str, Any]:
    """Have a checkpoint of the VM taken by its host. Raises what `take.take` does."""
    return await have_done(await taking(vm, given, wish, key), tell)


async def take_to_fork(vm: Vm, store: str | None, key: KeySource | None = None) -> str:
    """Take a checkpoint of a running VM for forks to begin from; its id. Raises as `create`."""
    name, number = dated(vm.name, "fork"), IfTaken.NUMBER.value
    wish = take.Wish(name, {}, "fork", USUAL_PAUSE_S, if_taken=number)
    taken = await create(vm, store, wish, lambda _: None, key)
    return str(taken["id"])


async def taking(vm: Vm, given: str | None, wish: take.Wish, key: KeySource | None = None) -> Work:
    """To take a checkpoint of the VM. Raises RefusedError, NotFoundError, HostDownError."""
    place = parse_place(given, vm.host) if given else own(vm.host)
    if place.host is not None and not _same_machine(place.host, vm.host):
        raise RefusedError(
            f"{vm.host.name} does not see the store {place.label}",
            why=f"it is a directory of {place.host.name}, and '{vm.name}' is on {vm.host.name}",
            remedy=f"take it into a store there, then: vmckpt store copy {place.label}",
        )
    await (require_savable(vm) if wish.kind == FILE else take.require_capturable(vm))
    access = await access_to(place, key, to_write=True, named=given is not None)
    if access.secret is not None:
        await require_meant_to_take(vm, place, key)
    site_key = await in_thread(partial(run_key, state_dir(), vm.name))
    words = wish._asdict() | {"site_key": site_key}
    return Work(vm.host, Asked(CREATE, vm.name, place.path), words, place, access)


async def restore_to(
    host: Host, entry: Entry, wish: restore.Wish, tell: Tell, key: KeySource | None = None
) -> dict[str, Any]:
    """Have the host make a running VM of a checkpoint; returns as soon as the guest runs."""
    return await have_done(await restoring(host, entry, wish, key), tell)


async def restoring(
    host: Host, entry: Entry, wish: restore.Wish, key: KeySource | None = None
) -> Work:
    """To restore a checkpoint there. Raises RefusedError."""
    name = wish.name or entry.manifest.vm
    if wish.in_place:
        await require_meant_to_restore(entry.manifest, host)
        await _end_what_is_cut_off(host, name)
    else:
        await _require_unused([name], host)
    place = await _seen_from(host, entry)
    access = await access_to(place, key)
    words = wish._asdict() | {"checkpoint": entry.id} | await _standing(entry, trust=wish.trust)
    return Work(host, Asked(RESTORE, name, place.path), words, place, access)


async def fork_on(
    host: Host, entry: Entry, wish: fork.Wish, tell: Tell, key: KeySource | None = None
) -> dict[str, Any]:
    """Have the host make forks of a checkpoint; each says how it went."""
    await _require_unused([f"{wish.name}-{number + 1}" for number in range(wish.number)], host)
    place = await _seen_from(host, entry)
    access = await access_to(place, key)
    asked = Asked(FORK, wish.name, place.path)
    words = wish._asdict() | await _standing(entry, trust=wish.trust)
    return await have_done(Work(host, asked, words, place, access), tell)


async def standing(entry: Entry) -> OriginShown:
    """Whether this site took it, and what would be opened for it if not. Raises StorageError."""
    if await in_thread(partial(is_own, state_dir(), entry.manifest)) or entry.facts is None:
        return OriginShown(entry.facts is None, ())
    try:
        spec = parse_spec(usable_facts(entry.manifest).spec, "the checkpoint's spec", Path("/"))
    except RefusedError as exc:
        return OriginShown(True, (f"nothing: {exc.why}",))
    return OriginShown(True, tuple(wanted(spec, None, plugged=False)))


async def _standing(entry: Entry, *, trust: bool) -> dict[str, Any]:
    """What the operator knows of the checkpoint, for the service."""
    is_foreign = not await in_thread(partial(is_own, state_dir(), entry.manifest))
    known = digest(entry.manifest) if trust or not is_foreign else ""
    return {"known": known, "is_foreign": is_foreign}


async def _end_what_is_cut_off(host: Host, name: str) -> None:
    """An earlier restore's record says which disks the VM has: the next one would replace it."""
    vm = await read_vm(host, name)
    if vm is not None and await restore_is_cut_off(vm):
        await recover_there(vm)


async def recover_there(vm: Vm) -> None:
    """Have the VM's host end a restore or a saving that was cut off there.

    Raises BusyError, VmLostError; OperationFailedError when it did not come to an end.
    """
    host = vm.host
    if host.is_this_machine:
        await recover(vm)
        return
    files = Files.of(host, new_run())
    await host.make_dir(files.path)
    try:
        text = request_for(host, Asked(RECOVER, vm.name, ""), {}, None)
        await host.write_text(files.request, text)
        words = [*await host.own_command(), "checkpointing", str(files.path), "--recover"]
        process = await host.spawn(words, files.log)
        await poll(lambda: host.is_alive(process), operator.not_, every_s=POLL_S)
        if await restore_is_cut_off(vm):
            raise await died(host, files, "recovery")
    finally:
        await finish(host.remove(files.path))


def new_run() -> str:
    """What a run is called."""
    return time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(2)


async def _require_unused(names: Collection[str], host: Host) -> None:
    """No other host that answers has a VM of these names; `host` looks itself. RefusedError."""

    async def look(other: Host) -> list[Vm | None]:
        if other.name == host.name:
            return []
        there = await other.list_dir(vms_dir(other.state_dir))
        return [await read_vm(other, name) for name in there if name in names]

    found = await ask_every(all_hosts(), look)
    for vm in (one for those in found.given for one in those if one is not None):
        raise RefusedError(
            f"there is a VM '{vm.name}' already",
            why=f"on host {vm.host.name}",
            remedy="restore it --in-place there, or make a copy of another name",
        )


def _same_machine(one: Host, other: Host) -> bool:
    return one.name == other.name or (one.is_this_machine and other.is_this_machine)


async def _seen_from(host: Host, entry: Entry) -> Place:
    """The store, of those that have the checkpoint, that the host gets to; its own comes first.

    Raises RefusedError.
    """
    remote = [place for place in entry.places if place.host is None]
    paths = dict.fromkeys([own(host).path, *(p.path for p in entry.places if p.host is not None)])
    for path in paths:
        # A directory that hosts share is known by what is in it.
        if await host.exists(Path(path) / CHECKPOINTS / entry.id):
            return Place(host, path)
        if host.is_this_machine and Path(path).is_file():
            return Place(host, path)  # an exported file, which the operator named
    if remote:
        return remote[0]
    raise RefusedError(
        f"{host.name} does not see checkpoint '{entry.name}'",
        why=f"it is in {' and '.join(place.label for place in entry.places)}",
        remedy="copy it there first: "
        f"vmckpt store copy {host.name}: {entry.id[:12]} --store {entry.place.label}",
    )


async def have_done(work: Work, tell: Tell) -> dict[str, Any]:
    """Have a service there do it; its result. Raises what that does, OutcomeUnknownError."""
    async with begun(work) as (files, service):
        return await _served(work, files, service, tell)


@asynccontextmanager
async def begun(work: Work) -> AsyncIterator[tuple[Files, ProcessId]]:
    """A service that does it there, and its files, for the block; it has begun by the end of it."""
    host, run = work.host, new_run()
    files = Files.of(host, run)
    await host.make_dir(files.path)
    async with written_on(host, run, work.access.secret) as key_path:
        text = request_for(host, work.asked, work.wish, key_path, work.access)
        await host.write_text(files.request, text)
        command = [*await host.own_command(), "checkpointing", str(files.path)]
        if work.asked.verb == CREATE and work.asked.held_s is not None:
            command.append("--last")  # several at once, beside guests that are to talk on
        yield files, await host.spawn(command, files.log)
    if work.access.may_be_made:
        with suppress(HostDownError, StorageError):  # the next command that uses it remembers it
            await remember_made(work.place)


async def _served(work: Work, files: Files, service: ProcessId, tell: Tell) -> dict[str, Any]:
    host, verb = work.host, work.asked.verb
    told, is_at_work = 0, verb == RESTORE
    try:
        while True:
            alive = await host.is_alive(service)
            status = said(await host.read_text(files.status))
            done = status.get("state") in (SETTLED, DONE)
            if done or (status.get("state") == RUNNING and not alive):
                return _result(work, status)
            if status.get("state") == FAILED:
                raise unpack_error(status.get("error"))
            if not alive:
                raise await died(host, files, verb)
            steps = status.get("steps", [])
            for step in steps[told:]:
                tell(step)
            told = max(told, len(steps))
            await asyncio.sleep(POLL_S)
    except asyncio.CancelledError:
        # One that does not end needs its files, and so does what comes after its death.
        is_at_work = True
        await finish(interrupted(host, service, f"the {verb} of '{work.asked.vm}'"))
        is_at_work = verb == RESTORE
        raise
    finally:
        if not is_at_work:
            await finish(host.remove(files.path))


# Of a result, what is read as it stands.
_RESULTS: Mapping[str, Shape] = {
    CREATE: {
        **dict.fromkeys(("id", "name", "damaged??", "not_replaced??", "not_ended??"), str),
        **dict.fromkeys(("pause_ms", "took_s"), NUMBER),
        "stored": int,
        "apart": bool,
        "replaced": [str],
    },
    RESTORE: {"vm": str, "host": str, "running_ms": NUMBER, "warnings": [str]},
    FORK: {"forks": [{"name": str, "took_ms": NUMBER, "error": str, "warnings": [str]}]},
}
_DISKS_RESTORED: Shape = {"vm": str, "host": str, "disks": [str], "warnings": [str]}


def _result(work: Work, status: Mapping[str, Any]) -> dict[str, Any]:
    """What a service says came of it. Raises OutcomeUnknownError: that is nothing of the kind."""
    verb, result = work.asked.verb, status.get("result")
    try:
        require(_DISKS_RESTORED if work.wish.get("disks_only") else _RESULTS[verb], result)
    except MalformedError as exc:
        raise OutcomeUnknownError(
            f"what came of the {verb} on {work.host.name} cannot be read",
            why=f"its result is malformed: {exc}",
            remedy="`vmckpt vm list` shows how the VM is, `vmckpt checkpoint list` what there is",
        ) from exc
    return dict(result or {})


_SAID: Shape = {"state?": str, "result?": {}, "error?": [str], "steps?": [str]}
# Of a request, what a guard goes by, which another vmckpt may have made.
_REQUEST: Shape = {"verb": str, "vm": str, "wish": {"tags?": {}}}


def said(text: str | None, shape: Shape = _SAID) -> dict[str, Any]:
    """What a service's file says; of one that a power cut emptied nothing, as it ended then too."""
    try:
        found: dict[str, Any] = parse(text or "", most_bytes=MOST_TEXT_BYTES, any_text=True)
        require(shape, found)
    except MalformedError:
        return {}
    return found


async def interrupted(host: Host, service: ProcessId, what: str) -> None:
    """Have a service undo what it can, and wait until it has ended. Raises BusyError: it does not.

    `what` it is at, in words.
    """
    await host.interrupt(service)
    if not await ended(host, service, END_S):
        raise BusyError(
            f"{what} on {host.name} has not ended",
            why=f"its process {service.pid} there was told to {END_S:g} s ago; it is frozen, or "
            "waits for its storage",
            remedy="have its storage answer, or end it by force on that host: what it had begun "
            "is undone then",
        )


async def ended(host: Host, process: ProcessId, within_s: float) -> bool:
    """Wait until a service has ended, for so long at most; whether it has."""
    return not await poll(
        lambda: host.is_alive(process), operator.not_, every_s=POLL_S, within_s=within_s
    )


async def revoke(host: Host, unwanted: Callable[[Mapping[str, Any]], bool]) -> None:
    """Have services there that a killed command started undo what they are at, and wait for it.

    Those whose request is `unwanted`. One that has not begun yet never does; what is done stays.
    """
    directory = host.state_dir / DIRECTORY
    for run in await host.list_dir(directory):
        files = Files(directory / run)
        request = said(await host.read_text(files.request), _REQUEST)
        if not request or not unwanted(request):
            continue
        # In this order: whoever has not said yet who it is sees this, and does nothing.
        await host.write_text(files.revoked, "")
        status = said(await host.read_text(files.status))
        process = None
        with suppress(StorageError):
            process = await load_from(host, files.process, PROCESS)
        if process and status.get("state") in (None, WORKING):
            what = f"the {request['verb']} of '{request['vm']}'"
            await interrupted(host, process, what)


async def died(host: Host, files: Files, verb: str) -> OperationFailedError:
    """What is said of a service that has ended without a word."""
    words = (await host.read_text(files.log) or "").strip().splitlines()
    return OperationFailedError(
        f"the {verb} on {host.name} ended without a result",
        why="; ".join(words[-2:]) or "its process was killed",
        remedy="ask again; `vmckpt vm list` shows how the VM is",
    )
