"""The operator's side of a replication: failover, and removal of the replaced primary."""

from collections.abc import Iterable
from contextlib import suppress

from vmckpt.errors import (
    HostDownError,
    OperationFailedError,
    OutcomeUnknownError,
    RefusedError,
    TimedOutError,
)
from vmckpt.hosts.every import ask_every
from vmckpt.hosts.host import Host
from vmckpt.lease.rule import Right
from vmckpt.replicate.control import TAKE_ALONE, ask
from vmckpt.replicate.operator.leftovers import (
    StaleHomeStaysError,
    remove_stale_home,
    remove_taken_over,
)
from vmckpt.replicate.operator.sides import (
    BEGIN_S,
    ReplicaSide,
    last_status,
    not_replicated,
    services,
    side_of,
    sides,
    while_there_is,
)
from vmckpt.replicate.operator.terms import take_back_term
from vmckpt.replicate.primary.claim import (
    ask_about,
    is_as_taken_over,
    is_of_this_home,
    require_right,
    took_over,
)
from vmckpt.replicate.request import ServiceFiles
from vmckpt.replicate.status import COPYING, DEAD, PROMOTED, ReplicaStatus, ReplicationOutcome
from vmckpt.vm.identity import read_identity
from vmckpt.vm.inventory import Vm, inspect, read_home
from vmckpt.vm.record import Replaced


async def failover(
    name: str, hosts: Iterable[Host], *, primary_is_dead: bool = False
) -> ReplicationOutcome:
    """Have the standby take the guest over; returns its status then.

    A primary that answers hands the guest over, and nothing is lost. `primary_is_dead`: the
    operator declares that nothing of it runs, and that the arbiter is gone for good. Raises
    NotFoundError, OperationFailedError when the standby did not take over (the error says why),
    TimedOutError while it still waits until it may, OutcomeUnknownError when it has the guest,
    which does not run.
    """
    hosts = tuple(hosts)
    found = await sides(name, hosts)
    standby = await _standby_of(name, found)
    status = standby.status
    if status.state != PROMOTED and not await _died_in_it(name, standby):
        status = await _taken_over(name, standby, found, hosts, is_dead=primary_is_dead)
    warnings = await _left(name, status, hosts)
    if status.took_over_ms is None and not await _runs_by_now(standby.host, name):
        raise OutcomeUnknownError(
            f"{standby.host.name} has '{name}', which does not run there",
            why="; ".join([status.why or "-", *warnings]),
            remedy=f"vmckpt vm start {name}",
        )
    return ReplicationOutcome(status, tuple(warnings))


async def _died_in_it(name: str, standby: ReplicaSide) -> bool:
    """Whether the guest is at home with a standby whose service died during the takeover."""
    home = None if standby.answers else await read_home(standby.host, name)
    return home is not None and await is_as_taken_over(home)


async def _runs_by_now(standby: Host, name: str) -> bool:
    """Whether the guest, which the standby could not resume, was started there since."""
    home = await read_home(standby, name)
    if home is None or not home.qemu.domain:
        return home is not None and (await inspect(home)).state == "running"
    from vmckpt.vm.domains.flags import DomainState
    from vmckpt.vm.domains.sessions import libvirtd

    async with libvirtd(standby) as session:
        now = await session.condition(home.qemu.domain)
    return now is not None and now.state is DomainState.RUNNING


async def _standby_of(name: str, found: Iterable[ReplicaSide]) -> ReplicaSide:
    """The standby that is to take over, or has. If the primary answers, it is that primary's
    standby, not an earlier one's.

    Raises NotFoundError, OperationFailedError.
    """
    of_now = [
        side
        for side in found
        if not side.status.is_primary
        if side.status.state != PROMOTED or await _is_at_home(name, side)
    ]
    primaries = [side.status for side in found if side.answers and side.status.is_primary]
    if primaries:
        runs = {current.run for current in primaries}
        of_now = [side for side in of_now if side.status.run in runs]
        if not of_now:
            raise OperationFailedError(
                f"no standby was asked to take over '{name}'",
                why=f"{primaries[0].standby}, which protects it, does not report a standby",
                remedy=f"check that host, and `vmckpt replicate status {name}`",
            )
    if not of_now:
        raise not_replicated(name)
    # A standby that took the guest over took it from a primary that started earlier.
    return min(of_now, key=lambda side: (side.status.state != PROMOTED, not side.answers))


async def _is_at_home(name: str, promoted: ReplicaSide) -> bool:
    """Whether the guest is still where that standby took it over; if not, it has moved since."""
    home = await read_home(promoted.host, name)
    return home is not None and home.qemu.files.qemu_id == promoted.status.qemu_id


