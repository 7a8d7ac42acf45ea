"""What a libvirtd tells of domains, as values."""

from typing import NamedTuple

from vmckpt.vm.domains.flags import DomainState


class DomainInfo(NamedTuple):
    """A domain as its libvirtd has it; `reason` is why it is in that state, in libvirt's numbers.

    `xml` is that of the running domain, or of its definition.
    """

    uuid: str
    name: str
    state: DomainState
    reason: int
    persistent: bool
    xml: str


class Named(NamedTuple):
    """That there is a domain; `active`: it has a QEMU of its own."""

    uuid: str
    name: str
    active: bool


class Condition(NamedTuple):
    """What a domain does at this moment; `reason` is why, in libvirt's numbers."""

    state: DomainState
    reason: int


class DomainSnapshot(NamedTuple):
    """A snapshot that libvirt keeps of a domain."""

    name: str
    xml: str


class DiskSize(NamedTuple):
    """What libvirt says of one disk's image."""

    virtual_bytes: int
    allocated_bytes: int
