"""libvirt's XML of a VM of vmckpt's own, with the images that it has now. Pure."""

from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from vmckpt.errors import RefusedError
from vmckpt.vm.adopted import holes
from vmckpt.vm.domains.definition.description import parse_xml
from vmckpt.vm.imported.described import described_domain
from vmckpt.vm.inventory import Vm
from vmckpt.vm.spec.spec import Disk

_NAMESPACES = {
    "qemu": "http://libvirt.org/schemas/domain/qemu/1.0",
    "libosinfo": "http://libosinfo.org/xmlns/libvirt/domain/1.0",
    "vmckpt": "urn:vmckpt",
}


def with_holes(xml: str, disks: Sequence[Disk], state_dir: Path) -> str:
    """The XML with placeholders for images, of a domain on the host with that state directory.

    Raises UsageError if it cannot be read.
    """
    files = {str(disk.on(state_dir)): holes.disk(n) for n, disk in enumerate(disks)}
    return _replaced(xml, files)


def domain_of(vm: Vm) -> str:
    """The XML for `virsh define` on the VM's host. Raises RefusedError if there is none of it."""
    spec, state_dir = vm.spec, vm.host.state_dir
    if spec.adopted is None:
        return described_domain(spec, vm.qemu.platform, state_dir, vm.host.bridge)
    if not spec.adopted.domain:
        raise RefusedError(
            f"'{spec.name}' cannot be described for libvirt",
            why="it is known by QEMU's command line, since it was adopted",
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
