"""The operator's side of a replication: end it, whatever is left of its services.

Afterwards the VM runs where it was, no replica may take over, and it may be protected again.
"""

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from vmckpt.errors import (
    HostDownError,
    OperationFailedError,
    RefusedError,
    VmckptError,
)
from vmckpt.hosts.every import Answers, ask_every
from vmckpt.hosts.host import Host
from vmckpt.lease.rule import Right
from vmckpt.replicate.arbiter import ARBITER_S
from vmckpt.replicate.control import GO_ALONE, GO_ALONE_UNLESS_TAKEN, TIMEOUT_S, ask
from vmckpt.replicate.domains.guest import return_to_libvirt, return_what_ended
from vmckpt.replicate.operator.committing import commit_overlays_on, hosts_with_overlays
from vmckpt.replicate.operator.leftover_copies import CopiesFate, settle_copies
from vmckpt.replicate.operator.leftovers import StaleHomeStaysError, end_waiting
from vmckpt.replicate.operator.operate import settle
from vmckpt.replicate.operator.sides import (
    ReplicaSide,
    is_still_of,
    last_status,
    not_replicated,
    services,
    side_of,
    sides,
    until_gone,
)
from vmckpt.replicate.operator.terms import give_up_term, take_back_term
from vmckpt.replicate.primary.claim import ClaimAnswer, ask_about, drop_claim, refused
from vmckpt.replicate.request import ServiceFiles
from vmckpt.replicate.status import DEAD, PROMOTED, ReplicaStatus, Role
from vmckpt.vm.inventory import Vm, read_home


async def stop(
    name: str,
    hosts: Iterable[Host],
    copies: CopiesFate = CopiesFate.DISCARD,
    *,
    standby_is_dead: bool = False,
) -> ReplicaStatus | None:
    """Stop the VM's replication; the VM keeps running, unprotected. Returns the last status.

    None: no service was left, only overlays of its shared disks. If nothing at all was left, and
    `standby_is_dead`, the next protection ignores the standby for which the last was refused.

    Its writes to shared disks are committed. `standby_is_dead`: the operator declares silent hosts
    dead; records of other hosts still count. A silent arbiter is not needed once nothing is left of
    the standby.

    `copies`: what happens to those of a killed standby. Records of ended services are removed. If
    both services were killed, the arbiter records that no standby may take over. Raises
    NotFoundError, RefusedError if a standby with a silent primary may have the only copy of the
    guest, TimedOutError, OperationFailedError.
    """
    hosts = tuple(hosts)
    refused_for = await _refused_for(name, hosts) if standby_is_dead else None
    found = await _sides_if_any(name, hosts, is_refused=refused_for is not None)
    if not found:
        if await commit_overlays_on(name, hosts, standby_is_dead=standby_is_dead):
            return None
        return await _declared_gone(name, refused_for)
    answering = {side.status.role: side.host for side in found if side.answers}
    if Role.STANDBY in answering and not (
        Role.PRIMARY in answering or await _is_alive_at_primary(name, found)
    ):
        raise _only_copy_may_be_on(answering[Role.STANDBY], name)
    last, has_arbiter = found[0].status, True
    for side in found:
        if side.answers and side.status.is_primary:
            last, has_arbiter = await _primary_ended(name, side, hosts, standby_is_dead)
    for side in found:
        await until_gone(side.host, name)
    await _settled(name, hosts)  # a home that is already stale does not have the guest
    if not (standby_is_dead or any(not side.status.is_primary for side in found)):
        await _require_no_other_home(name, found, hosts)
    if has_arbiter:
        last = (
            await _settle_term(name, found, hosts, copies, standby_is_dead=standby_is_dead) or last
        )
    else:
        await _settle_standbys(name, found, copies)
    stays = await _settled(name, hosts)  # what an old primary still has is stale
    others = [host for host in hosts if host.name != stays]
    asking = await _require_may_run(name, found, others, standby_is_dead=standby_is_dead)
    if await hosts_with_overlays(name, hosts):
        await commit_overlays_on(name, hosts, standby_is_dead=standby_is_dead)
    for side in found:
        if side.host.name != stays:
            await _left_by(side, name, hosts, is_kept=side.host.name == asking)
    return last


