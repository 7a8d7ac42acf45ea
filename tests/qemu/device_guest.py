"""A guest whose job keeps its state in a device: its spec, and what it says of itself.

QEMU's edu device stands in for a GPU: the job keeps its count in the device's registers and nowhere
else (images/guest/devicejob.c), and a hook in the guest (device-hook) saves and restores it as a
vendor's tool would. The guest agent is the real one.
"""

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path

from tests.qemu.world import World, image
from vmckpt.errors import VmckptError
from vmckpt.lab.guests.labguest import LabGuest
from vmckpt.qemu.agent import SYNC_TIMEOUT_S, GuestAgent, GuestExit
from vmckpt.qemu.hotplug import plugged
from vmckpt.qemu.monitor import session

NAME = "worker"
DEVICE = """
[[passthrough]]
id = "edu0"
driver = "edu"
hook = "/bin/device-hook"
"""
PHASES = ("preflight", "quiesce", "lock", "checkpoint", "release", "reattach", "restore",
          "resume", "abort")  # fmt: skip
# A hook that hangs is ended; one on a busy machine, where each phase takes seconds, is not.
LIMITS = f"limits_s = {{ {', '.join(f'{phase} = 20' for phase in PHASES)} }}\n"

# By how much guests are slower than elsewhere, and are asked less often.
slowness = 1.0


@dataclass(frozen=True, slots=True)
class Job:
    """What the job says of itself."""

    state: str
    count: int
    errors: int
    pid: int


def run_worker(made: World, host: str) -> None:
    """Start it there; its job runs when this returns."""
    made.run_guest(guest(), host, more=DEVICE + LIMITS)
    ready(made)


def guest() -> LabGuest:
    return LabGuest(NAME, 1, image(), memory="128M", disk=None)


def settled(made: World) -> dict[str, object]:
    """The VM as it is shown once nothing of it is cut off any longer."""
    deadline = time.monotonic() + 90 * slowness
    while (shown := made.vmckpt("vm", "show", NAME)).code:
        assert shown.code in (5, 9), shown.stderr
        assert time.monotonic() < deadline, shown.stderr
        time.sleep(0.5)
    assert shown.result["state"] == "running"
    return shown.result


def well(made: World, before: Job, name: str = NAME) -> Job:
    """The job goes on: the same one, in the device, none of its counts lost; as it is now."""
    assert asyncio.run(devices(made, name)) == {"edu0"}
    deadline = time.monotonic() + 60 * slowness
    first = job(made, name)
    while (now := job(made, name)).count == first.count:
        assert time.monotonic() < deadline, now
        time.sleep(0.1 * slowness)
    assert (now.state, now.errors, now.pid) == ("running", 0, before.pid)
    assert now.count >= before.count
    return now


def ready(made: World) -> None:
    """Return when the guest's job runs."""
    deadline = time.monotonic() + 120 * slowness
    while True:
        try:
            job(made)
            return
        except (VmckptError, AssertionError):
            assert time.monotonic() < deadline
            time.sleep(0.2 * slowness)


def job(made: World, name: str = NAME) -> Job:
    done = in_guest(made, "guestload", "device-job", "ask", "stat", name=name)
    assert done.returncode == 0, done
    words = dict(word.split("=") for word in done.out.decode().split()[1:])
    return Job(words["state"], int(words["count"]), int(words["errors"]), int(words["pid"]))


def in_guest(made: World, *argv: str, name: str = NAME) -> GuestExit:
    """Run a command in the guest, by its agent, which may be about to come back."""
    deadline = time.monotonic() + 30 * slowness
    while True:
        try:
            return asyncio.run(_in_guest(made, argv, name))
        except VmckptError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2 * slowness)


async def _in_guest(made: World, argv: tuple[str, ...], name: str) -> GuestExit:
    host, path = place(made, name)
    sock, answer_s = await made.asked(host).connect(path / "agent.sock"), 5.0 * slowness
    agent = await GuestAgent.connect(sock, SYNC_TIMEOUT_S * slowness)
    try:
        pid = await agent.start(argv, answer_s)
        while (done := await agent.ended(pid, answer_s)) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.02 * slowness)
        return done
    finally:
        await agent.close()


async def devices(made: World, name: str) -> set[str]:
    """What is plugged into the guest's one QEMU, by the ids of passthrough devices."""
    host, path = place(made, name)
    sock = await made.asked(host).connect(path / "watch.sock")
    async with session(sock, NAME) as monitor:
        return {one for one in await plugged(monitor) if one.startswith("edu")} - {"edu0-port"}


def place(made: World, vm: str = NAME) -> tuple[str, Path]:
    """The host that the guest is at home on, and its QEMU's directory there, seen from here."""
    found = [
        (name, path)
        for name in ("lab-a", "lab-b")
        for path in made.state(name).glob(f"vms/{vm}/qemu-*")
    ]
    ((host, path),) = found
    return host, path
