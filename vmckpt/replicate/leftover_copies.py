"""Copies of disks that are of no use any more, on whichever host."""

from pathlib import Path

from vmckpt.errors import OperationFailedError
from vmckpt.hosts.host import Host
from vmckpt.replicate.disks.copies import discard
from vmckpt.replicate.request import Files, read_request
from vmckpt.vm.paths import vm_dir
from vmckpt.vm.spec import parse_spec


async def discard_copies(host: Host, files: Files, *, of_this_run: bool = False) -> None:
    """Have `host` remove the copies of which the request there tells, or this run's only.

    A disk that was the VM's own once stays. Raises HostDownError, OperationFailedError.
    """
    if not await host.exists(files.request):
        return
    role = "undo" if of_this_run else "discard"
    done = await host.run([*await host.own_command(), "replica", role, str(files.path)])
    if done.returncode:
        raise OperationFailedError(
            f"{host.name} could not remove its copies of the disks",
            why=done.stderr.strip() or f"exit status {done.returncode}",
            remedy="mend that, and the same again",
        )


def discard_here(directory: Path, *, of_this_run: bool) -> None:
    """The same, on that host itself."""
    request = read_request(directory)
    home = vm_dir(request.standby.state_dir, request.vm)
    if home.current.exists():
        return  # the VM is at home here, and these are its disks
    spec = parse_spec(request.spec, str(home.spec), home.path)
    paths = [spec.disks[disk.number].on(request.standby.state_dir) for disk in request.disks]
    discard(paths, request.vm, request.run if of_this_run else None)
