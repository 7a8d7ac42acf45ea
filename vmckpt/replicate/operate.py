"""The operator's side of a replication that is under way: end it, or have the standby take over."""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

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
from vmckpt.replicate.claim import ask_about, is_of_this_home, refused, require_right
from vmckpt.replicate.control import ask
from vmckpt.replicate.folding import fold_there, stand_aside
from vmckpt.replicate.leftover_copies import Fate, settle_copies
from vmckpt.replicate.leftovers import end_waiting, remove_stale_home
from vmckpt.replicate.request import ENDED, PROMOTED, Files, has_left
from vmckpt.replicate.sides import (
    BEGIN_S,
    Side,
    last_word,
    not_replicated,
    services,
    side_of,
    sides,
    until_gone,
    while_there_is,
)
from vmckpt.vm.inventory import Vm, look, read_vm
from vmckpt.vm.start import Replaced


async def stop(
    name: str,
    hosts: Iterable[Host],
    copies: Fate = Fate.DISCARD,
    *,
    standby_is_dead: bool = False,
) -> dict[str, Any]:
    """End the VM's replication: it runs on where it is, unprotected.

    What it wrote to shared disks is on them then. `standby_is_dead`: the operator says that a
    standby's host which gives no answer does nothing more.

    `copies`: what becomes of those of a standby that was killed. What services that have ended left
    to read goes too. When both were killed the arbiter is told that no standby may take over any
    more. Raises NotFoundError, RefusedError when a standby whose primary is silent may have the
    only copy of the guest, TimedOutError, OperationFailedError.
    """
    hosts = tuple(hosts)
    found = await _sides_if_any(name, hosts)
    if not found:
        if await fold_there(name, hosts, standby_is_dead=standby_is_dead):
            return {"vm": name, "why": "what it wrote is on its shared disks"}
        raise not_replicated(name)
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
        await until_gone(side.host, name)
    if not (standby_is_dead or any(side.status["role"] == "standby" for side in found)):
        await _require_no_other_home(name, found)
    last = await _settle_term(name, found, copies, standby_is_dead=standby_is_dead) or last
    if await stand_aside(name, hosts):
        with suppress(HostDownError):  # an old primary's is nobody's, and goes
            await settle(name, hosts)
        await fold_there(name, hosts, standby_is_dead=standby_is_dead)
    for side in found:
        await side.host.remove(Files.of(side.host, name).path)
    return last


async def _settle_term(
    name: str, found: Iterable[Side], copies: Fate, *, standby_is_dead: bool
) -> dict[str, Any] | None:
    """No standby may take over any more, nor waits; what the primary's host says, if it was asked.

    It is when its service was killed, or left the guest to a standby that does not have it.
    """
    has_it, last = not standby_is_dead, None
    for side in sorted(found, key=lambda side: side.status["role"] == "primary"):
        is_killed = not await _has_ended(side.host, name)
        if side.status["role"] == "standby":  # the first: it may have the term
            has_it = side.status["state"] == PROMOTED
            await end_waiting(side.host, name)
            if is_killed:
                await _abandoned(side.host, name)
            await settle_copies(side.host, Files.of(side.host, name), copies)
        elif is_killed or (has_left(side.status) and not has_it):
            last = await _released(side.host, name, standby_is_dead=standby_is_dead)
    return last


async def _require_no_other_home(name: str, found: Iterable[Side]) -> None:
    """Nobody but a host that answers has the guest. Raises RefusedError, HostDownError.

    For a primary that was replaced while its standby's host is silent: the arbiter is asked.
    """
    for side in found:
        if side.status["role"] == "primary" and has_left(side.status):
            vm = await read_vm(side.host, name)
            answer = None if vm is None else await ask_about(vm)
            if vm is not None and answer is not None and answer.right is not Right.OURS:
                raise refused(vm, answer)


async def _sides_if_any(name: str, hosts: Iterable[Host]) -> list[Side]:
    """As `sides`; none too where only a host that gives no answer may know of one, and something
    stands aside: `fold_there` asks more of that host, unless it is said to be dead.
    """
    try:
        return await sides(name, hosts)
    except HostDownError:
        if await stand_aside(name, hosts):
            return []
        raise


