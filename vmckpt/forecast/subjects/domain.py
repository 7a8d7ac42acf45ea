"""A libvirt domain, as a plan's subject."""

from vmckpt.forecast.measure.domains import MeasuredDomain
from vmckpt.forecast.migrated_by import LIBVIRT, MigratedBy
from vmckpt.forecast.model.guest import PAGE_BYTES
from vmckpt.forecast.model.rounds import SwitchoverHold
from vmckpt.forecast.subjects.subject import CheckedMethod
from vmckpt.hosts.host import Host
from vmckpt.options.migration import USUAL_DOWNTIME_MS, MigrationOptions
from vmckpt.preflight.domains.checks import DomainPreflight, held_mib_per_s, preflight
from vmckpt.preflight.migration.encryption import Scheme
from vmckpt.units import MIB
from vmckpt.vm.domains.inventory import Domain
from vmckpt.vm.domains.libvirtd import Libvirtd


class DomainSubject(MeasuredDomain):
    """One domain, as `Subject`, and sessions with the libvirtds of both hosts."""

    def __init__(self, domain: Domain, here: Libvirtd, there: Libvirtd) -> None:
        super().__init__(domain, here)
        self._there = there

    @property
    def host(self) -> Host:
        """The host that it is on."""
        return self.domain.host

    @property
    def by(self) -> MigratedBy:
        """The program that migrates it."""
        return LIBVIRT

    @property
    def has_agent(self) -> bool:
        """Whether an agent sets its clock after a migration: libvirt has none do it."""
        return False

    async def check(self, destination: Host, options: MigrationOptions) -> CheckedMethod:
        """Ask both hosts; changes nothing. Raises HostDownError if one cannot be asked."""
        del destination  # the session is with its libvirtd
        found = await preflight(self.domain, self.session, self._there, options)
        return CheckedMethod(
            found.checks,
            found.encryption.scheme is not Scheme.UNENCRYPTED,
            sum(copy.allocated_bytes for copy in found.copies),
            held(found),
        )

    async def device_bytes(self) -> int | None:
        """None: domains with passed-through devices are refused."""
        return None


def held(found: DomainPreflight) -> SwitchoverHold:
    """How a domain is held back, at the downtime limit that QEMU has by itself. Pure."""
    least_bytes = found.held_mib_per_s * MIB * USUAL_DOWNTIME_MS / 1e3
    return SwitchoverHold(found.held_s, least_bytes / PAGE_BYTES)


def usually_held(memory_bytes: int, options: MigrationOptions) -> SwitchoverHold:
    """The same for a domain of that size, where both libvirts and QEMU are new enough. Pure."""
    found = DomainPreflight((), options, held_mib_per_s=held_mib_per_s(memory_bytes))
    return held(found)