async def _left_by(side: ReplicaSide, name: str, hosts: Iterable[Host], *, is_kept: bool) -> None:
    """Return a domain to libvirt, and remove the service's files there, unless they are kept, or
    of a protection that `keep`, or another operator, has begun since.
    """
    if is_kept:
        await return_what_ended(side.host, name)
        return
    if await is_still_of(side.host, ServiceFiles.of(side.host, name), side.status.run):
        await return_to_libvirt(side.host, name, hosts)
    await _forget(name, side)


async def _settled(name: str, hosts: Iterable[Host]) -> str:
    """`settle`, as far as hosts answer; returns the host where a stale home stays, or ""."""
    try:
        with suppress(HostDownError):
            await settle(name, hosts)
    except StaleHomeStaysError as exc:
        return exc.host_name
    return ""


def _only_copy_may_be_on(standby: Host, name: str) -> RefusedError:
    return RefusedError(
        f"the primary of '{name}' does not answer",
        why=f"{standby.name} may have the only copy of the guest by now",
        remedy=f"vmckpt replicate failover {name}",
    )


async def _forget(name: str, side: ReplicaSide) -> None:
    """Remove its files, unless they are of a protection that `keep`, or another operator, has begun
    since.
    """
    files = ServiceFiles.of(side.host, name)
    if await is_still_of(side.host, files, side.status.run):
        await side.host.remove(files.path)


class _RefusedFor(NamedTuple):
    """A VM that was refused a protection because the arbiter lists `replica`."""

    vm: Vm
    replica: str


async def _refused_for(name: str, hosts: Iterable[Host]) -> _RefusedFor | None:
    """None unless one host has the VM, and no standby was to have what is there."""
    answers = await ask_every(hosts, lambda host: read_home(host, name))
    homes = [vm for vm in answers.given if vm is not None]
    if len(homes) != 1 or await homes[0].host.exists(homes[0].directory.claim):
        return None
    replica = await homes[0].host.read_text(homes[0].directory.listed_replica)
    return None if replica is None else _RefusedFor(homes[0], replica)


async def _declared_gone(name: str, one: _RefusedFor | None) -> ReplicaStatus:
    """No host has a service: both hosts of an earlier replication were lost, and the VM was
    restored or moved elsewhere. Their arbiter still lists a standby. Raises NotFoundError.
    """
    if one is None:
        raise not_replicated(name)
    vm, replica = one
    await vm.host.write_text(vm.directory.gone_replica, replica)
    await vm.host.remove(vm.directory.listed_replica)
    return ReplicaStatus(
        role=Role.PRIMARY,
        state="ended",
        vm=vm.name,
        why=f"no host had anything of it; {replica}, which the arbiter still lists, is ignored "
        f"when '{vm.name}' is protected next",
    )


async def _is_alive_at_primary(name: str, found: Iterable[ReplicaSide]) -> bool:
    """Whether the primary's host has all of the guest, although its service was killed.

    Its standby may still take over, until it is ended.
    """
    for side in found:
        if side.status.is_primary and side.status.state == DEAD:
            vm = await read_home(side.host, name)
            if vm is not None and await vm.is_alive():
                return True
    return False


async def _require_no_other_home(
    name: str, found: Iterable[ReplicaSide], hosts: Iterable[Host]
) -> None:
    """Require that no silent host has a standby that has the guest or may take it over.

    The arbiter is asked then. Raises RefusedError, HostDownError.
    """
    known = {host.name: host for host in hosts}
    for side in found:
        if not side.status.is_primary or not side.status.has_left:
            continue
        vm, standby = await read_home(side.host, name), known.get(str(side.status.standby))
        if vm is None or (standby is not None and await _answers(standby)):
            continue
        answer = await ask_about(vm)
        if answer is None:
            raise RefusedError(
                f"'{name}' was left to its standby, which may run it",
                why=f"the standby's host ({side.status.standby}) does not answer",
                remedy=f"once it is certainly off: vmckpt replicate stop {name} --standby-is-dead",
            )
        if answer.right is not Right.OURS:
            raise _not_freed(vm, answer)


