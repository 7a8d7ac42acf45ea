"""The destination's new disk files: marked with the run's id, removed only with that mark.

Until the commit a file has two names, PATH and PATH.vmckpt-RUN; the second proves that the first is
this run's. Every function may be repeated after an interruption anywhere.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vmckpt.errors import OperationFailedError, StorageError
from vmckpt.hosts.host import Host
from vmckpt.vm.create import create_image
from vmckpt.vm.paths import PROOF_SUFFIX
from vmckpt.vm.users.path_user import path_user, remove_as

if TYPE_CHECKING:
    from vmckpt.preflight.migration.disks import DiskCopy


@dataclass(frozen=True, slots=True)
class MovedDisk:
    """A copied disk's paths on source and destination, as the journal records them.

    `keep`: the source's file stays after the VM has moved.
    """

    source: str
    target: str
    keep: bool = False


async def create_files(host: Host, vm: str, run: str, copies: "Iterable[DiskCopy]") -> None:
    """Create an empty image for every copy of the VM's disks.

    An existing file is replaced only if it is a leftover of the same VM. Raises
    OperationFailedError.
    """
    for copy in copies:
        proof = _proof(copy.target, run)
        if not await host.exists(copy.target.parent):
            await host.make_dir(copy.target.parent)
        if copy.replaces:
            from vmckpt.vm.disks.superseded import is_superseded

            if await is_superseded(host, vm, copy.target):
                await host.remove(copy.target)
        await create_image(host, proof, copy.format, copy.size_bytes)
        # A link fails if the name was taken meanwhile; a rename would replace that file.
        done = await host.run(["ln", "-T", "--", str(proof), str(copy.target)])
        if done.returncode:
            raise OperationFailedError(
                f"cannot create {copy.target} on {host.name}",
                why=done.stderr.strip(),
                remedy="remove or rename the existing file",
            )
        # The file must be found by this name when the source's image is gone.
        await host.run(["sync", "--", str(copy.target.parent)])


async def remove_files(host: Host, run: str, disks: Iterable[MovedDisk]) -> None:
    """Undo `create_files`; files that are not provably this run's stay."""
    for path in (Path(disk.target) for disk in disks):
        proof = _proof(path, run)
        if not await host.exists(proof):
            continue
        same = await host.run(["test", str(path), "-ef", str(proof)])
        if same.returncode == 0:
            await host.remove(path)
        await host.remove(proof)


async def keep_files(host: Host, run: str, disks: Iterable[MovedDisk]) -> None:
    """Protect the files from undo: it is unknown which copies are newer."""
    for disk in disks:
        await host.remove(_proof(Path(disk.target), run))


async def hand_over_files(
    source: Host,
    destination: Host,
    run: str,
    disks: Iterable[MovedDisk],
    note: Callable[[str], None],
) -> None:
    """The VM is on the destination: protect its files there from undo, and remove the source's.

    `note` gets files that cannot be removed.
    """
    disks = tuple(disks)
    await keep_files(destination, run, disks)
    for disk in disks:
        if disk.keep:
            continue
        path = Path(disk.source)
        try:
            user = await path_user(source, path)
            for stale in dict.fromkeys((await source.resolve(path), path)):
                await remove_as(source, user, stale)
        except StorageError as exc:
            note(f"the VM's old image stays: {exc}")


def _proof(path: Path, run: str) -> Path:
    return path.with_name(f"{path.name}{PROOF_SUFFIX}{run}")
