"""The VM that a plan is for: where the facts come from. The forecast itself is the same for all."""

from typing import NamedTuple, Protocol

from vmckpt.forecast.measure.dirty_rate import Measurable
from vmckpt.forecast.migrated_by import MigratedBy
from vmckpt.forecast.model.rounds import NOT_HELD, SwitchoverHold
from vmckpt.hosts.host import Host
from vmckpt.options.migration import MigrationOptions
from vmckpt.preflight.finding import Finding


class CheckedMethod(NamedTuple):
    """What both hosts say of a migration with certain options. `copied_bytes`: of disks.

    `held`: how the program that migrates holds back the switchover.
    """

    checks: tuple[Finding, ...]
    is_encrypted: bool
    copied_bytes: int
    held: SwitchoverHold = NOT_HELD


class Subject(Measurable, Protocol):
    """One VM."""

    @property
    def host(self) -> Host:
        """The host that it is on."""

    @property
    def by(self) -> MigratedBy:
        """The program that migrates it."""

    @property
    def has_agent(self) -> bool:
        """Whether an agent in the guest sets its clock after a migration."""

    async def check(self, destination: Host, options: MigrationOptions) -> CheckedMethod:
        """Ask both hosts; changes nothing. Raises HostDownError if one cannot be asked."""

    async def device_bytes(self) -> int | None:
        """The memory of the devices that are unplugged for a migration; None: it has none."""