async def _homes_but(name: str, host: str, hosts: Iterable[Host]) -> Answers[str]:
    """Which other hosts have the VM at home; `silent`: why some do not say."""
    answers = await ask_every(hosts, lambda one: read_home(one, name))
    given = [vm.host.name for vm in answers.given if vm is not None and vm.host.name != host]
    return Answers(given, answers.silent, answers.unanswered)


async def _require_may_run(
    name: str, found: Iterable[ReplicaSide], hosts: Iterable[Host], *, standby_is_dead: bool
) -> str:
    """Raises RefusedError while two hosts have the VM (the services' files tell them apart), or if
    its only home may not run: another host holds the term.

    The services' files are kept for a `stop` that declares the other host dead. If this home took
    over, only a silent host may hold the term, or get it while this one is off: then its files
    stay, and it asks the arbiter with them before each start. If that host is declared dead, they
    stay if the arbiter says that this one has the term. Returns that home's host, or "".
    """
    answers = await ask_every(hosts, lambda host: read_home(host, name))
    homes = [vm for vm in answers.given if vm is not None]
    if len(homes) > 1:
        raise RefusedError(
            f"{' and '.join(vm.host.name for vm in homes)} have '{name}'",
            why="the arbiter does not show which of them is older",
            remedy="if the arbiter does not answer, repeat the command when it does: "
            f"vmckpt replicate stop {name}; otherwise find out which VM is older, and remove its "
            f"directory, vms/{name}, on its host",
        )
    if not homes:
        return ""
    vm, roles = homes[0], {side.host.name: side.status.role for side in found}
    role = roles.get(vm.host.name)
    may_be_elsewhere = role is Role.STANDBY and bool(answers.silent)
    if may_be_elsewhere and standby_is_dead:
        return vm.host.name if await _has_its_term(vm) else ""
    before = await vm.host.read_text(vm.directory.claim)
    answer = await ask_about(vm) if role is Role.PRIMARY or may_be_elsewhere else None
    if answer is None:
        return ""
    if answer.right is not Right.OURS:
        raise _not_freed(vm, answer)
    if may_be_elsewhere:
        return vm.host.name
    await drop_claim(vm, before)  # the services' files, which may settle it, go
    return ""


async def _has_its_term(vm: Vm) -> bool:
    """Whether the arbiter says that its host has the term. Then a silent host that is declared dead
    may still get it: when that is back, and this one is off and declared dead in turn.
    """
    with suppress(HostDownError):
        answer = await ask_about(vm)
        return answer is not None and answer.right is Right.OURS
    return False


def _not_freed(vm: Vm, answer: ClaimAnswer) -> RefusedError:
    why = refused(vm, answer)
    return RefusedError(
        why.what,
        why=why.why,
        remedy=f"see `vmckpt vm list`; when {answer.standby} answers: repeat the command. If "
        f"it is off for good: vmckpt replicate stop {vm.name} --standby-is-dead",
    )


async def _answers(host: Host) -> bool:
    try:
        await host.exists(host.state_dir)
    except HostDownError:
        return False
    return True


