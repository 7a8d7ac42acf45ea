"""Write a checkpoint of a domain as libvirt's save image: what `virsh restore` reads.

The file: a header, the domain's XML with a NUL, and a migration stream.
"""

from collections.abc import Callable, Iterator
from typing import BinaryIO

import numpy as np

from vmckpt.checkpoint.facts import DEVICES, RAM, CheckpointFacts
from vmckpt.errors import RefusedError
from vmckpt.qemu.stream_head import RamPages, StreamHead, plain_stream, read_stream_head
from vmckpt.store.files.manifest import PAGE_CHUNK_BYTES
from vmckpt.store.store import Checkpoint
from vmckpt.vm.domains.loading.starting import image_head

# The memory of the second flash chip, as x86 machines call it.
_VARIABLES = "system.flash1"
# What a page of zeroes and any other page take in the stream, without its content.
_ZERO_RECORD_BYTES, _RECORD_BYTES = 9, 8


def save_image_bytes(point: Checkpoint, facts: CheckpointFacts) -> int:
    """About how large the image is: not less. Blocking."""
    pages = len(point.area(RAM).numbers())
    empty = facts.memory_bytes // PAGE_CHUNK_BYTES - pages
    full = pages * (_RECORD_BYTES + PAGE_CHUNK_BYTES)
    return full + empty * _ZERO_RECORD_BYTES + len(point.blob(DEVICES)) + (1 << 20)


def write_save_image(
    file: BinaryIO,
    xml: str,
    point: Checkpoint,
    facts: CheckpointFacts,
    moved: Callable[[int, int], None] = lambda _done, _total: None,
) -> None:
    """Write the image; `xml` describes the domain that it becomes. Blocking.

    `moved` receives the bytes of memory done, and the total. Raises OSError, RefusedError,
    DamagedError.
    """
    file.write(image_head(xml))
    file.writelines(plain_stream(head_of(point, facts), pages_of(point, facts, moved)))


def variables_bytes(point: Checkpoint, facts: CheckpointFacts) -> int:
    """The size of its UEFI variable store. Blocking. Raises RefusedError: it has none."""
    try:
        return dict(head_of(point, facts).blocks)[_VARIABLES]
    except KeyError as exc:
        raise _unknown(f"they have no {_VARIABLES}") from exc


def head_of(point: Checkpoint, facts: CheckpointFacts) -> StreamHead:
    """What precedes its devices. Blocking. Raises RefusedError, DamagedError."""
    try:
        head = read_stream_head(point.blob(DEVICES))
    except ValueError as exc:
        raise _unknown(str(exc)) from exc
    if sum(head.ram_sizes) != facts.memory_bytes:
        raise _unknown(f"the RAM that is not in its devices is {', '.join(head.absent) or 'none'}")
    return head


def _unknown(why: str) -> RefusedError:
    return RefusedError(
        "the checkpoint's devices cannot become a save image",
        why=why,
        remedy="use the vmckpt that took it, or a newer one",
    )


def pages_of(
    point: Checkpoint,
    facts: CheckpointFacts,
    moved: Callable[[int, int], None] = lambda _done, _total: None,
) -> Iterator[RamPages]:
    """All pages of the RAM, zeroes too: a new QEMU's memory need not be empty.

    Blocking; `moved` as in `write_save_image`. Raises DamagedError.
    """
    area = point.area(RAM)
    present = area.numbers()
    empty = np.ones(facts.memory_bytes // PAGE_CHUNK_BYTES, bool)
    empty[present] = False
    yield RamPages(np.flatnonzero(empty), b"")
    done, total = 0, len(present) * PAGE_CHUNK_BYTES
    moved(done, total)
    for numbers, contents in area.stream():
        yield RamPages(numbers, contents)
        done += len(numbers) * PAGE_CHUNK_BYTES
        moved(done, total)
