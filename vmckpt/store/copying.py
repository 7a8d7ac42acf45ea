"""Copy checkpoints between stores; export and import work in the same way."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress

from vmckpt.errors import BusyError, NotFoundError, VmckptError
from vmckpt.store.area import Area
from vmckpt.store.errors import DamagedError, ThereAlreadyError, damaged
from vmckpt.store.files.manifest import Manifest, is_same
from vmckpt.store.files.order import in_order
from vmckpt.store.files.pack import Numbers
from vmckpt.store.files.pins import copied as copied_pin
from vmckpt.store.files.pins import pins
from vmckpt.store.store import Store
from vmckpt.store.transaction import AreaWriter, Origin, Transaction

_BATCH_BYTES = 4 << 20


def missing(source: Store, destination: Store, manifests: Iterable[Manifest]) -> list[Manifest]:
    """The checkpoints that the destination lacks, in the order to copy them."""
    there = set(destination.ids())
    return in_order(manifest for manifest in manifests if manifest.id not in there)


def copy_checkpoints(
    source: Store,
    destination: Store,
    manifests: Iterable[Manifest],
    copied: Callable[[Manifest], None] = lambda manifest: None,
) -> list[Manifest]:
    """Copy checkpoints one after the other, each completely or not at all.

    They keep their ids, so that the destination has the source's parent relations, and operators'
    pins. If the destination has the parent, only the difference to it is read. `copied` receives
    each one. A checkpoint that the source no longer has is left out. Raises StorageError; at the
    end, after all that can be copied, DamagedError (the source has unreadable ones, or the
    destination has different ones with their ids), else BusyError (some are being removed in the
    source, or a writer of the same VM is active in the destination).
    """
    every, done = list(manifests), []
    bad, busy = dict[str, DamagedError](), dict[str, BusyError]()
    wanted = missing(source, destination, every)
    there = {one.id: one for one in destination.manifests()} if len(wanted) < len(every) else {}
    for manifest in every:
        if not is_same(there.get(manifest.id, manifest), manifest):
            what = f"checkpoint {manifest.id} in {destination.location} is another one of that id"
            bad[manifest.id] = damaged(what, "find out who wrote it, and remove it there")
    for manifest in wanted:
        try:
            with suppress(ThereAlreadyError):  # another copy of it was faster
                new = _copy(source, destination, manifest)
                copied(new)
                done.append(new)
        except DamagedError as exc:
            bad[manifest.id] = exc
        except BusyError as exc:
            busy[manifest.id] = exc
        except NotFoundError:  # retention has removed it since the source was listed
            continue
    if bad:
        raise damaged(*_error_text(bad, every))
    if busy:
        what, why = _error_text(busy, every)
        raise BusyError(what, why=why, remedy="run this again: the others were copied")
    return done


def _error_text(errors: Mapping[str, VmckptError], wanted: Sequence[Manifest]) -> tuple[str, str]:
    """Error text for those that were not copied: what, and why."""
    whys = [f"{one}: {exc.what}: {exc.why}" for one, exc in list(errors.items())[:5]]
    return f"{len(errors)} of {len(wanted)} checkpoints were not copied", "; ".join(whys)


def _copy(source: Store, destination: Store, manifest: Manifest) -> Manifest:
    with ExitStack() as stack:
        point = stack.enter_context(source.read(manifest.id))
        parent, differing = _difference(source, destination, manifest)
        begun, parent = _begin(destination, manifest, parent)
        new = stack.enter_context(begun)
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
        had = pins(source.opened, [manifest.id]).get(manifest.id, ())
        has = [pin for pin in map(copied_pin, had) if pin is not None]
        return new.commit(manifest.facts, pins=has)


def _difference(
    source: Store, destination: Store, manifest: Manifest
) -> tuple[str | None, dict[str, Numbers]]:
    """The parent, if both have it, and the difference to it. The parent may be damaged or removed.

    It may also be a different one in the destination: clients that add to it choose ids.
    """
    if manifest.parent is None:
        return None, {}
    try:
        if not is_same(destination.manifest(manifest.parent), source.manifest(manifest.parent)):
            return None, {}
        return manifest.parent, source.diff(manifest.parent, manifest.id)
    except (NotFoundError, DamagedError):
        return None, {}


def _begin(
    destination: Store, manifest: Manifest, parent: str | None
) -> tuple[Transaction, str | None]:
    """A transaction in the destination, and its parent; None if that is damaged or gone there."""
    origin = Origin(
        manifest.id,
        manifest.vm,
        manifest.parent,
        manifest.created_unix_s,
        manifest.vm_id,
        manifest.sequence,
    )
    try:
        return destination.begin(manifest.vm, parent, origin=origin), parent
    except (DamagedError, NotFoundError):
        if parent is None:
            raise
        return destination.begin(manifest.vm, origin=origin), None


def _put(area: Area, writer: AreaWriter, numbers: Numbers) -> None:
    """Chunks that differ from the parent's, without those beyond the area's end."""
    wanted = numbers[numbers < area.chunk_count]
    step = _BATCH_BYTES // area.chunk_bytes
    for at in range(0, len(wanted), step):
        part = wanted[at : at + step]
        writer.put(part, area.read(part))