async def _taken_over(
    name: str,
    standby: ReplicaSide,
    found: Iterable[ReplicaSide],
    hosts: Iterable[Host],
    *,
    is_dead: bool,
) -> ReplicaStatus:
    """Have the standby take over and its primary hand over; returns the standby's status.

    Raises as `failover` does.
    """
    for side in found:
        current = side.status
        if side.answers and current.is_primary and current.run == standby.status.run:
            if current.state == COPYING:  # asked to hand the guest over, it would end the copy
                raise _not_in_sync(name, standby.host)
            with suppress(HostDownError):  # it died doing it: the standby handles that
                await ask(side.host, ServiceFiles.of(side.host, name), "failover")
    files = ServiceFiles.of(standby.host, name)
    if is_dead:
        await _take_alone(name, standby, hosts)
    else:
        with suppress(HostDownError):  # it may already have taken over and ended
            await ask(standby.host, files, "failover")
    await _await_decision(standby.host, name, standby.status.run)
    status = (await last_status(standby.host, files)) or standby.status
    if status.state != PROMOTED:
        raise OperationFailedError(
            f"{standby.host.name} did not take '{name}' over",
            why=status.why or "its service ended without a last status",
            remedy="see `vmckpt replicate status` and `vmckpt vm list`",
        )
    return status


def _not_in_sync(name: str, standby: Host) -> OperationFailedError:
    return OperationFailedError(
        f"{standby.name} cannot take '{name}' over yet",
        why="its memory and disks are still being copied there",
        remedy=f"wait until it is protected: vmckpt replicate status {name} --watch",
    )


async def _take_alone(name: str, standby: ReplicaSide, hosts: Iterable[Host]) -> None:
    """Have it take over without the arbiter, if the arbiter does not answer.

    Raises RefusedError: its primary is not dead, or has continued alone.
    """
    files, primary = ServiceFiles.of(standby.host, name), standby.status.primary
    for host in hosts:
        with suppress(HostDownError):
            home, status = await read_home(host, name), await side_of(host, name)
            is_newer = status is not None and host.name == primary and status.status.is_settled
            if host.name == standby.host.name or not (
                is_newer or (home is not None and await home.is_alive())
            ):
                continue
            raise RefusedError(
                f"the primary of '{name}' is not dead",
                why=f"the state on {host.name} is newer"
                if is_newer
                else f"its QEMU is alive on {host.name}",
                remedy=f"let it continue there: vmckpt replicate stop {name}",
            )
    with suppress(HostDownError):  # it may already have taken over and ended
        await ask(standby.host, files, TAKE_ALONE)


async def _left(name: str, status: ReplicaStatus, hosts: Iterable[Host]) -> list[str]:
    """Remove what the old primary has; returns the message if that is not possible now."""
    old = status.primary
    try:
        await settle(name, hosts)
    except HostDownError as exc:
        return [
            f"{old} does not answer ({exc.why}): what it still has of '{name}' is removed by "
            "the next command that reaches it, and never started"
        ]
    except StaleHomeStaysError as exc:
        return [f"{exc}; it is never started"]
    return []


async def settle(name: str, hosts: Iterable[Host]) -> bool:
    """End and remove what the old primary still has of a VM that its standby has taken over.

    False when no standby has. Raises HostDownError when the old primary does not answer.
    """
    all_hosts = tuple(hosts)
    if await _settled_by_homes(name, all_hosts):
        return True
    is_settled = await _settled_by_sides(name, all_hosts)
    return await _settled_by_claims(name, all_hosts) or is_settled


async def home_besides_stale(name: str, hosts: Iterable[Host]) -> tuple[Vm, str] | None:
    """Like `settle`, of a VM that two hosts have: its home, if only one is not stale; and why what
    is stale was not removed, or "".
    """
    all_hosts, stays, why = tuple(hosts), "", ""
    try:
        if not await settle(name, all_hosts):
            return None
    except StaleHomeStaysError as exc:
        stays, why = exc.host_name, str(exc)
    answers = await ask_every(all_hosts, lambda host: read_home(host, name))
    homes = [vm for vm in answers.given if vm is not None and vm.host.name != stays]
    return (homes[0], why) if len(homes) == 1 else None


async def _settled_by_sides(name: str, hosts: Iterable[Host]) -> bool:
    """Like `settle`, from what the standby's service said."""
    for side in await sides(name, hosts):
        current = side.status
        if current.is_primary or current.state != PROMOTED:
            continue
        if current.primary_qemu_id is None or current.primary is None:
            continue  # it does not say from where it took over
        if not await _is_at_home(name, side):
            continue
        old = [host for host in hosts if host.name == current.primary != side.host.name]
        gone = [
            await remove_taken_over(host, name, current.primary_qemu_id, side.host) for host in old
        ]
        if all(gone):
            return True
    return False


