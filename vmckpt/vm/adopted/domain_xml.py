"""libvirt's XML of a VM that was a domain, with the images that it has now. Pure."""

from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from vmckpt.errors import RefusedError
from vmckpt.vm.adopted import holes
from vmckpt.vm.domains.description import parse_xml
from vmckpt.vm.spec.spec import Disk, Spec

_NAMESPACES = {
    "qemu": "http://libvirt.org/schemas/domain/qemu/1.0",
    "libosinfo": "http://libosinfo.org/xmlns/libvirt/domain/1.0",
    "vmckpt": "urn:vmckpt",
}


def with_holes(xml: str, disks: Sequence[Disk]) -> str:
    """The XML with placeholders for images. Raises UsageError if it cannot be read."""
    return _replaced(xml, {str(disk.path): holes.disk(n) for n, disk in enumerate(disks)})


def domain_of(spec: Spec, state_dir: Path) -> str:
    """The XML for `virsh define` on the host with that state directory.

    Raises RefusedError if the VM was no domain.
    """
    if spec.adopted is None or not spec.adopted.domain:
        raise RefusedError(
            f"'{spec.name}' cannot be described for libvirt",
            why="only a VM that was made of a domain (`vmckpt vm import`) can",
            remedy="write the domain's XML by hand, from `vmckpt vm export` and its images",
        )
    paths = {holes.disk(n): str(disk.on(state_dir)) for n, disk in enumerate(spec.disks)}
    return _replaced(spec.adopted.domain, paths) + "\n"


def _replaced(xml: str, files: dict[str, str]) -> str:
    for prefix, uri in _NAMESPACES.items():
        ElementTree.register_namespace(prefix, uri)
    root = parse_xml(xml, "a domain's XML")
    for source in [*root.iterfind("devices/disk/source"), *root.iterfind("os/nvram/source")]:
        for key in ("file", "dev"):
            if (path := source.get(key)) in files:
                source.set(key, files[path])
    for variables in root.iterfind("os/nvram"):
        if (path := (variables.text or "").strip()) in files:
            variables.text = files[path]
    return ElementTree.tostring(root, encoding="unicode")
