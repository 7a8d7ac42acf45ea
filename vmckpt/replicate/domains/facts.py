"""What both sides of a replication know of a libvirt domain."""

from dataclasses import dataclass

from vmckpt.hosts.processes.process import ProcessId


@dataclass(frozen=True, slots=True)
class ReplicatedDomain:
    """What its primary's libvirt has of it.

    `xml`: the running domain's; `definition`: "" for a transient one. `machine` and `blocks`: its
    QEMU's machine type, and its blocks of RAM with their sizes, `ram_names` the guest's. `process`:
    its QEMU. `devices`: the ids of its devices, the images of its disks, and its vCPUs
    (`devices_of`).
    """

    uuid: str
    xml: str
    definition: str
    starts_with_host: bool
    machine: str
    blocks: tuple[tuple[str, int], ...]
    ram_names: tuple[str, ...]
    process: ProcessId
    devices: tuple[str, ...]
