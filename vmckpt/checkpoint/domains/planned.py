"""What a domain's checkpoint becomes: the domain's XML, and its images. Pure."""

import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from vmckpt.checkpoint.facts import CheckpointFacts, DomainFacts
from vmckpt.errors import NotFoundError, RefusedError
from vmckpt.vm.argv import default_mac
from vmckpt.vm.disks.backing import base_beside
from vmckpt.vm.domains.definition.description import ImageFile, parse_domain
from vmckpt.vm.domains.definition.parts import DomainPart, parts_of
from vmckpt.vm.domains.definition.rewritten import VARIABLES, DomainIdentity, as_copy, with_images

# libvirt's own, for copies of block devices.
IMAGES = Path("/var/lib/libvirt/images")


class ImageLocations(NamedTuple):
    """Where images are to be: a disk's by its number, the disk and its format; that of the UEFI
    variable store by what it is now.

    `overlays`: the disks' images are qcow2 on others (`base_beside`), which have the content.
    """

    disk: Callable[[int, DomainPart, str], Path]
    variables: Callable[[ImageFile], Path]
    overlays: bool = False


THERE = ImageLocations(lambda _number, part, _kind: part.path, lambda store: store.path)


@dataclass(frozen=True, slots=True)
class DomainDiskPlan:
    """A disk whose content is `area` of the checkpoint.

    `base`: the image that has it, if `image` is only what is written later.
    """

    target: str
    area: str
    size_bytes: int
    image: ImageFile
    base: ImageFile | None = None


@dataclass(frozen=True, slots=True)
class PlannedDomain:
    """A domain to be started from a checkpoint. `definition`: "" for a transient one.

    `variables`: its UEFI variable store. QEMU writes the content when the guest runs: it is part of
    its own state.
    """

    name: str
    uuid: str
    xml: str
    definition: str
    disks: tuple[DomainDiskPlan, ...]
    variables: ImageFile | None
    is_copy: bool = False

    @property
    def has_private_memory(self) -> bool:
        """Whether its memory can be loaded while its guest runs."""
        return parse_domain(self.xml).private_memory

    @property
    def uses_huge_pages(self) -> bool:
        """Whether its memory is in its host's pool of them."""
        return parse_domain(self.xml).huge_pages

    @property
    def cannot_share(self) -> str:
        """Why its memory cannot have a file's content; "": it can."""
        found = parse_domain(self.xml)
        # A page that QEMU gives back would have that content again, where its guest expects zeroes.
        if found.reports_free_pages:
            return "its balloon reports free pages (freePageReporting)"
        # Another mapping is bound to no node.
        return "its memory is bound to nodes of its host (numatune)" if found.binds_memory else ""

    @property
    def images(self) -> tuple[ImageFile, ...]:
        """All files that will belong to it alone."""
        own = (self.variables,) if self.variables else ()
        bases = (disk.base for disk in self.disks if disk.base is not None)
        return (*(disk.image for disk in self.disks), *bases, *own)


def domain_of(facts: CheckpointFacts) -> DomainFacts:
    """Raises RefusedError: the checkpoint is of a VM of vmckpt's own."""
    if facts.domain is None:
        raise RefusedError(
            f"checkpoint '{facts.name}' is not of a libvirt domain",
            why="it is of a VM that vmckpt runs itself, without libvirt",
            remedy="restore it as a VM: vmckpt checkpoint restore; its disks alone: "
            "vmckpt checkpoint export-disk",
        )
    return facts.domain


def plan_itself(facts: CheckpointFacts, where: ImageLocations = THERE) -> PlannedDomain:
    """The domain itself, its images where they were, or elsewhere."""
    domain = domain_of(facts)
    disks = _disks(facts, domain, where)
    name = parse_domain(domain.xml).name
    store = _variables(domain, where)
    return _planned(name, domain.uuid, (domain.xml, domain.definition), disks, store)


