"""A test guest in the lab: its spec, and connections to it from the outside client."""

from dataclasses import dataclass
from pathlib import Path

from vmckpt.deadlines import retry
from vmckpt.errors import OperationFailedError, VmckptError
from vmckpt.lab.guests.guest import CONTROL_PORT, KEY_VALUE_PORT, GuestControl, KvClient
from vmckpt.lab.sockets import connect_guest
from vmckpt.lab.state import Lab

READY_TIMEOUT_S = 60.0
HEARTBEATS = "10.77.0.254:7700"


@dataclass(frozen=True, slots=True)
class LabGuest:
    """Guest `number` (1 to 200) of the lab; its disk, if any, is next to the spec."""

    name: str
    number: int
    image: Path
    memory: str = "256M"
    vcpus: int = 1
    machine: str = "q35"
    disk: str | None = "256M"
    disk_format: str = "qcow2"

    @property
    def address(self) -> str:
        """Its address on the guests' network."""
        return f"10.77.0.{10 + self.number}"

    def spec(self) -> str:
        """Its spec, TOML."""
        # QEMU 7.2's emulation has hung forever in the kernel's self-tests of its ciphers.
        cmdline = (
            "console=ttyS0 quiet panic=-1 cryptomgr.notests "
            f"vk.id={self.number} vk.ip={self.address}/24 vk.heartbeat={HEARTBEATS}"
        )
        text = f"""\
name = "{self.name}"
memory = "{self.memory}"
vcpus = {self.vcpus}
machine = "{self.machine}"
guest_agent = true
heartbeat_id = {self.number}   # it sends 1,000 heartbeats a second to a listener outside

[boot]
kernel = "{self.image}/vmlinuz"
initrd = "{self.image}/initrd"
cmdline = "{cmdline}"

[[nics]]
network = "bridge"
"""
        if self.disk is None:
            return text
        return f"""{text}
[[disks]]
path = "{self.name}.{self.disk_format}"   # shared storage: all hosts see this file
format = "{self.disk_format}"
size = "{self.disk}"
"""

    async def control(self, lab: Lab) -> GuestControl:
        """Connect to its control port, once it answers.

        Raises OperationFailedError if it does not within READY_TIMEOUT_S.
        """

        async def answering() -> GuestControl:
            sock = await connect_guest(lab, self.address, CONTROL_PORT, timeout_s=1.0)
            control = await GuestControl.over(sock)
            await control.ping()
            return control

        try:
            return await retry(
                answering, (OSError, VmckptError), every_s=0.1, within_s=READY_TIMEOUT_S
            )
        except (OSError, VmckptError) as exc:
            raise OperationFailedError(
                f"guest {self.name} does not answer",
                why=f"nothing within {READY_TIMEOUT_S:g} s: {exc}",
                remedy="see its console log (`vmckpt vm show`)",
            ) from exc

    async def key_value(self, lab: Lab) -> KvClient:
        """Connect to its key-value service."""
        return await KvClient.over(await connect_guest(lab, self.address, KEY_VALUE_PORT))