async def _settled_by_homes(name: str, hosts: Iterable[Host]) -> bool:
    """Like `settle`, from what a VM's home says that it replaced, with or without services."""
    answers = await ask_every(hosts, lambda host: read_home(host, name))
    homes = [vm for vm in answers.given if vm is not None]
    for vm in homes:
        for other in homes:
            stale = Replaced(other.host.name, other.qemu.files.qemu_id)
            if vm.qemu.replaces == stale and await remove_taken_over(
                other.host, name, stale.qemu_id, vm.host
            ):
                return True
    return False


async def _settled_by_claims(name: str, hosts: Iterable[Host]) -> bool:
    """Like `settle`, from the arbiter: of two homes of one VM, one whose term another has is stale.

    It does not matter what became of the other since: it may have been restarted, moved, or
    restored. If all homes lost their term they are left, since one of them may be the newest.
    Raises HostDownError when the arbiter does not answer, UsageError when an identity is damaged.
    """
    answers = await ask_every(hosts, lambda host: read_home(host, name))
    homes = [vm for vm in answers.given if vm is not None]
    if len(homes) < 2:
        return False
    stale = [vm for vm in homes if await _has_lost_its_term(vm)]
    kept = [await read_identity(vm.host, vm.directory) for vm in homes if vm not in stale]
    stale = [vm for vm in stale if await read_identity(vm.host, vm.directory) in kept]
    for vm in stale:
        await remove_stale_home(vm.host, name, vm.qemu.files.qemu_id)
    return bool(stale)


async def _has_lost_its_term(vm: Vm) -> bool:
    answer = await ask_about(vm)
    return answer is not None and answer.right is Right.ELSEWHERE


async def require_decided(vm: Vm) -> None:
    """Return if no standby has, or may still take over, a VM that is off here.

    The arbiter is asked if one may. If the primary's service died with its host before any standby
    could have taken over (in the first copy), the term is taken first: then none ever can. Raises
    RefusedError, HostDownError (it does not answer), and as `take_back_term` does.
    """
    side = await side_of(vm.host, vm.name)
    is_requested = await vm.host.exists(vm.directory.claim) or await took_over(vm)
    is_over = side is None or not side.status.is_primary or side.status.has_ended
    if is_requested and is_over:
        await require_right(vm)
        return
    if side is None or (is_over and not side.status.has_left) or not await is_of_this_home(vm):
        return
    if side.status.state == DEAD and await _is_its_own(vm):
        await take_back_term(vm.host, vm.name)
        await require_right(vm)
        return
    raise RefusedError(
        f"a standby may be about to take over '{vm.name}'",
        why=f"its replication from {vm.host.name} was interrupted, and that host does not know how "
        "it ended",
        remedy=f"vmckpt replicate failover {vm.name}; if the standby is gone for good: "
        f"vmckpt replicate stop {vm.name} (with --standby-is-dead if its host is off)",
    )


async def _is_its_own(vm: Vm) -> bool:
    """Whether, of a VM that is off and whose primary's service was killed, the arbiter says that
    this host has the term, and no standby is in sync.

    A request of that service may still be on its way to the arbiter, and change that.
    """
    if await vm.is_alive() or not await vm.host.exists(vm.directory.claim):
        return False  # or its recovery takes the term
    if await vm.host.exists(vm.directory.overlays_request):
        return False  # `stop` also commits them, once nothing of the standby writes
    with suppress(HostDownError):
        answer = await ask_about(vm)
        return answer is not None and answer.right is Right.OURS
    return False


async def _await_decision(standby: Host, name: str, run: str | None) -> None:
    """Wait until the standby's service has ended. Raises TimedOutError: it continues, and does not
    have the guest yet. One that has it flushes its disks, which may take minutes.
    """
    late = TimedOutError(
        f"{standby.name} has not taken '{name}' over within {BEGIN_S:g} s",
        why="it must wait until the primary can certainly no longer act",
        remedy="it keeps trying: restore access to the arbiter, and `vmckpt replicate status`. "
        f"If that is gone for good: vmckpt replicate stop {name}; if the primary's host "
        f"is certainly off: vmckpt replicate failover {name} --primary-is-dead",
    )
    try:
        await while_there_is(lambda: services(standby, name), late)
    except TimedOutError as exc:
        status = await last_status(standby, ServiceFiles.of(standby, name))
        if status is not None and (status.state, status.run) == (PROMOTED, run):
            return
        side = await side_of(standby, name)
        why = side.status.why if side is not None else ""
        raise TimedOutError(exc.what, why=why or exc.why, remedy=exc.remedy) from exc
