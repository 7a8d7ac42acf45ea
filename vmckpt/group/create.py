"""Checkpoints of several VMs, on any hosts, as of one consistent cut: all of them, or none."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vmckpt.checkpoint.group.member import TOGETHER_S
from vmckpt.checkpoint.jobs import Take
from vmckpt.checkpoint.operate import StoreJob
from vmckpt.checkpoint.requests import TakenCheckpoint, TakeOptions
from vmckpt.drivers.driver import Driver
from vmckpt.errors import UsageError, VmckptError
from vmckpt.group.head import ANSWER_S, GroupHead, cut
from vmckpt.group.journal import GroupJournal, Part, groups_dir, led, settle
from vmckpt.group.services import Service, at_work
from vmckpt.hosts.inventory.inventory import local_host
from vmckpt.hosts.processes.deadman import armed
from vmckpt.hosts.processes.process import own_command
from vmckpt.sequence.steps import all_of, to_the_end
from vmckpt.store.sealing.keys import KeySource

Tell = Callable[[str], None]
LEAST_HELD_S, USUAL_HELD_S, MOST_HELD_S = 0.02, 0.25, 5.0


@dataclass(frozen=True, slots=True)
class GroupOptions:
    """Options of a group: a name, the members' options, and how long output may be held."""

    name: str
    wish: TakeOptions
    most_held_s: float = USUAL_HELD_S
    store: str | None = None


async def create(
    vms: Sequence[Driver], options: GroupOptions, tell: Tell, key: KeySource | None = None
) -> dict[str, Any]:
    """Take the checkpoints; returns the result. Every guest continues, whatever happens.

    Raises the reason against it for any VM: then there is a checkpoint of none. Raises
    OutcomeUnknownError when a host fell silent in the commit.
    """
    require_group([vm.name for vm in vms])
    if not LEAST_HELD_S <= options.most_held_s <= MOST_HELD_S:
        raise UsageError(
            f"output cannot be held for {options.most_held_s:g} s at most",
            why=f"it must be {LEAST_HELD_S:g} to {MOST_HELD_S:g} s: QEMU's buffers hold 10,000 "
            "packets, and drop all others",
            remedy="leave out --max-hold: 250 ms are enough if all hosts answer",
        )
    works = await all_of(_work(vm, options, key) for vm in vms)
    for note in (note for vm in vms for note in vm.group_notes()):
        tell(note)
    group_id = secrets.token_hex(8)
    await local_host().make_dir(groups_dir())
    switch = [*own_command(), "settle-groups"]
    with armed(switch, groups_dir() / f"{group_id}.log"):
        async with led(group_id):
            return await _taken(works, options, group_id, tell, key)


def require_group(names: Sequence[str]) -> None:
    """Raises UsageError unless there are several VMs, each named once."""
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice or len(names) < 2:
        raise UsageError(
            f"{', '.join(names) or 'nothing'} is not a group",
            why=f"'{twice[0]}' is in it twice" if twice else "a group has at least two VMs",
            remedy="write --group WEB,DB,...; a single VM needs no group",
        )


async def _work(
    vm: Driver, options: GroupOptions, key: KeySource | None
) -> StoreJob[Take, TakenCheckpoint]:
    wish = replace(options.wish, name=f"{options.name}.{vm.name}")
    work = await vm.taking(options.store, wish, key)
    return work._replace(held_s=options.most_held_s)


async def _taken(
    works: Sequence[StoreJob[Take, TakenCheckpoint]],
    options: GroupOptions,
    group_id: str,
    tell: Tell,
    key: KeySource | None,
) -> dict[str, Any]:
    journal, stored = None, dict[str, Mapping[str, Any]]()
    done: dict[str, Mapping[str, Any]] = {}
    try:
        async with at_work(works) as (head, services):
            stored = await cut(head, options.most_held_s, tell)
            journal = _journal(group_id, options.name, services, stored)
            journal.write()
            done = await to_the_end(_committed(head, journal, stored))
    except (VmckptError, OSError):
        if journal is None or not await to_the_end(settle(journal, key)):
            raise
    else:
        journal.forget()
    return _result(group_id, options.name, stored, done)


async def _committed(
    head: GroupHead, journal: GroupJournal, stored: Mapping[str, Mapping[str, Any]]
) -> dict[str, Mapping[str, Any]]:
    members = {vm: message["id"] for vm, message in stored.items()}
    head.send_all("commit", group={"id": journal.id, "name": journal.name, "members": members})
    return await head.expect_all("committed", ANSWER_S + TOGETHER_S)


def _journal(
    group_id: str, name: str, services: Sequence[Service], stored: Mapping[str, Mapping[str, Any]]
) -> GroupJournal:
    parts = [
        Part(
            vm=service.work.vm,
            host=service.work.host.name,
            process=service.process,
            store_host=service.work.location.host.name if service.work.location.host else None,
            store=service.work.location.path,
            checkpoint=stored[service.work.vm]["id"],
        )
        for service in services
    ]
    return GroupJournal(group_id, name, tuple(parts))


def _result(
    group_id: str,
    name: str,
    stored: Mapping[str, Mapping[str, Any]],
    done: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    """The result for the caller. Skew is by the hosts' clocks, as far as they agree."""
    stops = [message["held"]["stopped_unix_s"] for message in stored.values()]
    held_s = [message["held"]["held_s"] for message in stored.values()]
    return {
        "group": group_id,
        "name": name,
        "skew_ms": round((max(stops) - min(stops)) * 1e3, 3),
        "held_ms": round(max(held_s) * 1e3, 3),
        "members": {
            vm: {
                "id": message["id"],
                "held_ms": round(message["held"]["held_s"] * 1e3, 3),
                "stopping_unix_s": message["held"]["stopping_unix_s"],
                "stopped_unix_s": message["held"]["stopped_unix_s"],
                "runs_unix_s": message["held"]["runs_unix_s"],
                **done.get(vm, {}).get("result", {}),
            }
            for vm, message in stored.items()
        },
    }