async def _primary_ended(
    name: str, primary: ReplicaSide, hosts: Iterable[Host], standby_is_dead: bool
) -> tuple[ReplicaStatus, bool]:
    """End the primary's service; returns its last word, and whether the arbiter is still needed.

    One that waits for a silent arbiter continues without it, once nothing of the standby is left
    that could have the guest. If only the operator says so, and the primary has seen that the
    standby took the term, it ends as replaced instead: what it has may be older. Raises
    RefusedError if that is not certain, HostDownError if the primary waits for something else.
    """
    files = ServiceFiles.of(primary.host, name)
    is_waiting = bool(primary.status.arbiter_fails)
    try:
        return await ask(primary.host, files, "stop", ARBITER_S if is_waiting else TIMEOUT_S), True
    except HostDownError:
        now = await side_of(primary.host, name)
        if now is None or not (now.answers and now.status.arbiter_fails):
            if is_waiting:  # no longer
                return await ask(primary.host, files, "stop", TIMEOUT_S), True
            raise
    await _end_standby(name, now.status, hosts, is_dead=standby_is_dead)
    doubt = await _require_nowhere_else(name, now, hosts, is_dead=standby_is_dead)
    last = await ask(primary.host, files, GO_ALONE_UNLESS_TAKEN if doubt else GO_ALONE)
    return last, not last.is_settled


async def _end_standby(
    name: str, status: ReplicaStatus, hosts: Iterable[Host], *, is_dead: bool
) -> None:
    """End everything of the standby. Raises RefusedError if it may have the guest; with `is_dead`
    not for a silent host.
    """
    silent = f"the arbiter does not answer ({status.arbiter_fails}), nor does {status.standby}"
    host = next((host for host in hosts if host.name == status.standby), None)
    try:
        if host is None:
            raise HostDownError(str(status.standby), why="not in the inventory", remedy="add it")
        for process in await services(host, name):
            await host.kill(process)
        await end_waiting(host, name)
    except HostDownError as exc:
        if not is_dead:
            raise _not_certain(name, f"{silent} ({exc.why})") from exc


async def _require_nowhere_else(
    name: str, primary: ReplicaSide, hosts: Iterable[Host], *, is_dead: bool
) -> RefusedError | None:
    """Require that no other host has the guest, which its standby may have passed on, or a standby
    that may yet take it over; the arbiter is not asked.

    Raises RefusedError; with `is_dead` that is returned if it is about what no host reports any
    more.
    """
    others = [host for host in hosts if host.name != primary.host.name]
    # Before the homes: a standby that takes over has the guest at home before it ends.
    following = await ask_every(others, lambda one: services(one, name))
    homes = await _homes_but(name, primary.host.name, hosts)
    if homes.given:
        raise RefusedError(
            f"'{name}' is on {' and '.join(homes.given)}",
            why="it was taken over there before the arbiter stopped answering; the state on "
            f"{primary.host.name} is older",
            remedy=f"vmckpt replicate failover {name}",
        )
    if any(following.given):
        raise RefusedError(
            f"a standby of '{name}' is active",
            why="its host did not answer before, and does now",
            remedy=f"repeat the command: vmckpt replicate stop {name}",
        )
    doubt = await _doubt(name, primary, hosts, following.silent or homes.silent)
    if doubt is not None and not is_dead:
        raise doubt
    return doubt


async def _doubt(
    name: str, primary: ReplicaSide, hosts: Iterable[Host], silent: Iterable[VmckptError]
) -> RefusedError | None:
    """Why it is not certain that no other host has the guest; None: it is."""
    standby = primary.status.standby
    if standby not in {host.name for host in hosts}:
        return _not_certain(name, f"its standby's host, {standby}, is not in the inventory")
    if why := "; ".join(f"{one.what}: {one.why}" for one in silent):
        return _not_certain(name, f"neither the arbiter nor every host answers: {why}")
    status = [await last_status(host, ServiceFiles.of(host, name)) for host in hosts]
    if any(
        one.state == PROMOTED and one.run == primary.status.run for one in status if one is not None
    ):
        return _not_certain(name, "its standby took it over, and no longer has it")
    return None


def _not_certain(name: str, why: str) -> RefusedError:
    return RefusedError(
        f"where '{name}' may run is not certain",
        why=why,
        remedy="once it is certain that no host that is off, or unknown, runs it: vmckpt "
        f"replicate stop {name} --standby-is-dead",
    )


