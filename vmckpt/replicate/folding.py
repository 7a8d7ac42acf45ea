"""The operator's side of what stands aside: it reaches the shared disks when nobody else can write.

`disks/aside.py` says what it is, and does it, on the VM's own host.
"""

from collections.abc import Iterable
from typing import NamedTuple

from vmckpt.errors import HostDownError, NotFoundError, OperationFailedError, RefusedError
from vmckpt.hosts.every import ask_every
from vmckpt.hosts.host import Host
from vmckpt.replicate.disks.aside import request_file
from vmckpt.replicate.request import Request
from vmckpt.replicate.sides import services
from vmckpt.vm.paths import vm_dir

# Of a large disk, on slow storage.
FOLD_S = 24 * 3600.0


class Aside(NamedTuple):
    """A host on which something stands aside, and the name of the one that may write there too."""

    host: Host
    standby: str


async def fold_there(name: str, hosts: Iterable[Host], *, standby_is_dead: bool = False) -> bool:
    """Have what the VM wrote aside written to its shared disks; False: nothing stands aside.

    Raises RefusedError (the standby's service runs), HostDownError (the standby's host gives no
    answer: it may still write), OperationFailedError (the VM's term is another's, or the storage
    fails): what stands aside stays.
    """
    known = {host.name: host for host in hosts}
    found = await stand_aside(name, known.values())
    for one in found:
        await _require_ended(name, one.standby, known, standby_is_dead=standby_is_dead)
        directory = vm_dir(one.host.state_dir, name).aside
        command = [*await one.host.own_command(), "replica", "fold", str(directory)]
        done = await one.host.run(command, FOLD_S)
        if done.returncode:
            raise OperationFailedError(
                f"what '{name}' wrote is not on its shared disks yet",
                why="; ".join(done.stderr.strip().splitlines()) or f"exit {done.returncode}",
                remedy=f"mend that, and the same again: it stays in {directory} until then",
            )
    return bool(found)


async def stand_aside(name: str, hosts: Iterable[Host]) -> list[Aside]:
    """Where something of the VM stands aside, of the hosts that answer."""
    answers = await ask_every(hosts, lambda host: _aside(host, name))
    return [one for one in answers.given if one is not None]


async def _aside(host: Host, name: str) -> Aside | None:
    text = await host.read_text(request_file(vm_dir(host.state_dir, name)))
    return None if text is None else Aside(host, Request.from_text(text).standby.name)


async def _require_ended(
    name: str, standby: str, known: dict[str, Host], *, standby_is_dead: bool
) -> None:
    """Nothing of the standby's writes to the shared disks any more."""
    remedy = (
        f"when it answers again: vmckpt replicate stop {name}; if it is certain that it is off: "
        "--standby-is-dead. Until then the VM goes on with what it wrote standing aside"
    )
    if standby_is_dead:
        return
    if standby not in known:
        raise NotFoundError(
            f"there is no host '{standby}'",
            why=f"it was the standby of '{name}', and may still write to the disks that it shares",
            remedy=remedy,
        )
    try:
        left = await services(known[standby], name)
    except HostDownError as exc:
        raise HostDownError(
            f"{standby} may still write to the disks of '{name}'",
            why=f"it was its standby, and gives no answer: {exc.why}",
            remedy=remedy,
        ) from exc
    if left:
        raise RefusedError(
            f"{standby} may still write to the disks of '{name}'",
            why=f"its service runs there: pid {left[0].pid}",
            remedy=f"end the replication: vmckpt replicate stop {name}",
        )
