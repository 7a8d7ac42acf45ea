"""What an adopted machine becomes when its checkpoint runs: on new images, or as a copy. Pure.

Its spec has another program's command line, in which only some of its host's things have
placeholders (vm/adopted/holes.py). What else belongs to one machine alone is changed here.
"""

import uuid
from collections.abc import Container

from vmckpt.errors import RefusedError
from vmckpt.vm.adopted.copies import copied
from vmckpt.vm.adopted.copies.nics import with_macs
from vmckpt.vm.adopted.copies.whole_images import on_whole_images
from vmckpt.vm.argv import default_mac, macs
from vmckpt.vm.spec.spec import Adopted, Disk, Spec


def with_new_images(spec: Spec, disks: Container[Disk] | None = None) -> Spec:
    """The spec for new images of these disks (None: all that are written), of their formats.

    It comes back as it was if its command line says nothing else. Raises RefusedError.
    """
    if (adopted := spec.adopted) is None:
        return spec
    new = {
        number: disk.format
        for number, disk in enumerate(spec.disks)
        if (not disk.read_only if disks is None else disk in disks)
    }
    made = on_whole_images(adopted.arguments, new)
    files = tuple(path for path in adopted.files if str(path) not in made.unused)
    xml = adopted.domain
    if xml:
        from vmckpt.vm.imported.domain_xml import with_formats

        xml = with_formats(xml, new)
    return spec._replace(adopted=Adopted(made.arguments, files, adopted.forwards, xml))


def as_copy(spec: Spec, *, keep_macs: bool) -> Spec:
    """A copy, whose name and disks `spec` has already: its UUID and MACs, and no ports of the host.

    Raises RefusedError: libvirt's description of it needs something that the original has.
    """
    if (adopted := spec.adopted) is None:
        return spec
    new, arguments = str(uuid.uuid4()), list(adopted.arguments)
    given = None
    if not keep_macs:
        given = tuple(default_mac(spec.name, number) for number in range(len(macs(spec))))
        arguments = with_macs(arguments, given)
    arguments = copied.without_forwards(copied.with_uuid(arguments, new))
    xml = adopted.domain
    if xml:
        from vmckpt.vm.domains.definition.rewritten import DomainIdentity
        from vmckpt.vm.domains.definition.rewritten import as_copy as copy_of_domain

        xml = copy_of_domain(xml, DomainIdentity(spec.name, new, given, isolated=False))
    return spec._replace(adopted=Adopted(tuple(arguments), adopted.files, (), xml))


def with_new_generation(spec: Spec) -> Spec:
    """The spec with a new VM generation ID, if its machine has one."""
    if (adopted := spec.adopted) is None:
        return spec
    arguments = tuple(copied.with_new_generation(adopted.arguments))
    return spec._replace(adopted=adopted._replace(arguments=arguments))


def require_copyable(spec: Spec, name: str, *, plugged: bool) -> None:
    """Raises RefusedError naming what a copy cannot have besides the original."""
    found = copied.undoubled(spec.adopted.arguments, plugged=plugged) if spec.adopted else ()
    if why := "; ".join(found):
        raise RefusedError(
            f"the checkpoint cannot become '{name}'",
            why=why,
            remedy="leave its network disconnected (without --network plugged), or restore the VM "
            "itself: --in-place, or where there is none of its name",
        )
