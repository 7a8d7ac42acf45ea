"""How a domain is to differ at the destination from what it is at the source."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from shlex import quote

from vmckpt.options.migration import AtTarget
from vmckpt.preflight.finding import REFUSE, WARN, Finding
from vmckpt.vm.domains.definition.description import parse_domain
from vmckpt.vm.domains.inventory import Domain


def arriving(domain: Domain, there: AtTarget | None) -> Domain:
    """The domain as it will be at the destination: by its XML for that host, and its name.

    Pure. Raises UsageError when the XML does not describe a domain.
    """
    if there is None:
        return domain
    what = parse_domain(there.xml) if there.xml is not None else domain.description
    name = name_there(domain.name, there)
    return replace(domain, seen=domain.seen._replace(name=name), description=what)


def name_there(name: str, there: AtTarget | None) -> str:
    """The domain's name at the destination. Pure."""
    return (there.name if there is not None else None) or name


def disks_elsewhere(arrives: Domain) -> Mapping[str, Path]:
    """The paths in its XML for the destination, by the names of its disks. Pure."""
    disks = arrives.description.disks
    return {disk.target: disk.path for disk in disks if disk.path is not None}


def arrival_checks(domain: Domain, there: AtTarget | None) -> Iterator[Finding]:
    """Check the XML; libvirt itself ensures that the guest sees the same machine. Pure."""
    if there is None:
        return
    for option, xml in (("--xml", there.xml), ("--persistent-xml", there.persistent_xml)):
        if xml is not None and (other := parse_domain(xml).uuid) not in ("", domain.uuid):
            reason = f"{option}: it describes another domain, {other}"
            remedy = (
                f"begin with the XML of this one: virsh dumpxml --migratable {quote(domain.name)}"
            )
            yield Finding("domain-xml", REFUSE, reason, remedy)
    persistent, is_active = domain.seen.persistent, domain.is_active
    if there.persistent_xml is not None and not persistent:
        reason = "--persistent-xml: the domain is transient, and nothing of it is kept"
        yield Finding("domain-xml", REFUSE, reason, "leave out --persistent-xml")
    elif there.xml is not None and there.persistent_xml is None and persistent and is_active:
        reason = "once it has been off there, it is defined as here: --xml holds while it runs"
        yield Finding("domain-xml", WARN, reason, "add --persistent-xml FILE")
