"""Backing files and internal snapshots, from the header of a qcow2 image on a host."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from vmckpt.errors import RefusedError
from vmckpt.foreign import MalformedError, parse
from vmckpt.hosts.host import Host

# struct QCowHeader: magic, version, backing_file_offset, backing_file_size; of its extensions only
# the backing format and the file with the clusters, which QEMU writes among the first.
_BACKING_FORMAT, _DATA_FILE, _EXTENSIONS_END = 0xE2792ACA, 0x44415441, 4096
_HEAD_BYTES, _MAGIC, _MOST_NAME_BYTES = 20, bytes.fromhex("514649fb"), 1023
# Up to the offset of the snapshot table; a snapshot without its id and name; as much of the table
# as is read.
_LONGER_HEAD_BYTES, _SNAPSHOT_BYTES, _MOST_TABLE_BYTES = 72, 40, 1 << 20
# Between the name of a forked domain's disk and the format of its base.
_BASE = ".vmckpt-base."


class ImageSnapshot(NamedTuple):
    """An internal snapshot in an image."""

    name: str
    taken_unix_s: float


class NeededFile(NamedTuple):
    """A file that an image needs. `is_raw`: its content, which a guest may have written, is no
    header.
    """

    path: Path
    is_raw: bool


async def backing_of(host: Host, path: Path) -> str | None:
    """The backing file named in a qcow2 image; None: it has none, or is not qcow2."""
    return await _backing_in(host, path, await _bytes_of(host, path, 0, _HEAD_BYTES))


def base_beside(overlay: Path, kind: str) -> Path:
    """Where the base of a forked domain's overlay is: a name of that image for this fork alone.

    It goes with the overlay, and so is no name that an image of the user's has.
    """
    return overlay.with_name(f"{overlay.stem}{_BASE}{kind}")


async def base_of_its_own(host: Host, path: Path, now: Path | None = None) -> Path | None:
    """The backing file of an image, if it is `base_beside` it. `now`: where the image is now."""
    base = Path(await backing_of(host, now or path) or "/")
    return base if base == base_beside(path, base.suffix.removeprefix(".")) else None


async def named_by(host: Host, path: Path) -> list[NeededFile]:
    """The files that a qcow2 image at `path` needs, where QEMU and libvirt look for them.

    A relative name is relative to `path`; where that is a link, also to the image's real path.
    """
    head = await _bytes_of(host, path, 0, _EXTENSIONS_END)
    more = _extensions(head)
    names = [
        (await _backing_in(host, path, head), more.get(_BACKING_FORMAT) == "raw"),
        (more.get(_DATA_FILE), True),
    ]
    words = [(word, is_raw) for name, is_raw in names if name for word in _files_in(name)]
    folders = [path.parent, (await host.resolve(path)).parent] if words else []
    found = (NeededFile(folder / word, raw) for word, raw in words for folder in folders)
    return list(dict.fromkeys(found))


async def names_layered(host: Host, path: Path) -> bool:
    """Whether a qcow2 image says that its backing file is qcow2 too, and so may have its own."""
    head = await _bytes_of(host, path, 0, _EXTENSIONS_END)
    return _extensions(head).get(_BACKING_FORMAT) == "qcow2"


def _files_in(name: str) -> Iterator[str]:
    """The files that QEMU's name of an image contains: a path, or options as JSON."""
    yield from filter(_is_path, _words_in(name))


def _is_path(word: str) -> bool:
    """Whether a file can have that name: in JSON it may be any text."""
    try:
        return b"\0" not in os.fsencode(word)
    except UnicodeEncodeError:
        return False


def _words_in(name: str) -> Iterator[str]:
    if not name.startswith("json:"):
        yield name.removeprefix("file:")
        return
    waiting = list[Any]()
    with suppress(MalformedError):  # QEMU opens nothing by it, either
        waiting.append(parse(name.removeprefix("json:"), any_text=True))
    while waiting:
        match waiting.pop():
            case dict() as options:
                waiting += options.values()
                for key, value in options.items():
                    if key.rpartition(".")[2] == "filename" and isinstance(value, str):
                        yield value.removeprefix("file:")
            case list() as several:
                waiting += several


async def _backing_in(host: Host, path: Path, head: bytes) -> str | None:
    if len(head) < _HEAD_BYTES or head[:4] != _MAGIC:
        return None
    offset, length = int.from_bytes(head[8:16]), int.from_bytes(head[16:20])
    if not offset or length > _MOST_NAME_BYTES:
        return None
    return _text(await _bytes_of(host, path, offset, length))


def _text(name: bytes) -> str:
    """A name in a header, as far as QEMU reads it."""
    return name.partition(b"\0")[0].decode(errors="surrogateescape")


def _extensions(head: bytes) -> dict[int, str]:
    """The extensions of a qcow2 image's header, as text; none if it is not qcow2."""
    found = dict[int, str]()
    if head[:4] != _MAGIC:
        return found
    # Version 2 has a fixed header length, and no field for it.
    at = int.from_bytes(head[100:104]) if int.from_bytes(head[4:8]) > 2 else 72
    while len(head) >= at + 8 and (kind := int.from_bytes(head[at : at + 4])):
        length = int.from_bytes(head[at + 4 : at + 8])
        found[kind] = _text(head[at + 8 : at + 8 + length])
        at += 8 + -(-length // 8) * 8
    return found


async def snapshots_of(host: Host, path: Path) -> list[ImageSnapshot]:
    """The internal snapshots in a qcow2 image; none if it is not qcow2.

    One that cannot be read is unnamed, and of no time.
    """
    head = await _bytes_of(host, path, 0, _LONGER_HEAD_BYTES)
    if len(head) < _LONGER_HEAD_BYTES or head[:4] != _MAGIC:
        return []
    number, table_at = int.from_bytes(head[60:64]), int.from_bytes(head[64:72])
    table = await _bytes_of(host, path, table_at, _MOST_TABLE_BYTES) if number else b""
    found, at = list[ImageSnapshot](), 0
    while len(found) < number and len(fixed := table[at : at + _SNAPSHOT_BYTES]) == _SNAPSHOT_BYTES:
        id_bytes, name_bytes = int.from_bytes(fixed[12:14]), int.from_bytes(fixed[14:16])
        name_at = at + _SNAPSHOT_BYTES + int.from_bytes(fixed[36:40]) + id_bytes
        name = table[name_at : name_at + name_bytes].decode(errors="replace")
        taken_unix_s = int.from_bytes(fixed[16:20]) + int.from_bytes(fixed[20:24]) / 1e9
        found.append(ImageSnapshot(name, taken_unix_s))
        at = -(-(name_at + name_bytes) // 8) * 8
    return found if len(found) == number else [*found, ImageSnapshot("?", 0)]


async def _bytes_of(host: Host, path: Path, offset: int, length: int) -> bytes:
    numbers = ["-j", str(offset), "-N", str(length)]
    done = await host.run(["od", "-An", "-v", "-tx1", *numbers, "--", str(path)])
    try:
        return bytes.fromhex(done.stdout) if done.returncode == 0 else b""
    except ValueError as exc:
        raise malformed(host, "od", done.stdout) from exc


def malformed(host: Host, command: str, reply: str) -> RefusedError:
    """What a tool on the host printed was not understood."""
    return RefusedError(
        f"what uses the images of {host.name} is not known",
        why=f"{command} says '{reply[:100]}' there",
        remedy=f"see what {command} is on that host",
    )
