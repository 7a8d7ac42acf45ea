"""The main job, shown: a real guest under load moves live between two hosts on this machine."""

import asyncio
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from vmckpt.errors import OperationFailedError
from vmckpt.lab.guests.guest import KvClient
from vmckpt.lab.guests.labguest import LabGuest
from vmckpt.lab.state import Lab, read


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
    guest = LabGuest("demo", 1, image, memory="512M")
    spec.write_text(guest.spec())
    _say("A guest: a Linux that computes, writes its disk and serves TCP.")
    _command("vm", "run", str(spec), "--host", "lab-a")
    lab = read(directory / "state")
    if lab is None:
        raise OperationFailedError("the lab is gone", why="it was taken down", remedy="try again")
    asyncio.run(_move_under_load(lab, guest))


async def _move_under_load(lab: Lab, guest: LabGuest) -> None:
    began_s = time.monotonic()
    control = await guest.control(lab)
    _say(f"It serves after {time.monotonic() - began_s:.1f} s.")
    await control.load_memory("rate=20M set=128M pattern=uniform content=random")
    await control.load_disk("rate=2M size=64M")
    _say("It now dirties 20 MB/s of memory and writes 2 MB/s to its disk, all of it checksummed;")
    _say("a client outside holds a TCP connection to it and checks every answer.")
    client = await guest.key_value(lab)
    moved = asyncio.Event()
    asking = asyncio.ensure_future(_keep_asking(client, moved))
    for destination, method in (("lab-b", "auto"), ("lab-a", "postcopy")):
        words = ["migrate", "demo", destination, "--method", method]
        if not await asyncio.to_thread(_command, *words, "--dry-run", may_fail=True):
            _say("That is refused, for the reason above; let it choose a method by itself.")
            words = words[:3]
        await asyncio.to_thread(_command, *words)
        await asyncio.sleep(0.5)
    moved.set()
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


async def _keep_asking(client: KvClient, until: asyncio.Event) -> tuple[int, float]:
    """Answers checked until the event, and the longest wait for one, seconds."""
    answers, longest_s = 0, 0.0
    while not until.is_set():
        sent_s = time.monotonic()
        answers += 1
        if await client.incr("demo") != answers:
            raise OperationFailedError(
                "the guest forgot an answer", why="its counter went back", remedy="report this"
            )
        longest_s = max(longest_s, time.monotonic() - sent_s)
        await asyncio.sleep(0.005)
    return answers, longest_s


def _command(*words: str, may_fail: bool = False) -> bool:
    """Run a command as a person would; whether it succeeded."""
    print(f"\n$ vmckpt {shlex.join(words)}", flush=True)
    done = subprocess.run([sys.executable, "-m", "vmckpt.cli.entry", *words], check=False)
    if done.returncode and not may_fail:
        raise OperationFailedError(
            f"vmckpt {words[0]} ended with {done.returncode}",
            why="see its message above",
            remedy="fix the reported cause, and try again",
        )
    return done.returncode == 0


def _say(text: str) -> None:
    print(f"# {text}", flush=True)