async def _has_ended(host: Host, name: str) -> bool:
    """Whether a service there said at its end that nothing is left to be done."""
    said = await last_word(host, Files.of(host, name))
    return said is not None and said["state"] in ENDED


async def _released(host: Host, name: str, *, standby_is_dead: bool = False) -> dict[str, Any]:
    """Have the host of a primary that was killed take its term back; what it says then.

    From a standby that took it only when the operator says that it is dead.
    """
    files = Files.of(host, name)
    log = files.path / "release.log"
    command = [*await host.own_command(), "replica", "release", str(files.path)]
    process = await host.spawn([*command, *["--standby-is-dead"] * standby_is_dead], log)
    late = TimedOutError(
        f"the term of '{name}' was not taken back within {BEGIN_S:g} s",
        why="the arbiter gives no answer, or another works on the VM",
        remedy=f"see to the arbiter: {host.name} goes on trying; then the same again",
    )
    await while_there_is(lambda: host.is_alive(process), late)
    said = await last_word(host, files)
    if said is None or said["state"] not in ENDED:
        words = (await host.read_text(log) or "").strip().splitlines()
        raise OperationFailedError(
            f"the term of '{name}' was not taken back",
            why="; ".join(words[-3:]) or "its process ended without a word",
            remedy="mend that, and the same again: until then a standby may take over",
        )
    return said


async def _abandoned(host: Host, name: str) -> None:
    """Have the host of a standby that was killed give up a term that it took for nothing."""
    directory = Files.of(host, name).path
    done = await host.run(
        [*await host.own_command(), "replica", "abandon", str(directory)], BEGIN_S
    )
    if done.returncode:
        raise OperationFailedError(
            f"the term of '{name}' was not given up",
            why="; ".join(done.stderr.strip().splitlines()) or f"exit {done.returncode}",
            remedy="mend that, and the same again: until then nobody can go on with the VM",
        )


async def failover(name: str, hosts: Iterable[Host]) -> dict[str, Any]:
    """Have the standby go on with the guest; its status then, with `warnings`.

    A primary that answers hands the guest over, and nothing is lost. Raises NotFoundError,
    OperationFailedError when the standby did not take over (the error says why), TimedOutError when
    it still waits until it may, OutcomeUnknownError when it has the guest, which does not run.
    """
    hosts = tuple(hosts)
    found = await sides(name, hosts)
    standby = await _standby_of(name, found)
    status = standby.status
    if status["state"] != PROMOTED:
        status = await _taken_over(name, standby, found)
    warnings = await _left(name, status, hosts)
    if status["took_over_ms"] is None and not await _runs_by_now(standby.host, name):
        raise OutcomeUnknownError(
            f"{standby.host.name} has '{name}', which does not run there",
            why="; ".join([str(status["why"]), *warnings]),
            remedy=f"vmckpt vm start {name}",
        )
    return status | {"warnings": warnings}


async def _runs_by_now(standby: Host, name: str) -> bool:
    """Whether the guest, which the standby could not let run, was started there since."""
    home = await read_vm(standby, name)
    return home is not None and (await look(home)).state == "running"


async def _standby_of(name: str, found: Iterable[Side]) -> Side:
    """Who is to take over, or has: of a primary that answers its own, not an earlier one's.

    Raises NotFoundError, OperationFailedError.
    """
    of_now = [
        side
        for side in found
        if side.status["role"] == "standby"
        if side.status["state"] != PROMOTED or await _is_at_home(name, side)
    ]
    primaries = [side.status for side in found if side.answers and side.status["role"] == "primary"]
    if primaries:
        runs = {told["run"] for told in primaries}
        of_now = [side for side in of_now if side.status["run"] in runs]
        if not of_now:
            raise OperationFailedError(
                f"nobody was asked to take '{name}' over",
                why=f"{primaries[0]['standby']}, which protects it, says nothing of it",
                remedy=f"see to that host, and `vmckpt replicate status {name}`",
            )
    if not of_now:
        raise not_replicated(name)
    # One that has the guest at home has it from nobody who came later.
    return min(of_now, key=lambda side: (side.status["state"] != PROMOTED, not side.answers))


