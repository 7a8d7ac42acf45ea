"""A VM of vmckpt's own, as a plan's subject."""

from vmckpt.forecast.measure.own import MeasuredVm
from vmckpt.forecast.migrated_by import VMCKPT, MigratedBy
from vmckpt.forecast.subjects.subject import CheckedMethod
from vmckpt.hosts.host import Host
from vmckpt.options.migration import MigrationOptions
from vmckpt.preflight.migration.checks import preflight
from vmckpt.preflight.migration.encryption import Scheme
from vmckpt.preflight.passthrough import held_bytes


class OwnVm(MeasuredVm):
    """One VM, as `Subject`."""

    @property
    def host(self) -> Host:
        """The host that it is on."""
        return self.vm.host

    @property
    def by(self) -> MigratedBy:
        """The program that migrates it."""
        return VMCKPT

    @property
    def has_agent(self) -> bool:
        """Whether an agent in the guest sets its clock after a migration."""
        return self.vm.spec.guest_agent

    async def check(self, destination: Host, options: MigrationOptions) -> CheckedMethod:
        """Ask both hosts; changes nothing. Raises HostDownError if one cannot be asked."""
        found = await preflight(self.vm, destination, options)
        return CheckedMethod(
            found.checks,
            found.encryption.scheme is not Scheme.UNENCRYPTED,
            sum(copy.allocated_bytes for copy in found.copies),
        )

    async def device_bytes(self) -> int | None:
        """The memory of the devices that are unplugged for a migration; None: it has none."""
        return await held_bytes(self.vm)
