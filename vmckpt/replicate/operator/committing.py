"""The operator's side of overlays: commit them to the shared disks when nothing else writes.

`replicate/disks/overlays.py` describes them, and commits them on the VM's own host.
"""

from collections.abc import Iterable
from typing import NamedTuple

from vmckpt.errors import HostDownError, NotFoundError, OperationFailedError, RefusedError
from vmckpt.hosts.every import ask_every
from vmckpt.hosts.host import Host
from vmckpt.replicate.disks.overlays import COMMIT_S, request_of
from vmckpt.replicate.operator.sides import services
from vmckpt.replicate.request import ReplicationRequest
from vmckpt.vm.paths import vm_dir
from vmckpt.vm.spec.spec import parse_spec

# Within this time a killed service's writes are flushed from its host's memory, or are unknown.
SYNC_S = 60.0


class UnmergedReplica(NamedTuple):
    """A host with overlays, and their replication."""

    host: Host
    request: ReplicationRequest


async def commit_overlays_on(
    name: str, hosts: Iterable[Host], *, standby_is_dead: bool = False
) -> bool:
    """Commit the VM's overlays to its shared disks; False: there are none.

    Raises RefusedError (the standby's service runs, or its writes are not on storage),
    HostDownError (the standby's host does not answer: it may still write), OperationFailedError
    (another host has the VM's term, the storage fails, or the overlays' replication is unknown):
    the overlays stay.
    """
    known = {host.name: host for host in hosts}
    answers = await ask_every(known.values(), lambda host: _overlays_on(host, name))
    found = [one for one in answers.given if one is not None]
    unclear = [exc for exc in answers.silent if isinstance(exc, OperationFailedError)]
    if unclear and not found:
        raise unclear[0]
    for one in found:
        if not standby_is_dead:
            await _require_ended(one.request, known)
        directory = vm_dir(one.host.state_dir, name).overlays
        command = [*await one.host.own_command(), "replica", "fold", str(directory)]
        done = await one.host.run(command, COMMIT_S)
        if done.returncode:
            raise OperationFailedError(
                f"what '{name}' wrote is not yet on its shared disks",
                why="; ".join(done.stderr.strip().splitlines()) or f"exit {done.returncode}",
                remedy=f"fix that, and repeat the command: the overlay stays in {directory} "
                "until then",
            )
    return bool(found)


async def hosts_with_overlays(name: str, hosts: Iterable[Host]) -> list[UnmergedReplica]:
    """The hosts that have overlays of the VM, among those that answer."""
    answers = await ask_every(hosts, lambda host: _overlays_on(host, name))
    return [one for one in answers.given if one is not None]


async def _overlays_on(host: Host, name: str) -> UnmergedReplica | None:
    path = vm_dir(host.state_dir, name).overlays_request
    text = await host.read_text(path)
    return None if text is None else UnmergedReplica(host, request_of(text, path))


async def _require_ended(request: ReplicationRequest, known: dict[str, Host]) -> None:
    """Require that neither the standby nor its host for it still writes to the shared disks."""
    name, standby = request.vm, request.standby.name
    remedy = (
        f"when it answers again: vmckpt replicate stop {name}; if it is certainly off: "
        "--standby-is-dead. Until then the VM continues with its overlay"
    )
    if standby not in known:
        raise NotFoundError(
            f"there is no host '{standby}'",
            why=f"it was the standby of '{name}', and may still write to the disks that it shares",
            remedy=remedy,
        )
    try:
        left = await services(known[standby], name)
        unwritten = "" if left else await _unwritten(known[standby], request)
    except HostDownError as exc:
        raise HostDownError(
            f"{standby} may still write to the disks of '{name}'",
            why=f"it was its standby, and does not answer: {exc.why}",
            remedy=remedy,
        ) from exc
    if left:
        raise RefusedError(
            f"{standby} may still write to the disks of '{name}'",
            why=f"its service runs there: pid {left[0].pid}",
            remedy=f"end the replication: vmckpt replicate stop {name}",
        )
    if unwritten:
        raise RefusedError(
            f"{standby} may still write to the disks of '{name}'",
            why=f"its service's writes may still be in the host's memory: {unwritten}",
            remedy=f"restore access to its storage; {remedy}",
        )


async def _unwritten(standby: Host, request: ReplicationRequest) -> str:
    """Have the host flush the shared disks from its page cache; returns why it could not.

    A network file system may do that long after the process was killed.
    """
    home = vm_dir(standby.state_dir, request.vm)
    spec = parse_spec(request.spec, str(home.spec), home.path)
    paths = [spec.disks[disk.number].on(standby.state_dir) for disk in request.disks]
    done = await standby.run(["sync", "-d", *map(str, paths)], SYNC_S)
    if not done.returncode:
        return ""
    return "; ".join(done.stderr.strip().splitlines()) or f"sync: exit {done.returncode}"
