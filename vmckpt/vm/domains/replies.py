"""The values that a libvirtd reports about domains."""

from typing import NamedTuple

from vmckpt.vm.domains.flags import DomainState


class DomainInfo(NamedTuple):
    """A domain as its libvirtd describes it; `reason`, in libvirt's numbers, explains its state.

    `xml` is that of the running domain, or of its definition.
    """

    uuid: str
    name: str
    state: DomainState
    reason: int
    persistent: bool
    xml: str


class Named(NamedTuple):
    """The existence of a domain; `active`: it has a running QEMU."""

    uuid: str
    name: str
    active: bool


class Condition(NamedTuple):
    """The present state of a domain; `reason`, in libvirt's numbers, explains it."""

    state: DomainState
    reason: int


class DomainSnapshot(NamedTuple):
    """A domain's snapshot, kept by libvirt."""

    name: str
    xml: str


class DiskSize(NamedTuple):
    """The size of a disk's image, from libvirt."""

    virtual_bytes: int
    allocated_bytes: int
