"""Every reason why a shut-off domain cannot be migrated, found before anything is changed."""

from shlex import quote

from vmckpt.options.migration import MigrationOptions
from vmckpt.preflight.domains import destination_libvirt
from vmckpt.preflight.domains.arrival import arrival_checks, arriving, disks_elsewhere
from vmckpt.preflight.domains.checks import (
    Contents,
    DomainPreflight,
    Route,
    is_there_already,
    snapshot_checks,
)
from vmckpt.preflight.domains.disks import DomainDisks, plan_domain_disks
from vmckpt.preflight.domains.left_behind import left_behind
from vmckpt.preflight.domains.link import find_link
from vmckpt.preflight.domains.options import off_checks
from vmckpt.preflight.finding import OK, REFUSE, Finding
from vmckpt.preflight.migration.disks import disk_checks
from vmckpt.sequence.steps import both
from vmckpt.vm.domains.inventory import Domain
from vmckpt.vm.domains.libvirtd import Libvirtd


async def preflight_off(
    domain: Domain, source: Libvirtd, destination: Libvirtd, options: MigrationOptions
) -> DomainPreflight:
    """Ask both hosts; changes nothing. Raises HostDownError if one cannot be asked."""
    there = destination.host
    if at_once := is_there_already(domain, there) or _running(domain):
        return DomainPreflight((at_once,), options)
    arrives = arriving(domain, options.at_target)
    (checks, names), (disks, ((snapshots, left), link)) = await both(
        both(destination_libvirt.checks(arrives, source, destination), destination.names()),
        both(
            plan_domain_disks(domain, source, there, options.disks, disks_elsewhere(arrives)),
            both(
                both(
                    snapshot_checks(domain, source),
                    left_behind(domain, arrives, source, there),
                ),
                find_link(options.tls, domain.host, there),
            ),
        ),
    )
    found = (
        Finding("running", OK, "the domain is off"),
        await destination_libvirt.name(arrives, names, there),
        # A shut-off domain has none.
        *(check for check in checks if check.code != "memory"),
        *disk_checks(disks.plan),
        *uncopied(disks),
        *await destination_libvirt.files(arrives, there, disks.plan.shared),
        *snapshots,
        *left,
        link.check,
        *off_checks(options),
        *arrival_checks(domain, options.at_target),
    )
    contents = Contents(True, (), disks.proved_shared, encrypted=False)
    return DomainPreflight(
        found,
        options,
        (Route(link.uri, there.migration_address), contents),
        known_to_target=domain.uuid in {one.uuid for one in names},
    )


def uncopied(disks: DomainDisks) -> list[Finding]:
    """Disks that would have to be copied, which libvirt does only for running domains. Pure."""
    if not disks.copied:
        return []
    reason = f"libvirt copies no disk of a domain that is off: {', '.join(disks.copied)}"
    remedy = "copy the images yourself, and add --disks shared; or start it, and move it so"
    return [Finding("disk-offline", REFUSE, reason, remedy)]


def _running(domain: Domain) -> Finding | None:
    if not domain.is_active:
        return None
    remedy = f"leave out --offline, or: vmckpt vm stop {quote(domain.name)}"
    return Finding("running", REFUSE, "--offline moves a domain that is off, and it runs", remedy)