async def _settle_standbys(name: str, found: Iterable[ReplicaSide], copies: CopiesFate) -> None:
    for side in found:
        if not side.status.is_primary:
            await settle_copies(side.host, ServiceFiles.of(side.host, name), copies)


async def _settle_term(
    name: str,
    found: Iterable[ReplicaSide],
    hosts: Iterable[Host],
    copies: CopiesFate,
    *,
    standby_is_dead: bool,
) -> ReplicaStatus | None:
    """Make sure that no standby may take over, or waits to; returns what the primary's host says,
    if it was asked.

    It is asked if its service was killed, or left the guest to a standby that does not have it. How
    the services ended counts, not what they said before.
    """
    words = [
        (side, await last_status(side.host, ServiceFiles.of(side.host, name))) for side in found
    ]
    primaries = [(side, status) for side, status in words if side.status.is_primary]
    runs = {side.status.run for side, _ in primaries}
    is_left = any(_is_left(status) for _, status in primaries)
    old = {side.host.name for side, _ in primaries}
    homes = await _homes_but(name, "", hosts)
    taken, failed, last = set[str | None](), "", None
    for side, status in words:  # standbys first: they may have the term
        if side.status.is_primary:
            continue
        await end_waiting(side.host, name)
        is_home = await read_home(side.host, name) is not None
        is_taken = status is not None and status.state == PROMOTED
        # If another host has the guest that was here, do not take the term for its old primary.
        is_passed_on = bool({*homes.given} - old - {side.host.name, side.status.primary})
        is_of_no_use = _is_killed(status) or (is_left and not (is_home or is_taken))
        if is_of_no_use and not is_passed_on:
            failed = await give_up_term(side.host, name) or failed
            if failed and is_home:
                why = f"it is paused on {side.host.name}; resume it: vmckpt vm start {name}"
                last = replace(side.status, why=why)
        await settle_copies(side.host, ServiceFiles.of(side.host, name), copies)
        if is_taken and not standby_is_dead:
            taken.add(side.status.run)
    homes = await _homes_but(name, "", hosts)
    for side, status in primaries:
        is_elsewhere = any(home != side.host.name for home in homes.given)
        if not _is_left(status) or is_elsewhere or side.status.run in taken:
            continue
        if await read_home(side.host, name) is None:
            continue  # nothing here could run: the term stays with the host that has it
        is_gone = await _is_nowhere_else(
            name, side, hosts, is_dead=standby_is_dead, has_arbiter=not failed
        )
        last = await take_back_term(side.host, name, standby_is_dead=is_gone)
    if failed and not (runs or homes.given):
        raise OperationFailedError(
            f"the term of '{name}' was not given up",
            why=failed,
            remedy="fix that, and repeat the command: until then the VM cannot be resumed",
        )
    return last


async def _is_nowhere_else(
    name: str, side: ReplicaSide, hosts: Iterable[Host], *, is_dead: bool, has_arbiter: bool
) -> bool:
    """Whether no other host has the guest; False: the arbiter says who has it.

    Raises RefusedError without an arbiter, if that is not known.
    """
    try:
        await _require_nowhere_else(name, side, hosts, is_dead=is_dead)
    except RefusedError:
        if not has_arbiter:
            raise
        return False
    return True


def _is_killed(status: ReplicaStatus | None) -> bool:
    """Whether the service with this last word was killed before it could finish."""
    return status is None or not status.has_ended


def _is_left(status: ReplicaStatus | None) -> bool:
    """Whether a primary's service was killed, or left the guest to its standby."""
    return status is None or _is_killed(status) or status.has_left


async def _sides_if_any(name: str, hosts: Iterable[Host], *, is_refused: bool) -> list[ReplicaSide]:
    """Like `sides`; also none if only a silent host may have one and it is declared dead
    (`is_refused`), or there are overlays: `commit_overlays_on` asks that host, unless it is
    declared dead.
    """
    try:
        return await sides(name, hosts)
    except HostDownError:
        if is_refused or await hosts_with_overlays(name, hosts):
            return []
        raise
