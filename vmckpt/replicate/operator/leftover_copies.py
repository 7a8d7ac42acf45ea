"""Copies of disks that are no longer needed, on any host."""

from enum import StrEnum
from pathlib import Path

from vmckpt.errors import HostDownError, OperationFailedError, RefusedError
from vmckpt.hosts.host import Host
from vmckpt.replicate.disks.copies import discard, keep
from vmckpt.replicate.request import ReplicationRequest, ServiceFiles, read_request
from vmckpt.state.durable import storage_errors
from vmckpt.vm.disks.images import disk_of_others, standby_users
from vmckpt.vm.paths import vm_dir
from vmckpt.vm.spec.spec import parse_spec


class CopiesFate(StrEnum):
    """What happens to the copies named in a request; a disk that was the VM's own stays."""

    DISCARD = "discard"
    # Remove those of this run; others existed before.
    UNDO = "undo"
    # The next standby reuses them.
    KEEP = "keep"


async def settle_copies(host: Host, files: ServiceFiles, fate: CopiesFate) -> None:
    """Have `host` do so with its copies. Raises HostDownError, OperationFailedError."""
    if not await host.exists(files.request):
        return
    done = await host.run([*await host.own_command(), "replica", fate.value, str(files.path)])
    if done.returncode:
        raise OperationFailedError(
            f"{host.name} could not settle its copies of the disks",
            why=done.stderr.strip() or f"exit status {done.returncode}",
            remedy="fix that, and repeat the command",
        )


async def settle_here(directory: Path, fate: CopiesFate) -> None:
    """Like `settle_copies`, on that host itself. What is another VM's disk by now stays."""
    request = read_request(directory)
    home = vm_dir(request.standby.state_dir, request.vm)
    if home.current.exists():
        return  # the VM is at home here, and these are its disks
    if request.shares_disks:
        return  # no copies: these are the disks themselves
    spec = parse_spec(request.spec, str(home.spec), home.path)
    paths = [spec.disks[disk.number].on(request.standby.state_dir) for disk in request.disks]
    with storage_errors(f"settle the copies of the disks of '{request.vm}'"):
        if fate is CopiesFate.KEEP:
            keep(paths, request.vm)
        else:
            own = [path for path in paths if not await _is_others(request, path)]
            discard(own, request.vm, request.run if fate is CopiesFate.UNDO else None)


async def _is_others(request: ReplicationRequest, path: Path) -> bool:
    """Whether another VM has it, or may have it, as its disk; it need not run."""
    try:
        own = standby_users(request.vm)
        return bool(await disk_of_others(request.standby, path, own))
    except (HostDownError, RefusedError):
        return True