def plan_copy(
    facts: CheckpointFacts, name: str, *, keep_macs: bool, plugged: bool, overlays: bool = False
) -> PlannedDomain:
    """A copy with a name, UUID and images of its own, beside the original's: there libvirt's QEMUs
    reach them. With `overlays` its disks are qcow2 images on others. Raises RefusedError.
    """
    domain = domain_of(facts)
    macs = None if keep_macs else tuple(default_mac(name, n) for n in range(len(facts.macs)))
    new = DomainIdentity(name, str(uuid.uuid4()), macs, isolated=not plugged)

    def beside(number: int, part: DomainPart, kind: str) -> Path:
        folder = IMAGES if part.path.is_relative_to("/dev") else part.path.parent
        return folder / f"{name}-{number}.{kind}"

    where = ImageLocations(
        beside,
        lambda store: store.path.with_name(f"{name}_VARS{store.path.suffix}"),
        overlays,
    )
    disks = _disks(facts, domain, where)
    texts = _texts_of_copy(domain.xml, domain.definition, new)
    planned = _planned(name, new.uuid, texts, disks, _variables(domain, where))
    return replace(planned, is_copy=True)


def why_no_copy(xml: str, definition: str) -> str:
    """Why a checkpoint of the domain could not become a copy that is isolated, if so."""
    try:
        _texts_of_copy(
            xml, definition, DomainIdentity("copy", str(uuid.uuid4()), None, isolated=True)
        )
    except RefusedError as exc:
        return exc.why
    return ""


def _texts_of_copy(xml: str, definition: str, new: DomainIdentity) -> tuple[str, str]:
    """The XML of a copy, and its definition ("": none). Raises RefusedError."""
    known = {part.target for part in parts_of(xml).disks}
    for part in parts_of(definition).disks if definition else ():
        if part.target not in known and not part.read_only:
            raise RefusedError(
                f"the checkpoint cannot become '{new.name}'",
                why=f"the original had disk {part.target} ({part.path}) from its next start on: a "
                "copy would share it, since the checkpoint has no content for it",
                remedy="take another checkpoint when the domain has that disk, or has lost it",
            )
    return as_copy(xml, new), as_copy(definition, new) if definition else ""


def _planned(
    name: str,
    new_uuid: str,
    texts: Iterable[str],
    disks: tuple[DomainDiskPlan, ...],
    variables: ImageFile | None,
) -> PlannedDomain:
    images = {disk.target: disk.image for disk in disks}
    if variables is not None:
        images[VARIABLES] = variables
    xml, definition = (with_images(text, images) if text else "" for text in texts)
    return PlannedDomain(name, new_uuid, xml, definition, disks, variables)


def _variables(domain: DomainFacts, where: ImageLocations) -> ImageFile | None:
    store = parts_of(domain.xml).variables
    return store and store._replace(path=where.variables(store))


def _disks(
    facts: CheckpointFacts, domain: DomainFacts, where: ImageLocations
) -> tuple[DomainDiskPlan, ...]:
    """Those that the checkpoint has the content of; others keep the image that they had.

    Raises RefusedError: its disks are not those of its XML; NotFoundError.
    """
    parts = parts_of(domain.xml).disks
    if [str(part.path) for part in parts] != [disk.path for disk in facts.disks]:
        raise RefusedError(
            f"checkpoint '{facts.name}' is contradictory",
            why="its disks are not those of its domain's XML",
            remedy="see: vmckpt checkpoint show",
        )
    found = list[DomainDiskPlan]()
    for number, (part, disk) in enumerate(zip(parts, facts.disks, strict=True)):
        if disk.read_only:
            continue
        if disk.area is None:
            raise NotFoundError(
                f"the checkpoint has no content for disk {part.target}",
                why="it was not stored with it",
                remedy="restore another checkpoint",
            )
        kind, base = disk.format, None
        if where.overlays:
            kind = "qcow2"
            base = ImageFile(base_beside(where.disk(number, part, kind), disk.format), disk.format)
        image = ImageFile(where.disk(number, part, kind), kind)
        found.append(DomainDiskPlan(part.target, disk.area, disk.size_bytes, image, base))
    return tuple(found)
