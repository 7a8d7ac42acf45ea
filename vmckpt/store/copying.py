"""Checkpoints from one store into another: copy, export and import are the same."""

from collections.abc import Callable, Iterable

import numpy as np

from vmckpt.store.area import Area
from vmckpt.store.manifest import Manifest
from vmckpt.store.store import Store
from vmckpt.store.transaction import AreaWriter, Origin

_BATCH_BYTES = 4 << 20


def missing(source: Store, target: Store, manifests: Iterable[Manifest]) -> list[Manifest]:
    """Those that the target has not, in the order in which they should be copied."""
    there = set(target.ids())
    found = (manifest for manifest in manifests if manifest.id not in there)
    return sorted(found, key=lambda manifest: (manifest.created_unix_s, manifest.id))


def copy_checkpoints(
    source: Store,
    target: Store,
    manifests: Iterable[Manifest],
    copied: Callable[[Manifest], None] = lambda manifest: None,
) -> list[Manifest]:
    """Copy checkpoints, one after the other: each is there whole, or not at all.

    They keep their ids, so that the target's list of what came from what is the source's. Where the
    target has the parent, only what differs from it is read. `copied` hears of each. Raises
    BusyError, NotFoundError, StorageError, DamagedError (the source's).
    """
    done = []
    for manifest in missing(source, target, manifests):
        new = _copy(source, target, manifest)
        copied(new)
        done.append(new)
    return done


def _copy(source: Store, target: Store, manifest: Manifest) -> Manifest:
    there = target.ids()
    parent = manifest.parent if manifest.parent in source.ids() else None
    if parent not in there:
        parent = None
    differing = source.diff(parent, manifest.id) if parent else {}
    origin = Origin(manifest.id, manifest.vm, manifest.parent, manifest.created_unix_s)
    with (
        source.read(manifest.id) as point,
        target.begin(manifest.vm, parent, origin=origin) as new,
    ):
        for facts in manifest.areas:
            area = point.area(facts.name)
            sizes = {"size_bytes": facts.size_bytes, "chunk_bytes": facts.chunk_bytes}
            writer = new.area(facts.name, **sizes)
            if parent:
                _put(area, writer, differing[facts.name])
            else:
                for numbers, contents in area.stream():
                    writer.put(numbers, contents)
        for blob in manifest.blobs:
            new.blob(blob.name, point.blob(blob.name))
        return new.commit(manifest.facts)


def _put(
    area: Area, writer: AreaWriter, numbers: "np.ndarray[tuple[int], np.dtype[np.int64]]"
) -> None:
    """Chunks that differ from the parent's. Those beyond the area's end are gone with it."""
    wanted = numbers[numbers < area.chunk_count]
    step = _BATCH_BYTES // area.chunk_bytes
    for at in range(0, len(wanted), step):
        part = wanted[at : at + step]
        writer.put(part, area.read(part))
