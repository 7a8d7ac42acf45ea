"""The programs that carry out migrations, and the differences that matter for forecasts."""

from typing import NamedTuple

from vmckpt.units import MIB


class MigratedBy(NamedTuple):
    """A program. `driver`: its name in run records and in `vm list`.

    `throttles`: it slows the guest as a policy says, and limits auto-converge. `bandwidth_unit`: it
    limits the bandwidth to a multiple of so many bytes/s.
    """

    driver: str
    throttles: bool
    bandwidth_unit: int


VMCKPT = MigratedBy("qemu", throttles=True, bandwidth_unit=1)
LIBVIRT = MigratedBy("libvirt", throttles=False, bandwidth_unit=MIB)


def migrated_by(driver: str) -> MigratedBy:
    """The program that migrates VMs of this driver."""
    return LIBVIRT if driver == LIBVIRT.driver else VMCKPT
