"""What waits at a standby for the guest: a QEMU of vmckpt's own, or one that libvirt has."""

from typing import Protocol

from vmckpt.hosts.local import LocalHost
from vmckpt.replicate.request import ReplicationRequest
from vmckpt.vm.paths import VmDir
from vmckpt.vm.record import Qemu, Replaced
from vmckpt.vm.spec.spec import Spec


class WaitingGuest(Protocol):
    """A QEMU that waits for the guest, whose memory is the replica's file. It sends nothing."""

    qemu: Qemu

    @property
    def directory(self) -> VmDir:
        """The VM's files on this host."""

    async def load(self, device_state: bytes) -> None:
        """Load the guest, whose memory it has; it stays paused, ready to run.

        Raises OperationFailedError; then this QEMU is no longer usable.
        """

    def settle_here(self) -> None:
        """The VM is at home here, and its former home is stale. Raises OSError."""

    async def run(self) -> None:
        """Resume the guest as soon as the old holder has released its disks' locks.

        Raises OperationFailedError: it is intact, and paused.
        """

    async def announce(self) -> None:
        """Announce the guest to the network."""

    async def conclude(self) -> None:
        """It runs here for good, and its primary knows: do what remains. Raises VmckptError."""

    async def close(self) -> None:
        """Disconnect; what QEMU is doing continues."""

    async def end(self) -> None:
        """End it, and remove all that this host has of the VM."""

    async def ended(self) -> str:
        """Return when it is no longer usable, and why: its process has ended, or hangs."""

    async def lack(self) -> str:
        """Why it could not run the guest now; empty if it could."""


async def start_waiting(host: LocalHost, spec: Spec, request: ReplicationRequest) -> WaitingGuest:
    """Raises as `Warm.start` and `WaitingDomain.start`; then nothing of it is left."""
    replaced = Replaced(request.primary.name, request.qemu_id)
    if request.domain is None:
        from vmckpt.replicate.standby.warm import Warm

        return await Warm.start(host, spec, request.platform, replaced)
    from vmckpt.replicate.domains.waiting import WaitingDomain

    return await WaitingDomain.start(host, spec, request.domain, request.platform, replaced)
