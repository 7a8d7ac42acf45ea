"""libvirt's XML of a VM of vmckpt's own, with the images that it has now. Pure."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

from vmckpt.errors import RefusedError
from vmckpt.vm.adopted import holes
from vmckpt.vm.domains.definition.description import ImageFile, parse_xml, variables_of
from vmckpt.vm.domains.definition.rewritten import VARIABLES, with_images
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
    return ElementTree.tostring(_replaced(xml, files), encoding="unicode")


def with_formats(xml: str, formats: Mapping[int, str]) -> str:
    """The XML, which has placeholders, with images of these formats that are based on no others.

    `formats` are by the numbers of the disks.
    """
    root, images = parse_xml(xml, "a domain's XML"), dict[str, ImageFile]()
    new = {holes.disk(number): kind for number, kind in formats.items()}
    for disk in root.iterfind("devices/disk"):
        source, target = disk.find("source"), disk.find("target")
        if source is not None and target is not None:
            hole = source.get("file") or source.get("dev") or ""
            if hole in new:
                images[target.get("dev", "")] = ImageFile(Path(hole), new[hole])
    store = variables_of(root)
    if store is not None and str(store.path) in new:
        images[VARIABLES] = ImageFile(store.path, new[str(store.path)])
    return with_images(xml, images)


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
    root = _replaced(spec.adopted.domain, paths)
    for nic in root.iterfind("devices/interface") if spec.is_isolated else ():
        for link in nic.findall("link"):
            nic.remove(link)
        ElementTree.SubElement(nic, "link", state="down")
    return ElementTree.tostring(root, encoding="unicode") + "\n"


def _replaced(xml: str, files: dict[str, str]) -> ElementTree.Element:
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
    return root
