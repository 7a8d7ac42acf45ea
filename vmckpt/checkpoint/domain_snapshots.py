"""Internal snapshots of a domain, by libvirt: memory and disks in its qcow2 images."""

from shlex import quote
from typing import NamedTuple
from xml.etree import ElementTree

from vmckpt.errors import NotFoundError, OperationFailedError, RefusedError
from vmckpt.hosts.inventory.inventory import check_name
from vmckpt.sequence.steps import finish
from vmckpt.vm.domains.definition.description import parse_xml, unreadable
from vmckpt.vm.domains.faults import LibvirtRefusedError
from vmckpt.vm.domains.inventory import Domain, held_domain, require_active
from vmckpt.vm.domains.libvirtd import Libvirtd
from vmckpt.vm.domains.replies import DomainSnapshot
from vmckpt.vm.domains.sessions import libvirtd


class LibvirtSnapshot(NamedTuple):
    """A snapshot as libvirt describes it."""

    name: str
    taken_unix_s: int


async def save(domain: Domain, name: str) -> LibvirtSnapshot:
    """Save memory, devices and disks as snapshot `name`; the guest then continues.

    Raises UsageError, RefusedError, LibvirtRefusedError (with libvirt's reason), BusyError.
    """
    check_name(name, "snapshot")
    async with held_domain(domain, "snapshot save") as (now, session):
        require_active(now)
        if name in {snapshot.name for snapshot in await session.snapshots(now.uuid)}:
            raise RefusedError(
                f"'{now.name}' has a snapshot '{name}' already",
                why="libvirt keeps one of a name",
                remedy=f"choose another name, or: vmckpt checkpoint rm {name} --kind internal "
                f"--vm {quote(now.name)}",
            )
        root = ElementTree.Element("domainsnapshot")
        ElementTree.SubElement(root, "name").text = name
        xml = ElementTree.tostring(root, encoding="unicode")
        return _read(await finish(session.save_snapshot(now.uuid, xml)))


async def load(domain: Domain, name: str) -> LibvirtSnapshot:
    """Revert the domain to snapshot `name`: memory and disks; later changes are lost.

    Raises NotFoundError, OperationFailedError (with the state of the domain), BusyError.
    """
    async with held_domain(domain, "snapshot load") as (now, session):
        snapshot = await _find(now, session, name)
        try:
            await finish(session.load_snapshot(now.uuid, name))
        except LibvirtRefusedError as exc:
            seen = await session.find(now.uuid)
            state = seen.state.name.lower() if seen else "gone"
            raise OperationFailedError(
                f"snapshot '{name}' did not load: '{now.name}' is {state}",
                why=exc.why,
                remedy=exc.remedy,
            ) from exc
        return snapshot


async def list_all(domain: Domain) -> list[LibvirtSnapshot]:
    """The domain's snapshots, oldest first."""
    async with libvirtd(domain.host) as session:
        found = [_read(snapshot) for snapshot in await session.snapshots(domain.uuid)]
    return sorted(found, key=lambda snapshot: snapshot.taken_unix_s)


async def delete(domain: Domain, name: str) -> None:
    """Delete snapshot `name`. Raises NotFoundError, BusyError."""
    async with held_domain(domain, "snapshot delete") as (now, session):
        await _find(now, session, name)
        await finish(session.delete_snapshot(now.uuid, name))


async def _find(domain: Domain, session: Libvirtd, name: str) -> LibvirtSnapshot:
    found = [_read(snapshot) for snapshot in await session.snapshots(domain.uuid)]
    for snapshot in found:
        if snapshot.name == name:
            return snapshot
    raise NotFoundError(
        f"'{domain.name}' has no snapshot '{name}'",
        why=f"it has: {', '.join(s.name for s in found) or 'none'}",
        remedy=f"see: vmckpt checkpoint list {quote(domain.name)} --kind internal",
    )


def _read(snapshot: DomainSnapshot) -> LibvirtSnapshot:
    what = f"the XML of snapshot '{snapshot.name}'"
    taken = parse_xml(snapshot.xml, what).findtext("creationTime", "0")
    try:
        return LibvirtSnapshot(snapshot.name, int(taken))
    except ValueError as exc:
        raise unreadable(what, f"creationTime: {exc}") from exc
