"""-drive, -blockdev and their short forms: the guest's images, and their paths."""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vmckpt.qemu.inside import GuestDrive
from vmckpt.vm.adopted import holes
from vmckpt.vm.adopted.draft import Draft, NamedImage
from vmckpt.vm.adopted.options import Option
from vmckpt.vm.adopted.settings import JsonObject, KeyValues, Settings, parse_settings
from vmckpt.vm.spec.spec import IMAGE_NAME

# Expansions of the short forms (system/vl.c).
SHORT = {
    "hda": "index=0,media=disk",
    "hdb": "index=1,media=disk",
    "hdc": "index=2,media=disk",
    "hdd": "index=3,media=disk",
    "cdrom": "index=2,media=cdrom",
    "fda": "if=floppy,index=0",
    "fdb": "if=floppy,index=1",
    "pflash": "if=pflash",
    "sd": "if=sd",
    "mtdblock": "if=mtd",
}
FORMATS = {"qcow2": "qcow2", "raw": "raw", "file": "raw", "host_device": "raw", "host_cdrom": "raw"}
NETWORK = frozenset({"nbd", "rbd", "iscsi", "http", "https", "ssh", "nfs", "gluster", "ftp"})
_PROTOCOL = re.compile(r"([a-zA-Z][a-zA-Z0-9+._-]*):")
_FILES = frozenset({"file", "host_device", "host_cdrom"})
_NODES = frozenset({"raw", "qcow2", "throttle", "copy-on-read", "null-co", "null-aio"})


class AdoptedDisk(NamedTuple):
    """An image that the guest uses. `node` is its block node on a destination, `node_now` the
    present one.

    `path` is relative for an image in the host's own folder.
    """

    path: Path
    format: str
    read_only: bool
    node: str
    node_now: str


def short_drive(draft: Draft, option: Option) -> None:
    """Expand -hda FILE and the like to -drive."""
    words = parse_settings(SHORT[option.name])
    given = KeyValues((("file", option.value or ""),))
    drive(draft, Option("drive", f"{given},{words}"))


def drive(draft: Draft, option: Option) -> None:
    """-drive: kept, with a node name, and the detected format."""
    settings = parse_settings(option.value or "")
    key = _key(settings)
    file = settings.get(key)
    if file and (path := _local(draft, option, file)):
        draft.images.append(
            NamedImage(
                file,
                path,
                settings.get("id") or "",
                settings.get("node-name") or "",
                bool(settings.get("format") or settings.get("driver")),
                leaf_of_blockdev=False,
            )
        )
        settings = settings.put(key, _image(len(draft.images) - 1))
    draft.add("drive", settings)


def _key(settings: Settings) -> str:
    """The key that names a -drive's image."""
    return "file" if settings.get("file") else "file.filename"


def blockdev(draft: Draft, option: Option) -> None:
    """-blockdev: kept. Images are those that it and its nested nodes name."""
    settings = parse_settings(option.value or "", "driver")
    draft.add("blockdev", _blockdev(draft, option, settings, ""))


def _blockdev(draft: Draft, option: Option, settings: Settings, inside: str) -> Settings:
    driver, file = settings.get(f"{inside}driver"), settings.get(f"{inside}filename")
    if driver in _FILES and file:
        if path := _local(draft, option, file):
            node = settings.get("node-name") or ""
            draft.images.append(NamedImage(file, path, None, node, True, leaf_of_blockdev=True))
            return settings.put(f"{inside}filename", _image(len(draft.images) - 1))
    elif driver in NETWORK:
        draft.notes.append(f"'{option.text}' is reached over the network, from the destination too")
    elif driver not in _NODES:
        draft.refuse_option(option, f"vmckpt does not know how to carry a block driver '{driver}'")
    for child in ("file", "backing"):
        if settings.get(f"{inside}{child}.driver"):
            settings = _blockdev(draft, option, settings, f"{inside}{child}.")
    return settings


def _image(number: int) -> str:
    return f"{holes.MARK}image{number}>"


def _local(draft: Draft, option: Option, file: str) -> Path | None:
    """The path of an image on this host; None if it is not a file here, or is refused."""
    found = _PROTOCOL.match(file)
    if found and found[1] in NETWORK | {"nfs", "nbd+unix", "gluster+tcp"}:
        draft.notes.append(f"'{file}' is reached over the network, from the destination too")
        return None
    if found and found[1] != "file":
        draft.refuse_option(option, f"vmckpt does not know how to carry '{found[1]}:' images")
        return None
    if file.startswith("/dev/fdset/"):
        draft.refuse_option(option, "its image was passed as an open descriptor, not by its path")
        return None
    return draft.path(file.removeprefix("file:"), option)


