"""The operator's side: which checkpoints there are, and having one made, restored or forked."""

import asyncio
import json
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vmckpt.checkpoint import fork, restore, take
from vmckpt.checkpoint.facts import Facts, UnknownFactsError
from vmckpt.checkpoint.place import own_place
from vmckpt.checkpoint.service import (
    CREATE,
    DONE,
    FAILED,
    FORK,
    RESTORE,
    RUNNING,
    Files,
    request_for,
)
from vmckpt.errors import NotFoundError, OperationFailedError, RefusedError, UsageError
from vmckpt.hosts.host import Host
from vmckpt.hosts.remote.values import unpack_error
from vmckpt.sequence.in_thread import in_thread
from vmckpt.sequence.steps import finish
from vmckpt.store.manifest import Manifest
from vmckpt.store.open import open_store
from vmckpt.vm.inventory import Vm

POLL_S = 0.02
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Entry:
    """A checkpoint in a store; `facts` of None: another version of vmckpt wrote it."""

    place: str
    manifest: Manifest
    facts: Facts | None

    @property
    def id(self) -> str:
        """What it is called for good."""
        return self.manifest.id

    @property
    def name(self) -> str:
        """What its maker called it."""
        return self.facts.name if self.facts else "?"


def places(hosts: Iterable[Host], given: str | None) -> list[str]:
    """The stores to look in: the one that was named, or those of this machine's hosts."""
    if given is not None:
        return [given]
    own = (own_place(host.state_dir) for host in hosts if host.is_this_machine)
    return [place for place in own if Path(place).exists()]


async def entries(where: Iterable[str], vm: str | None = None) -> list[Entry]:
    """All checkpoints there, oldest first. Raises StorageError."""
    found: list[Entry] = []
    for place in where:
        manifests = await in_thread(partial(_manifests, place, vm))
        found += [Entry(place, manifest, _facts(manifest)) for manifest in manifests]
    return sorted(found, key=lambda one: (one.manifest.created_unix_s, one.id))


async def find(where: Iterable[str], text: str) -> Entry:
    """The one whose id begins so, or whose name it is. Raises NotFoundError, UsageError."""
    every = await entries(where)
    exact = [one for one in every if one.id == text]
    named = [one for one in every if one.name == text]
    begun = [one for one in every if len(text) >= 4 and one.id.startswith(text)]
    found = exact or named or begun
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(
            f"'{text}' is {len(found)} checkpoints",
            why=", ".join(f"{one.id[:12]} of {one.manifest.vm}" for one in found),
            remedy="write more of the id",
        )
    raise NotFoundError(
        f"there is no checkpoint '{text}'",
        why="no store that was looked in has it",
        remedy="see `vmckpt checkpoint list`, or name its store: --store",
    )


async def create(vm: Vm, place: str | None, wish: take.Wish, tell: Tell) -> dict[str, Any]:
    """Have a checkpoint of the VM taken by its host. Raises what `take.take` does."""
    await take.require_capturable(vm)
    where = place or own_place(vm.host.state_dir)
    return await _have_done(vm.host, CREATE, (vm.name, where), wish._asdict(), tell)


async def restore_to(host: Host, entry: Entry, wish: restore.Wish, tell: Tell) -> dict[str, Any]:
    """Have the host make a running VM of a checkpoint; returns as soon as the guest runs."""
    _require_reachable(host, entry)
    asked = wish._asdict() | {"checkpoint": entry.id}
    name = wish.name or entry.manifest.vm
    return await _have_done(host, RESTORE, (name, entry.place), asked, tell)


async def fork_on(host: Host, entry: Entry, wish: fork.Wish, tell: Tell) -> dict[str, Any]:
    """Have the host make forks of a checkpoint; each says how it went."""
    _require_reachable(host, entry)
    return await _have_done(host, FORK, (wish.name, entry.place), wish._asdict(), tell)


def _require_reachable(host: Host, entry: Entry) -> None:
    if not host.is_this_machine and "://" not in entry.place:
        raise RefusedError(
            f"{host.name} does not see the store {entry.place}",
            why="it is a directory of this machine",
            remedy="copy it there first (vmckpt store copy), and restore there: --store",
        )


async def _have_done(
    host: Host, verb: str, what: tuple[str, str], wish: Mapping[str, Any], tell: Tell
) -> dict[str, Any]:
    """Have a service there do it to a VM with a store, (VM, place); its result."""
    run = time.strftime("%Y%m%d-%H%M%S-") + secrets.token_hex(2)
    files = Files.of(host, run)
    await host.make_dir(files.path)
    await host.write_text(files.request, request_for(host, verb, what, wish))
    command = [*await host.own_command(), "checkpointing", str(files.path)]
    service = await host.spawn(command, files.log)
    said = ""
    try:
        while True:
            alive = await host.is_alive(service)
            status = json.loads(await host.read_text(files.status) or "{}")
            if status.get("state") in (RUNNING, DONE):
                result: dict[str, Any] = status["result"]
                return result
            if status.get("state") == FAILED:
                raise unpack_error(status["error"])
            if not alive:
                raise await _died(host, files, verb)
            if (step := status.get("step", "")) != said:
                tell(said := step)
            await asyncio.sleep(POLL_S)
    except asyncio.CancelledError:
        await finish(_interrupt(host, service))
        raise
    finally:
        if verb != RESTORE:
            await finish(host.remove(files.path))


async def _interrupt(host: Host, service: Any) -> None:
    await host.interrupt(service)
    while await host.is_alive(service):  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(POLL_S)


async def _died(host: Host, files: Files, verb: str) -> OperationFailedError:
    words = (await host.read_text(files.log) or "").strip().splitlines()
    return OperationFailedError(
        f"the {verb} on {host.name} ended without a result",
        why="; ".join(words[-2:]) or "its process was killed",
        remedy="ask again; `vmckpt vm list` shows how the VM is",
    )


def _manifests(place: str, vm: str | None) -> list[Manifest]:
    with open_store(place) as store:
        return store.manifests(vm)


def _facts(manifest: Manifest) -> Facts | None:
    try:
        return Facts.from_json(manifest.facts)
    except UnknownFactsError:
        return None


def to_json(entry: Entry) -> dict[str, Any]:
    """All that is known of it."""
    manifest = entry.manifest
    return {
        "id": manifest.id,
        "vm": manifest.vm,
        "parent": manifest.parent,
        "created_unix_s": manifest.created_unix_s,
        "added_bytes": manifest.added_bytes,
        "areas": [asdict(area) for area in manifest.areas],
        "store": entry.place,
        "facts": entry.facts.to_json() if entry.facts else None,
    }
