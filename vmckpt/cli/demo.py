"""The main job, shown: a real guest under load moves live between two hosts on this machine."""

import asyncio
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from vmckpt.errors import OperationFailedError, VmckptError
from vmckpt.lab.guest import CONTROL_PORT, KEY_VALUE_PORT, GuestControl, KvClient
from vmckpt.lab.sockets import connect_guest
from vmckpt.lab.state import Lab, read

GUEST = "10.77.0.11"
READY_TIMEOUT_S = 60.0
SPEC = """\
name = "demo"
memory = "512M"
heartbeat_id = 1            # the guest sends 1,000 heartbeats a second to an outside listener

[boot]
kernel = "{image}/vmlinuz"
initrd = "{image}/initrd"
cmdline = "console=ttyS0 quiet panic=-1 vk.id=1 vk.ip={guest}/24 vk.heartbeat=10.77.0.254:7700"

[[disks]]
path = "demo.qcow2"         # shared storage: both hosts see this file
size = "256M"

[[nics]]
network = "bridge"
"""


def demo(image: Path, qemu: Path) -> None:
    """Make a lab, run a guest, move it there and back under load; nothing of it stays.

    Raises what the commands raise; OperationFailedError when the guest has lost anything.
    """
    with tempfile.TemporaryDirectory(prefix="vmckpt-demo-", dir="/tmp") as name:
        directory = Path(name)
        os.environ["VMCKPT_STATE_DIR"] = str(directory / "state")
        try:
            _show(directory, image, qemu)
        finally:
            _command("lab", "down")


def _show(directory: Path, image: Path, qemu: Path) -> None:
    _say("Two hosts on this machine, each with its own network and state directory.")
    _command("lab", "up", "--hosts", "2", "--qemu", str(qemu))
    spec = directory / "demo.toml"
    spec.write_text(SPEC.format(image=image, guest=GUEST))
    _say("A guest: a Linux that computes, writes its disk and serves TCP.")
    _command("vm", "run", str(spec), "--host", "lab-a")
    lab = read(directory / "state")
    if lab is None:
        raise OperationFailedError("the lab is gone", why="it was taken down", remedy="try again")
    asyncio.run(_move_under_load(lab))


async def _move_under_load(lab: Lab) -> None:
    control = await _wait_until_ready(lab)
    await control.load_memory("rate=20M set=128M pattern=uniform content=random")
    await control.load_disk("rate=2M size=64M")
    _say("It now dirties 20 MB/s of memory and writes 2 MB/s to its disk, all of it checksummed;")
    _say("a client outside holds a TCP connection to it and checks every answer.")
    client = await KvClient.over(await connect_guest(lab, GUEST, KEY_VALUE_PORT))
    asking = asyncio.ensure_future(_keep_asking(client))
    for target, method in (("lab-b", "auto"), ("lab-a", "postcopy")):
        await asyncio.to_thread(_command, "migrate", "demo", target, "--method", method)
        await asyncio.sleep(0.5)
    asking.cancel()
    answers, longest_s = await asking
    await client.close()
    memory, disk = await control.verify_memory(), await control.verify_disk()
    await control.close()
    _say(f"The client: {answers} answers over one connection, none lost, doubled or out of order;")
    _say(f"the longest it waited for one: {longest_s * 1e3:.0f} ms.")
    _say(f"The guest's own check: {memory.pages} pages of memory, {memory.errors} wrong;")
    _say(f"{disk.records} records on its disk, {disk.errors} wrong.")
    if not (memory.sound and disk.sound):
        raise OperationFailedError(
            "the guest was damaged", why=f"{memory}, {disk}", remedy="see the warning above"
        )


async def _wait_until_ready(lab: Lab) -> GuestControl:
    began_s = time.monotonic()
    while True:
        try:
            sock = await connect_guest(lab, GUEST, CONTROL_PORT, timeout_s=1.0)
            control = await GuestControl.over(sock)
            await control.ping()
        except (OSError, VmckptError) as exc:
            if time.monotonic() - began_s > READY_TIMEOUT_S:
                raise OperationFailedError(
                    "the guest did not come up",
                    why=f"no answer within {READY_TIMEOUT_S:g} s: {exc}",
                    remedy="look at its console log",
                ) from exc
            await asyncio.sleep(0.2)
            continue
        _say(f"It serves after {time.monotonic() - began_s:.1f} s.")
        return control


async def _keep_asking(client: KvClient) -> tuple[int, float]:
    """Answers checked until cancelled, and the longest wait for one, seconds."""
    answers, longest_s = 0, 0.0
    try:
        while True:
            asked_s = time.monotonic()
            answers += 1
            if await asyncio.shield(client.incr("demo")) != answers:
                raise OperationFailedError(
                    "the guest forgot an answer", why="its counter went back", remedy="report this"
                )
            longest_s = max(longest_s, time.monotonic() - asked_s)
            await asyncio.sleep(0.005)
    except asyncio.CancelledError:
        return answers, longest_s


def _command(*words: str) -> None:
    print(f"\n$ vmckpt {shlex.join(words)}", flush=True)
    done = subprocess.run([sys.executable, "-m", "vmckpt.cli.main", *words], check=False)
    if done.returncode:
        raise OperationFailedError(
            f"vmckpt {words[0]} ended with {done.returncode}",
            why="see its message above",
            remedy="mend what it names and try again",
        )


def _say(text: str) -> None:
    print(f"# {text}", flush=True)
