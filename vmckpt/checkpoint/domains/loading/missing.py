"""The memory of a domain that is loaded while its guest runs: what is recorded of it."""

from pathlib import Path

from vmckpt.checkpoint.restore.paging import MISSING, see_to_pages
from vmckpt.errors import VmLostError
from vmckpt.hosts.host import Host
from vmckpt.state.documents import load_from
from vmckpt.vm.domains.running import domain_dir
from vmckpt.vm.paths import IN_MEMORY, QemuDir
from vmckpt.vm.record import Platform, Qemu

_PAGES = "pages"


def paging_files(host: Host, uuid: str, name: str = "") -> QemuDir:
    """The files of the pager of a domain; its `name` for errors."""
    return QemuDir(domain_dir(host, uuid).path / _PAGES, name or uuid, _PAGES)


def key_of(uuid: str) -> Path:
    """Where the secret of an encrypted store is kept for a domain's pagers."""
    return QemuDir(Path(), uuid, _PAGES).memory(IN_MEMORY) / "key"


async def see_to_memory(host: Host, uuid: str, name: str = "") -> None:
    """Wait until the domain's memory is complete, replacing a pager that died; remove its files.

    Raises VmLostError (its files are removed, too), OperationFailedError, StorageError.
    """
    files = paging_files(host, uuid, name)
    if not await host.exists(files.path):
        return
    missing = await load_from(host, files.missing, MISSING)
    if missing is not None and missing.qemu is not None:
        try:
            await see_to_pages(host, Qemu(files, missing.qemu, Platform("", "", "")))
        except VmLostError:
            await forget_paging(host, uuid)
            raise
    await forget_paging(host, uuid)


async def forget_paging(host: Host, uuid: str) -> None:
    """Remove the files."""
    await host.remove(key_of(uuid).parent)
    await host.remove(paging_files(host, uuid).path)
