"""What is tried in the machine of test_vfio.py: a VM there has a card by VFIO, and moves with it.

The machine has an emulated IOMMU, two equal cards bound to vfio-pci, and runs this as its only
program. Two hosts of vmckpt's share it. What is not as it should be ends
it with a traceback.
"""

import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests import nested
from tests.nested import HOSTS, SLOWNESS, STATE, hosts
from tests.qemu import device_guest, world
from tests.qemu.device_guest import NAME, Job, in_guest, job
from tests.qemu.world import World

CARD = "1234:11e8"
LIMITS = ", ".join(f"{phase} = 300" for phase in device_guest.PHASES)
SPEC = """\
name = "{name}"
memory = "128M"
guest_agent = true

[boot]
kernel = "{image}/vmlinuz"
initrd = "{image}/initrd"
cmdline = "console=ttyS0 quiet panic=-1 cryptomgr.notests"

[[passthrough]]
id = "edu0"
match = "{card}"
hook = "/bin/device-hook"
limits_s = {{ {limits} }}
"""
EXIT_REFUSED, EXIT_UNDONE = 4, 7


def main() -> None:
    world.COMMAND_TIMEOUT_S *= int(SLOWNESS)
    device_guest.slowness = SLOWNESS
    made = hosts()
    (STATE / "worker.toml").write_text(
        SPEC.format(name=NAME, image=world.image(), card=CARD, limits=LIMITS)
    )
    begun = time.monotonic()
    made.ok("vm", "run", str(STATE / "worker.toml"), "--host", "lab-a")
    device_guest.ready(made)
    before = job(made)
    tell("the guest's job runs in the card", made, job=asdict(before), took_s=since(begun))
    before = a_hook_that_fails(made, before)
    before = a_card_that_somebody_has(made, before)
    for away in ("lab-b", "lab-a"):
        before = there(made, before, away)
    made.ok("vm", "stop", NAME, "--force")
    made.ok("vm", "rm", NAME)
    assert [made.files(name) for name in HOSTS] == [[], []]
    free = made.ok("device", "cards", "lab-a", "--match", CARD)["cards"]
    assert [card["state"] for card in free] == ["free", "free"], free
    tell("all is free again", cards=free)


def there(made: World, before: Job, away: str) -> Job:
    """A move: out of one card, into the other, and the job goes on."""
    begun = time.monotonic()
    result = made.ok("migrate", NAME, away, "--method", "stop")
    took_s = since(begun)
    assert made.ok("vm", "show", NAME)["host"] == away
    now = device_guest.well(made, before)
    tell(f"moved to {away}", made, job=asdict(now), took_s=took_s, steps=steps(made, result["run"]))
    return now


def a_hook_that_fails(made: World, before: Job) -> Job:
    """What fails past the checkpoint is taken back, in the card that the guest had."""
    card, begun = addresses(made), time.monotonic()
    in_guest(made, "sh", "-c", "echo release fail > /run/device-hook.fault")
    failed = made.vmckpt("migrate", NAME, "lab-b", "--method", "stop")
    took_s = since(begun)
    assert failed.code == EXIT_UNDONE, failed
    assert "in phase release" in failed.error["what"], failed.error
    now = device_guest.well(made, before)
    assert addresses(made) == card
    assert made.files("lab-b") == []
    tell("a hook failed, and all was taken back", made, job=asdict(now), took_s=took_s)
    return now


def a_card_that_somebody_has(made: World, before: Job) -> Job:
    """A card that a program of the host's has open is not free, whoever the program is."""
    other = next(one for one in cards() if one not in addresses(made))
    group = Path(f"/sys/bus/pci/devices/{other}/iommu_group").readlink().name
    held = os.open(f"/dev/vfio/{group}", os.O_RDWR)
    try:
        refused = made.vmckpt("migrate", NAME, "lab-b", "--method", "stop")
    finally:
        os.close(held)
    assert refused.code == EXIT_REFUSED, refused
    assert f"/dev/vfio/{group} is in use" in refused.error["why"], refused.error
    now = device_guest.well(made, before)
    tell("a card that somebody else has is not given away", made, why=refused.error["why"])
    return now


def tell(what: str, made: World | None = None, **facts: Any) -> None:
    """A line of evidence: with a VM, which card QEMU has open, and what it says of its device."""
    if made:
        (process,) = made.qemus(NAME)
        given = addresses(made)
        groups = sorted(opened(process.pid))
        wanted = [Path(f"/sys/bus/pci/devices/{one}/iommu_group").readlink().name for one in given]
        assert groups == sorted(set(wanted)), (groups, wanted)
        facts |= {
            "host": device_guest.place(made)[0],
            "card": given,
            "qemu_has_open": groups,
        }
    nested.tell(what, **facts)


def steps(made: World, run: str) -> list[str]:
    """What a migration did, in its order."""
    events = made.ok("runs", "show", run)["events"]
    return [event["phase"] for event in events if event["event"] == "PhaseBegan"]


def addresses(made: World) -> list[str]:
    (device,) = made.ok("device", "list", NAME)["devices"]
    assert (device["id"], device["state"]) == ("edu0", "plugged"), device
    found: list[str] = device["addresses"]
    return found


def cards() -> list[str]:
    """The addresses of all cards of the machine."""
    bound = Path("/sys/bus/pci/drivers/vfio-pci").iterdir()
    return sorted(path.name for path in bound if path.name.startswith("0000:"))


def opened(pid: int) -> set[str]:
    """The IOMMU groups that a process has open."""
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        name = str(link.readlink())
        if name.startswith("/dev/vfio/") and name != "/dev/vfio/vfio":
            found.add(name.removeprefix("/dev/vfio/"))
    return found


def since(begun: float) -> float:
    return round(time.monotonic() - begun, 1)


if __name__ == "__main__":
    main()
