"""vmckpt checkpoint export-disk, export, serve-disk, mount: what it holds, outside a VM."""

import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vmckpt.cli.loop import run_until_interrupted
from vmckpt.cli.options.checkpoint_options import Point
from vmckpt.cli.options.stores import Stored
from vmckpt.cli.options.together import together
from vmckpt.cli.options.which_checkpoint import find
from vmckpt.cli.output import Json, run, show, warn
from vmckpt.ui.verbosity import is_plain, is_quiet

if TYPE_CHECKING:
    from vmckpt.errors import VmckptError

DiskName = Annotated[str, typer.Argument(help="Disk: disk-0, disk-1, ..., or its image's path.")]
EVERY_S = 1.0


@together
def export_disk(
    point: Point,
    disk: DiskName,
    file: Annotated[Path, typer.Argument(help="Image to create; must not exist.")],
    format_: Annotated[
        str | None,
        typer.Option(
            "--format", help="qcow2 or raw. [default: by the file's name]", metavar="FORMAT"
        ),
    ] = None,
    *,
    stored: Stored,
    json: Json = False,
) -> None:
    """Write one disk of a checkpoint to an image file.

    The file is sparse; all content is verified.
    """
    from vmckpt.checkpoint.disks.export import ExportFile, format_of
    from vmckpt.checkpoint.disks.export import export_disk as export_disk_
    from vmckpt.units import format_size

    kind, destination = format_of(file, format_), file.absolute()
    key = stored.key()
    found = find(point, stored.store, key)
    with progress("exporting", quiet=json) as moved:
        done = run(export_disk_(found, disk, ExportFile(destination, kind), moved, key))
    facts = {
        "checkpoint": found.id,
        "disk": done.disk.name,
        "file": str(destination),
        "format": done.format,
        "size_bytes": done.disk.size_bytes,
        "written_bytes": done.written_bytes,
    }
    text = (
        f"{done.disk.name} of {found.name} is in {destination}: {done.format}, "
        f"{format_size(done.disk.size_bytes)}, {format_size(done.written_bytes)} of it not zero"
    )
    show(facts, text, as_json=json)


@together
def export(
    point: Point,
    directory: Annotated[Path, typer.Argument(help="Directory to create; must not exist.")],
    format_: Annotated[
        str,
        typer.Option(
            "--format",
            help="libvirt-save: for `virsh restore`, with all disks as images.",
            metavar="FORMAT",
        ),
    ] = "libvirt-save",
    *,
    stored: Stored,
    json: Json = False,
) -> None:
    """Write a libvirt domain's checkpoint to files for libvirt.

    Memory and devices become a save image, which `virsh restore` continues; disks become images
    beside it, named in the image's XML. All content is verified.
    """
    from vmckpt.checkpoint.domains.export import LIBVIRT_SAVE, export_domain
    from vmckpt.checkpoint.operate import standing
    from vmckpt.errors import UsageError
    from vmckpt.units import format_size

    if format_ != LIBVIRT_SAVE:
        raise UsageError(
            f"--format {format_} is unknown",
            why=f"the only format is {LIBVIRT_SAVE}",
            remedy="use it, or omit --format; for a single disk: vmckpt checkpoint export-disk",
        )
    key = stored.key()
    found = find(point, stored.store, key)
    if run(standing(found)).foreign:
        warn(
            "warning: this site has not taken it: read what libvirt would open before you restore "
            "it: virsh save-image-dumpxml"
        )
    with progress("exporting", quiet=json) as moved:
        done = run(export_domain(found, directory.absolute(), moved, key))
    text = (
        f"{done.domain} as of {found.name} is in {done.directory}, "
        f"{format_size(done.written_bytes)}; to continue it, with its images where they are now:\n"
        f"  virsh restore {shlex.quote(str(done.image))}"
    )
    if done.definition is not None:
        text += f"\n  virsh define {shlex.quote(str(done.definition))}"
    show({"checkpoint": found.id, **done.to_json()}, text, as_json=json)


@together
def serve_disk(
    point: Point,
    socket: Annotated[Path, typer.Argument(help="Unix socket to create; must not exist.")],
    *,
    stored: Stored,
    json: Json = False,
) -> None:
    """Serve a checkpoint's disks over NBD, read-only.

    Until Ctrl-C; exports disk-0, disk-1, ...
    """
    import asyncio

    from vmckpt.checkpoint.disks.serve_disks import served

    key = stored.key()
    found, path = find(point, stored.store, key), socket.absolute()

    async def serve() -> None:
        async with served(found, path, unreadable, key) as disks:
            names = [disk.name for disk in disks]
            lines = [f"nbd+unix:///{name}?socket={path}" for name in names]
            facts = {"checkpoint": found.id, "socket": str(path), "exports": names}
            show(facts, "\n".join([*lines, "Ctrl-C ends it"]), as_json=json)
            await asyncio.Event().wait()

    run_until_interrupted(serve())


@together
def mount(
    point: Point,
    folder: Annotated[Path, typer.Argument(help="Mount point: an empty directory.", metavar="DIR")],
    *,
    stored: Stored,
    json: Json = False,
) -> None:
    """Mount a checkpoint's disks as raw images (FUSE).

    Read-only, until Ctrl-C or umount.
    """
    from vmckpt.checkpoint.disks.mount import mount as mount_

    key = stored.key()
    found, path = find(point, stored.store, key), folder.absolute()

    def mounted(names: list[str]) -> None:
        files = [str(path / name) for name in names]
        facts = {"checkpoint": found.id, "files": files}
        show(facts, "\n".join([*files, f"Ctrl-C, or `umount {folder}`, ends it"]), as_json=json)

    run_until_interrupted(mount_(found, path, unreadable, mounted, key))


def unreadable(error: "VmckptError") -> None:
    """Tell of a read that failed; who reads only gets an I/O error."""
    warn(f"cannot be read: {error.what}: {error.why}")


@contextmanager
def progress(verb: str, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Bytes done, and of how many: one line that is replaced, or one a second without a terminal.

    The function may be called in any thread.
    """
    from vmckpt.units import format_size

    live, shown_s = sys.stderr.isatty() and not is_plain(), 0.0

    def moved(done: int, total: int) -> None:
        nonlocal shown_s
        now_s = time.monotonic()
        if quiet or is_quiet() or (now_s - shown_s < (0.1 if live else EVERY_S) and done < total):
            return
        shown_s = now_s
        share = 100 * done // total if total else 100
        text = f"  {verb}: {format_size(done)} of {format_size(total)} ({share} %)"
        if live:
            print(f"\r{text:<60}", end="", file=sys.stderr, flush=True)
        else:
            warn(text)

    try:
        yield moved
    finally:
        if live and shown_s:
            print(file=sys.stderr, flush=True)