def settle_images(draft: Draft) -> tuple[AdoptedDisk, ...]:
    """Compare the guest's images with the command line, and fill in their paths.

    The guest's present images count: one on the command line that it no longer uses is refused,
    unless its device was unplugged, and one plugged in later is added.
    """
    drives = [one for one in draft.facts.drives if one.file]
    disks: list[AdoptedDisk] = []
    values: dict[str, str] = {}
    for number, image in enumerate(draft.images):
        found = next((one for one in drives if _shows(one, image)), None)
        if found is not None:
            drives.remove(found)
            disks.append(_disk(draft, found, len(disks), image))
            values[_image(number)] = holes.disk(len(disks) - 1)
            continue
        values[_image(number)] = str(image.path)
        if image.leaf_of_blockdev:
            draft.files.append(image.path)
        elif image.drive not in draft.vanished:
            now = ", ".join(one.file for one in drives) or "none of the command line's"
            draft.refuse(
                f"the image '{image.file}'",
                f"the guest no longer uses it; it has {now}: ejected, or a snapshot on top",
            )
    for one in drives:
        if one.owner in draft.facts.late:
            disks.append(_plugged(draft, one, len(disks)))
        else:
            draft.refuse(f"the image '{one.file}'", "it is not on the command line")
    _write(draft, values, disks)
    return tuple(disks)


def _shows(drive_now: GuestDrive, image: NamedImage) -> bool:
    if image.drive:
        return drive_now.device == image.drive and drive_now.file in (image.file, str(image.path))
    return drive_now.file in (image.file, str(image.path))


def _disk(draft: Draft, now: GuestDrive, number: int, image: NamedImage) -> AdoptedDisk:
    if now.driver not in FORMATS:
        draft.refuse(f"the image '{now.file}'", f"vmckpt does not support the format {now.driver}")
    # QEMU generated the node name of a -drive; another QEMU would choose a different one.
    node = now.node if image.leaf_of_blockdev or image.node else f"vmckpt-disk{number}"
    path = _own(draft, image.path)
    return AdoptedDisk(path, FORMATS.get(now.driver, "raw"), now.read_only, node, now.node)


def _own(draft: Draft, path: Path) -> Path:
    """Relative to the state directory for an image in the host's own folder."""
    images = draft.facts.images_dir
    is_own = path.parent == images and IMAGE_NAME.fullmatch(path.name)
    return path.relative_to(images.parent) if is_own else path


def _plugged(draft: Draft, now: GuestDrive, number: int) -> AdoptedDisk:
    """A disk that was plugged in later: nodes for it, which its device then uses."""
    node = f"vmckpt-disk{number}"
    path = Path(now.file)
    if now.driver not in FORMATS or not path.is_absolute():
        draft.refuse(f"the device '{now.owner}'", f"its image is {now.driver} at '{now.file}'")
    protocol: dict[str, Any] = {
        "driver": "file",
        "filename": holes.disk(number),
        "cache": {"direct": now.direct},
    }
    nodes = {
        "driver": FORMATS.get(now.driver, "raw"),
        "node-name": node,
        "read-only": now.read_only,
        "file": protocol,
    }
    draft.add("blockdev", JsonObject(nodes))
    return AdoptedDisk(
        _own(draft, path), FORMATS.get(now.driver, "raw"), now.read_only, node, now.node
    )


def _write(draft: Draft, values: Mapping[str, str], disks: Iterable[AdoptedDisk]) -> None:
    """Write the image arguments, with paths, node names and formats; vanished ones are dropped."""
    by_hole = {holes.disk(number): disk for number, disk in enumerate(disks)}
    written = list(_written(draft, dict(values), by_hole))
    draft.arguments[:] = written


def _written(
    draft: Draft, values: dict[str, str], disks: Mapping[str, AdoptedDisk]
) -> Iterator[str]:
    arguments = iter(draft.arguments)
    for argument in arguments:
        if argument != "-drive":
            yield holes.substitute(argument, values)
            continue
        settings = parse_settings(next(arguments))
        key = _key(settings)
        if settings.get("id") in draft.vanished:
            continue
        text = holes.substitute(str(settings), values)
        hole = parse_settings(text).get(key) or ""
        if disk := disks.get(hole):
            settings = parse_settings(text).put("node-name", disk.node)
            if not (settings.get("format") or settings.get("driver")):
                settings = settings.put("format", disk.format)
            text = str(settings)
        yield argument
        yield text
