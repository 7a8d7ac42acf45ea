"""Export a domain's checkpoint for a libvirt without vmckpt: a save image, and its disks' images.

`virsh restore DIRECTORY/memory.save` continues the guest. On the operator's machine.
"""

import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from vmckpt.checkpoint.catalogue.catalogue import CatalogueEntry
from vmckpt.checkpoint.catalogue.location import Key, opened
from vmckpt.checkpoint.disks.qcow2 import while_wanted, write_image
from vmckpt.checkpoint.domains.loading.save_image import variables_bytes, write_save_image
from vmckpt.checkpoint.domains.planned import ImageLocations, PlannedDomain, plan_itself
from vmckpt.checkpoint.facts import usable_facts
from vmckpt.errors import RefusedError, StorageError
from vmckpt.sequence.in_thread import until_cancelled
from vmckpt.state.durable import sync_directory
from vmckpt.store.store import Store
from vmckpt.vm.domains.definition.rewritten import VARIABLES

IMAGE, DEFINITION = "memory.save", "domain.xml"
LIBVIRT_SAVE = "libvirt-save"
# Others may not list it, but libvirt's QEMU reaches the images in it, which become that user's.
_MODE = 0o711
Moved = Callable[[int, int], None]


class ExportedDomain(NamedTuple):
    """A finished export: files in `directory`. `definition`: None for a transient domain."""

    domain: str
    directory: Path
    image: Path
    definition: Path | None
    disks: tuple[Path, ...]
    written_bytes: int

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        facts = {name: str(value) for name, value in self._asdict().items() if value is not None}
        disks = [str(path) for path in self.disks]
        return {**facts, "disks": disks, "written_bytes": self.written_bytes}


async def export_domain(
    entry: CatalogueEntry, directory: Path, moved: Moved, key: Key = None
) -> ExportedDomain:
    """Export to a directory that must not exist; `moved` receives the bytes of memory done, and the
    total.

    Until it is complete it is named `.DIRECTORY.part-...`; after an error or a cancellation nothing
    remains. Raises RefusedError (it exists, or the checkpoint is not of a domain), NotFoundError,
    DamagedError, StorageError.
    """
    _require_new(directory)
    async with opened(entry.location, key) as store:

        def work(still_wanted: Callable[[], None]) -> ExportedDomain:
            return _export(store, entry.id, directory, moved, still_wanted)

        return await until_cancelled(work)


def _export(
    store: Store,
    checkpoint_id: str,
    directory: Path,
    moved: Moved,
    still_wanted: Callable[[], None],
) -> ExportedDomain:
    with store.read(checkpoint_id) as point:
        facts = usable_facts(point.manifest)
        plan = plan_itself(facts, _inside(directory))
        unfinished = directory.with_name(f".{directory.name}.part-{secrets.token_hex(4)}")

        def watched(done: int, total: int) -> None:
            still_wanted()
            moved(done, total)

        try:
            unfinished.mkdir()
            try:
                for disk in plan.disks:
                    chunks = while_wanted(point.area(disk.area).stream(), still_wanted)
                    path = unfinished / disk.image.path.name
                    write_image(path, disk.image.format, disk.size_bytes, chunks)
                if (variables := plan.variables) is not None:
                    path = unfinished / variables.path.name
                    write_image(path, variables.format, variables_bytes(point, facts), ())
                with open(unfinished / IMAGE, "xb", opener=_private) as file:
                    write_save_image(file, plan.xml, point, facts, watched)
                    file.flush()
                    os.fsync(file.fileno())
                written_bytes = _finish(plan, unfinished, directory)
            except BaseException:
                shutil.rmtree(unfinished)
                raise
        except OSError as exc:
            raise StorageError(
                f"cannot write {directory}",
                why=exc.strerror or str(exc),
                remedy="check that its parent exists, its permissions, and free space",
            ) from exc
    return ExportedDomain(
        plan.name,
        directory,
        directory / IMAGE,
        directory / DEFINITION if plan.definition else None,
        tuple(image.path for image in plan.images),
        written_bytes,
    )


def _inside(directory: Path) -> ImageLocations:
    return ImageLocations(
        lambda _number, part, kind: directory / f"{part.target}.{kind}",
        lambda store: directory / f"{VARIABLES}.{store.format}",
    )


def _finish(plan: PlannedDomain, unfinished: Path, directory: Path) -> int:
    """Give it its name, durably; returns the space that it takes."""
    if plan.definition:
        with open(unfinished / DEFINITION, "x", opener=_private) as file:
            file.write(plan.definition)
            file.flush()
            os.fsync(file.fileno())
    unfinished.chmod(_MODE)
    sync_directory(unfinished)
    written_bytes = sum(path.stat().st_blocks * 512 for path in unfinished.iterdir())
    _require_new(directory)
    unfinished.rename(directory)
    sync_directory(directory.parent)
    return written_bytes


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _require_new(directory: Path) -> None:
    if os.path.lexists(directory):
        raise RefusedError(
            f"{directory} exists already",
            why="an export does not overwrite",
            remedy="choose another name, or remove it first",
        )
