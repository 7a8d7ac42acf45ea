"""Which devices keep QEMU from migrating, by the ids that their users gave them."""

import re
from collections.abc import Iterator, Mapping, Sequence

from vmckpt.preflight.finding import OK, REFUSE, Finding

# "non-migratable device: 0000:00:03.0/1/usb-mtp": the device's path, which begins at a PCI function
# if there is one, and its type (QEMU, migration/savevm.c).
_DEVICE = re.compile(r"non-migratable device: (?:(?P<pci>[0-9a-f]{4}(?::[0-9a-f]{2}){2}\.[0-7])/)?"
                     r"(?:(?P<below>.+)/)?(?P<kind>[^/]+)")  # fmt: skip
VFIO_REMEDY = (
    "run it from a spec with the device under [[passthrough]], strategy hook-detach or stop-app: "
    "then it is unplugged during the migration"
)


def device_checks(blockers: Sequence[str], pci_ids: Mapping[str, str]) -> Iterator[Finding]:
    """A check per blocker, from QEMU's messages and the ids of its PCI functions. Pure."""
    if not blockers:
        yield Finding("migratable", OK, "no device blocks migration")
    for blocker in blockers:
        found = _DEVICE.fullmatch(blocker)
        if found is None:
            reason = f"QEMU refuses to migrate it: {blocker}"
            remedy = VFIO_REMEDY if "VFIO" in blocker else "fix the reported cause"
        else:
            where = _device_at(found["pci"], found["below"], pci_ids)
            reason = f"the {found['kind']} {where} cannot be migrated"
            remedy = "unplug it, or take it out of the spec and restart the VM"
        yield Finding("migratable", REFUSE, reason, remedy)


def _device_at(pci: str | None, below: str | None, pci_ids: Mapping[str, str]) -> str:
    if pci is None:
        return f"at {below}" if below else "of the machine"
    name = pci_ids.get(pci, "")
    device = f"'{name}' (PCI {pci})" if name else f"without an id at PCI {pci}"
    return f"at port {below} of the device {device}" if below else device
