"""What a domain is to be at the target, where that is not what it is at the source."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from shlex import quote

from vmckpt.options.migration import AtTarget
from vmckpt.preflight.finding import REFUSE, WARN, Finding
from vmckpt.vm.domains.description import parse_domain
from vmckpt.vm.domains.inventory import Domain


def arriving(domain: Domain, there: AtTarget | None) -> Domain:
    """The domain as it will be at the target: by its XML for there, and its name.

    Pure. Raises UsageError when the XML is none of a domain.
    """
    if there is None:
        return domain
    what = parse_domain(there.xml) if there.xml is not None else domain.description
    name = name_there(domain.name, there)
    return replace(domain, seen=domain.seen._replace(name=name), description=what)


def name_there(name: str, there: AtTarget | None) -> str:
    """What the domain of that name is called at the target. Pure."""
    return (there.name if there is not None else None) or name


def disks_elsewhere(arrives: Domain) -> Mapping[str, Path]:
    """By the names of its disks in the domain: the paths that its XML for the target has."""
    disks = arrives.description.disks
    return {disk.target: disk.path for disk in disks if disk.path is not None}


def arrival_checks(domain: Domain, there: AtTarget | None) -> Iterator[Finding]:
    """What is wrong with it; that the guest sees the same machine libvirt sees to. Pure."""
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
        reason = "once it has been off there, it is what it is here: --xml holds while it runs"
        yield Finding("domain-xml", WARN, reason, "add --persistent-xml FILE")
