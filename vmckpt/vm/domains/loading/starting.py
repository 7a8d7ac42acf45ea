"""The QEMU that libvirt starts from a save image in a pipe, and its guest's RAM.

The first page of each block of RAM in the image is a mark, by which the block is found in that
QEMU. From then on its content may come from elsewhere.
"""

import secrets
import struct
from functools import partial
from typing import NamedTuple

from vmckpt.deadlines import poll
from vmckpt.errors import OperationFailedError
from vmckpt.hosts.processes.process import ProcessId, find_by_argument
from vmckpt.memory.missing_pages import AnonymousRam
from vmckpt.memory.private.marked import find_marked
from vmckpt.memory.ram_file import Span
from vmckpt.qemu.stream_head import StreamHead, plain_begin, plain_page
from vmckpt.sequence.in_thread import in_thread
from vmckpt.vm.domains.loading.image_pipe import ImagePipe

# How long a QEMU that has been started may take to read the mark.
_MARK_S, _MARK_POLL_S, _PAGE_BYTES = 30.0, 0.005, 4096
_MAGIC, _VERSION = b"LibvirtQemudSave", 2
# Magic, version, length of the XML, whether it ran, compression, a cookie's offset, and reserve.
_HEADER = struct.Struct("<16s5I56x")


class StartedQemu(NamedTuple):
    """The QEMU, and where its guest's RAM is."""

    process: ProcessId
    ram: AnonymousRam


def image_head(xml: str, *, runs: bool = True) -> bytes:
    """Of a save image, all that precedes the migration stream (libvirt,
    src/qemu/qemu_saveimage.c, version 2). `runs`: whether its guest is to run at once.
    """
    words = xml.encode() + b"\0"
    return _HEADER.pack(_MAGIC, _VERSION, len(words), runs, 0, 0) + words


def reader_of(pipe: ImagePipe, uuid: str) -> ProcessId | None:
    """The QEMU of the domain that has the pipe."""
    for process in find_by_argument(f"\0-uuid\0{uuid}\0"):
        if pipe.is_open_in(process.pid):
            return process
    return None


async def begin_marked(
    pipe: ImagePipe, head: StreamHead, image: bytes, *, uuid: str, name: str
) -> StartedQemu:
    """Write the image's head, and the stream's with a marked page of each block of RAM; the pipe
    then waits for more.

    Raises StorageError, BrokenPipeError: QEMU has ended, and libvirt says why;
    OperationFailedError: its RAM is not found.
    """
    marks = [secrets.token_bytes(_PAGE_BYTES) for _ in head.absent]
    firsts = map(partial(plain_page, head), head.first_pages, marks)
    qemu = await pipe.offer(image, partial(reader_of, pipe, uuid))
    await in_thread(partial(pipe.write, [plain_begin(head) + b"".join(firsts)]))
    blocks = zip(head.ram_sizes, marks, strict=True)
    found = [await _block_of(qemu, name, size, mark) for size, mark in blocks]
    return StartedQemu(qemu, AnonymousRam(tuple(found)))


async def _block_of(qemu: ProcessId, name: str, size_bytes: int, mark: bytes) -> Span:
    find = partial(find_marked, qemu.pid, size_bytes, mark)
    try:
        found = await poll(find, every_s=_MARK_POLL_S, within_s=_MARK_S)
    except ProcessLookupError as exc:
        raise BrokenPipeError from exc  # libvirt says why
    if found is None:
        raise OperationFailedError(
            f"the memory of '{name}' is not found in its QEMU",
            why=f"process {qemu.pid} did not load its first pages within {_MARK_S:g} s",
            remedy="load all memory before the guest runs: --eager",
        )
    return found