async def _is_at_home(name: str, promoted: Side) -> bool:
    """Whether the guest is still where that standby took it over; else it has moved on since."""
    home = await read_vm(promoted.host, name)
    return home is not None and home.qemu.files.qemu_id == promoted.status["qemu_id"]


async def _taken_over(name: str, standby: Side, found: Iterable[Side]) -> dict[str, Any]:
    """Have it take over, and its primary hand over; its status then. Raises as `failover` does."""
    for side in found:
        told = side.status
        if side.answers and told["role"] == "primary" and told["run"] == standby.status["run"]:
            with suppress(HostDownError):  # it died over it: the standby sees to that
                await ask(side.host, Files.of(side.host, name), "failover")
    files = Files.of(standby.host, name)
    with suppress(HostDownError):  # it may have taken over already, and ended
        await ask(standby.host, files, "failover")
    await _await_decision(standby.host, name)
    status = (await last_word(standby.host, files)) or standby.status
    if status["state"] != PROMOTED:
        raise OperationFailedError(
            f"{standby.host.name} did not take '{name}' over",
            why=str(status["why"]) or "its service has ended without a word",
            remedy="see `vmckpt replicate status` and `vmckpt vm list`",
        )
    return status


async def _left(name: str, status: dict[str, Any], hosts: Iterable[Host]) -> list[str]:
    """Remove what the old primary has; what is to be said of one that does not answer."""
    try:
        await settle(name, hosts)
    except HostDownError as exc:
        old = status["primary"]
        return [
            f"{old} gives no answer ({exc.why}): what it still has of '{name}' is removed by the "
            "next command that finds it there, and never run"
        ]
    return []


async def settle(name: str, hosts: Iterable[Host]) -> bool:
    """End and remove what the old primary still has of a VM that its standby has taken over.

    False when no standby has. Raises HostDownError when the old primary does not answer.
    """
    all_hosts = tuple(hosts)
    if await _settled_by_homes(name, all_hosts):
        return True
    for side in await sides(name, all_hosts):
        told = side.status
        if told["role"] != "standby" or told["state"] != PROMOTED:
            continue
        if not await _is_at_home(name, side):
            continue
        for host in all_hosts:
            if host.name == told["primary"] and host.name != side.host.name:
                await remove_stale_home(host, name, told["primary_qemu_id"])
        return True
    return False


async def _settled_by_homes(name: str, hosts: Iterable[Host]) -> bool:
    """The same by what a VM's home says that it replaced, services or not."""
    answers = await ask_every(hosts, lambda host: read_vm(host, name))
    homes = [vm for vm in answers.given if vm is not None]
    for vm in homes:
        for other in homes:
            if vm.qemu.replaces == Replaced(other.host.name, other.qemu.files.qemu_id):
                await remove_stale_home(other.host, name, other.qemu.files.qemu_id)
                return True
    return False


async def require_decided(vm: Vm) -> None:
    """Return when no standby has, or may still take, a VM that is off here.

    The arbiter is asked wherever one may. Raises RefusedError, HostDownError (it does not answer).
    """
    side = await side_of(vm.host, vm.name)
    has_claim = await vm.host.exists(vm.directory.claim)
    is_over = side is None or side.status["role"] != "primary" or side.status["state"] in ENDED
    if has_claim and is_over:
        await require_right(vm)
        return
    if side is None or (is_over and not (has_left(side.status) and await is_of_this_home(vm))):
        return
    raise RefusedError(
        f"a standby may be about to go on with '{vm.name}'",
        why=f"its replication from {vm.host.name} was cut off, and its end is not known there",
        remedy=f"vmckpt replicate failover {vm.name}; if the standby is gone for good: "
        f"vmckpt replicate stop {vm.name}",
    )


async def _await_decision(standby: Host, name: str) -> None:
    """Wait until the standby's service has ended. Raises TimedOutError: it is left to go on."""
    late = TimedOutError(
        f"{standby.name} has not taken '{name}' over within {BEGIN_S:g} s",
        why="it may not before it is certain that the primary cannot act any more",
        remedy="it goes on trying: see to the arbiter, and `vmckpt replicate status`",
    )
    await while_there_is(lambda: services(standby, name), late)
