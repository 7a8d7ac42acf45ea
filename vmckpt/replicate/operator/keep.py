"""Keep a VM protected: whatever ended its protection, start it again as soon as possible."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from vmckpt.errors import NotFoundError, UsageError, VmckptError
from vmckpt.hosts.every import ask_every
from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory.inventory import all_hosts
from vmckpt.options.replication import ReplicationOptions
from vmckpt.replicate.operator.begin import Begin, start
from vmckpt.replicate.operator.keeping import DailyWindow, KeepingMove, KeepingView, decide
from vmckpt.replicate.operator.leftover_copies import CopiesFate
from vmckpt.replicate.operator.operate import home_besides_stale
from vmckpt.replicate.operator.sides import ReplicaSide, sides
from vmckpt.replicate.operator.stop import stop
from vmckpt.replicate.status import DEAD
from vmckpt.vm.inventory import read_home

if TYPE_CHECKING:
    from vmckpt.vm.domains.inventory import Domain

CHECK_S = 5.0
# The delay after a failure; doubled after each further one.
AGAIN_S, LONGEST_S = 10.0, 300.0

# The options of a replication from the first host to the second.
OptionsOf = Callable[[Host, Host], ReplicationOptions]
Tell = Callable[[str, str], None]


async def keep(
    name: str,
    hosts: Sequence[Host],
    options_of: OptionsOf,
    *,
    new_run: Callable[[], str],
    tell: Tell,
    window: DailyWindow | None = None,
) -> None:
    """Keep the VM protected; reports actions to `tell`, and each problem once. If a host cannot
    protect it, the next one is tried.

    On cancellation an unfinished start is undone; an existing protection stays. Raises UsageError:
    invalid options.
    """
    if len(hosts) < 2:
        raise UsageError(
            "a host cannot protect a VM that runs on it",
            why=f"only {hosts[0].name} is named" if hosts else "no host is named",
            remedy="name at least two hosts: vmckpt replicate keep VM HOST HOST...",
        )
    again_s, last, failures = AGAIN_S, "", Counter[str]()
    while True:
        rest_s, tried = CHECK_S, ""
        try:
            known = sorted(hosts, key=lambda host: failures[host.name])
            seen = await _inspect(name, known, window)
            if seen.is_cut_off:  # or this process was suspended, and no answer came in time
                seen = await _inspect(name, known, window)
            move, vm, reason, is_cut_off = seen
            if move is KeepingMove.PROTECT and vm is not None:
                standby, tried = next(host for host in hosts if host.name == reason), reason
                if is_cut_off:
                    await stop(name, _and_all(hosts), CopiesFate.KEEP)
                await vm.begin(standby, options_of(vm.host, standby), new_run())
                failures.clear()
                tell("protected", f"{name} on {vm.host.name} is protected by {reason}")
            elif move is KeepingMove.FREE:
                await stop(name, _and_all(hosts), CopiesFate.KEEP)
                tell("freed", f"{name} is off, as both its hosts were, and may be started again")
            elif move is KeepingMove.STOP:
                await stop(name, _and_all(hosts))
                tell("stopped", f"{name} is no longer protected: its window is over")
            again_s = AGAIN_S
            stands, word = (reason, "waiting") if move is KeepingMove.WAIT else ("", "")
        except VmckptError as exc:
            if exc.kind == "usage":
                raise
            failures[tried] += 1
            stands, word = f"{exc.what}: {exc.why}; {exc.remedy}", "failed"
            rest_s, again_s = again_s, min(LONGEST_S, 2 * again_s)
        if stands and stands != last:
            tell(word, f"{name}: {stands}")
        last = stands
        await asyncio.sleep(rest_s)


def _and_all(hosts: Sequence[Host]) -> list[Host]:
    """These and all others of the inventory: the VM may have moved on to one of them."""
    ours = {host.name for host in hosts}
    return [*hosts, *(host for host in all_hosts() if host.name not in ours)]


class _Seen(NamedTuple):
    """What is due, where the VM runs, the reason from `decide`, and whether services died without a
    last word.
    """

    move: KeepingMove
    vm: "_KeptHome | None"
    reason: str
    is_cut_off: bool


async def _inspect(name: str, hosts: Sequence[Host], window: DailyWindow | None) -> _Seen:
    up = await ask_every(hosts, _name_if_up)
    reached = [host for host in hosts if host.name in up.given]
    found = await _homes(name, reached)
    alive = [home for home in found if home.is_alive]
    if len(reached) == len(hosts) and not found:
        raise NotFoundError(
            f"there is no VM '{name}'",
            why=f"{', '.join(host.name for host in hosts)} have no VM of that name",
            remedy="see `vmckpt vm list`",
        )
    vm = alive[0] if len(alive) == 1 else None
    known = await sides(name, reached)
    roles = [side.status.role for side in known if side.answers]
    is_cut_down = len(found) == 1 and not alive and _are_killed(known, found[0])
    is_time = window is None or window.has(datetime.now().time())  # noqa: DTZ005 - the operator's
    home, answering = vm.host.name if vm else "", frozenset(roles)
    view = KeepingView(home, answering, frozenset(up.given), is_time, is_cut_down)
    move, reason = decide(view, [host.name for host in hosts])
    # What a stuck service holds on another host does not block this.
    ends = (home, reason) if move is KeepingMove.PROTECT else tuple(up.given)
    is_cut_off = any(
        side.host.name in ends and not side.answers and not side.status.has_ended for side in known
    )
    return _Seen(move, vm, reason, is_cut_off)


class _KeptHome(NamedTuple):
    """A host that has the VM; `begin` protects it from there."""

    host: Host
    is_alive: bool
    begin: Begin


async def _homes(name: str, hosts: Sequence[Host]) -> list[_KeptHome]:
    """Those of its homes that are not known to be stale. Of a domain, libvirt says where it runs,
    and records of its replication where it was last, if it runs nowhere.
    """
    answers = await ask_every(hosts, lambda host: read_home(host, name))
    found = [vm for vm in answers.given if vm is not None]
    if len(found) > 1 and (at_home := await home_besides_stale(name, hosts)) is not None:
        found = [at_home[0]]
    own = [vm for vm in found if not vm.qemu.domain]
    if not own and (domain := await _domain(name, hosts)) is not None:
        from vmckpt.replicate.domains.describing import start_domain

        if domain.runs or not found:
            return [_KeptHome(domain.host, domain.runs, partial(start_domain, domain))]
    return [_KeptHome(vm.host, await vm.is_alive(), partial(start, vm)) for vm in own or found]


async def _domain(name: str, hosts: Iterable[Host]) -> "Domain | None":
    with_libvirt = [host for host in hosts if host.libvirt is not None]
    if not with_libvirt:
        return None
    from vmckpt.vm.domains.inventory import find_domain

    return await find_domain(name, with_libvirt)


def _are_killed(known: Iterable[ReplicaSide], home: _KeptHome) -> bool:
    """Whether the service of the primary at home there was killed, and all others have ended.

    One that is frozen may go on: then its standby takes over.
    """
    states = {side.host.name: side.status for side in known}
    primary = states.get(home.host.name)
    was_killed = primary is not None and primary.is_primary and primary.state == DEAD
    return was_killed and all(one.state == DEAD or one.has_ended for one in states.values())


async def _name_if_up(host: Host) -> str:
    await host.require_up()
    return host.name
