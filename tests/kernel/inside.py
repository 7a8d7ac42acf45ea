"""What is tried in the machine of test_soft_dirty.py, its only program; see tests/nested.py."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from tests import nested
from tests.nested import SLOWNESS, hosts, tell
from tests.qemu import world
from tests.qemu.world import World
from tests.ram_writer import Writer
from tests.waiting import eventually
from vmckpt.hosts.processes.kernel import PageTracking, page_tracking
from vmckpt.memory.private.guest_ram import GuestRam
from vmckpt.memory.ram_file import PAGE_BYTES
from vmckpt.memory.tracker import tracking

NAME = "worker"
SPEC = f"""\
name = "{NAME}"
memory = "128M"

[boot]
kernel = "{{image}}/vmlinuz"
initrd = "{{image}}/initrd"
cmdline = "console=ttyS0 quiet panic=-1 cryptomgr.notests vk.mem=rate=1M,set=16M,content=random"
"""
TICK = re.compile(r"VK tick=(\d+) mem_errors=(\d+)")
LOOKS, SIZE = 5, 256 << 20


def main() -> None:
    assert page_tracking() is PageTracking.SOFT_DIRTY
    os.environ["VMCKPT_TEST_OLD_KERNEL"] = "1"
    trackers()
    looks()
    world.COMMAND_TIMEOUT_S *= int(SLOWNESS)
    made = hosts()
    spec = nested.STATE / "worker.toml"
    spec.write_text(SPEC.format(image=world.image()))
    made.ok("vm", "run", str(spec), "--host", "lab-a")
    works(made, "lab-a")
    checkpoints(made)
    protected(made)
    made.ok("vm", "stop", NAME, "--force")


def trackers() -> None:
    """The suite that every tracker has to pass."""
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*argv, "--timeout=600", "tests/contract/test_trackers.py"],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    tell("the trackers' own tests", said=done.stdout.splitlines()[-1])


def looks() -> None:
    """How long a look takes each way, in ms, of a file that is full; the same few pages written."""
    with NamedTemporaryFile(dir="/dev/shm", prefix="vk-test-") as file:
        for _ in range(SIZE >> 20):
            file.write(os.urandom(1 << 20))
        file.flush()
        writer = Writer(Path(file.name))
        try:
            writer.does("read", *range(0, SIZE // PAGE_BYTES, 16))
            took_ms = {how.value: look_ms(writer, how) for how in list(PageTracking)[1:]}
        finally:
            writer.child.kill()
            writer.child.communicate()
    tell("looking at 256 MiB", **took_ms)


def look_ms(writer: Writer, how: PageTracking) -> float:
    """The median of some."""
    pages, took = range(100, 2100, 2), []
    with tracking(writer.pid, GuestRam(writer.path), how) as tracker:
        assert tracker.name == how.value
        for _ in range(LOOKS):
            writer.does("write", *pages)
            began = time.perf_counter()
            found = tracker.take_spans()
            took.append((time.perf_counter() - began) * 1e3)
            assert [start // PAGE_BYTES for start, _ in found] == list(pages)
    return round(sorted(took)[LOOKS // 2], 1)


def checkpoints(made: World) -> None:
    """Three, the later ones of what changed; back to the first."""
    store = str(nested.STATE / "store")
    made.ok("store", "init", store)
    taken = [made.ok("checkpoint", "create", NAME, "--store", store) for _ in range(3)]
    created = [
        {name: one[name] for name in ("pause_ms", "stored", "changed_pages")} for one in taken
    ]
    tell("checkpoints of a guest that works", created=created)
    made.ok("checkpoint", "restore", taken[1]["id"], "--store", store, "--in-place")
    works(made, "lab-a")
    tell("it went back, and its memory is whole", console=ticks(made, "lab-a")[-1])


def protected(made: World) -> None:
    """A standby has all of it."""
    # It has no network, whose output could be held.
    made.ok("replicate", "start", NAME, "lab-b", "--epoch", "2s", "--unsafe-no-output-commit")
    tracker, before = primary(made)["tracker"], primary(made)["epochs"]
    assert tracker == PageTracking.SOFT_DIRTY.value
    wait(lambda: primary(made)["epochs"] > before + 2, "epochs")
    made.ok("replicate", "failover", NAME)
    works(made, "lab-b")
    tell(
        "protected, and whole at the standby",
        tracker=tracker,
        console=ticks(made, "lab-b")[-1],
    )


def primary(made: World) -> dict[str, Any]:
    """What the primary says of itself."""
    sides = made.ok("replicate", "status", NAME)["sides"]
    return next(side for side in sides if side["role"] == "primary")


def works(made: World, host: str) -> None:
    """It gets on there, and has found nothing wrong with its memory since it began."""
    seen = len(ticks(made, host))
    wait(lambda: len(ticks(made, host)) > seen + 2, f"the guest gets on at {host}")
    wrong = [line for line in ticks(made, host) if line[1] != "0"]
    assert not wrong, wrong


def ticks(made: World, host: str) -> list[tuple[Any, ...]]:
    """What it says of itself on its console: the tick's number, and errors found so far."""
    root = made.lab.host(host).state_dir / "vms" / NAME
    logs = sorted(root.glob("qemu-*/console.log"), key=lambda path: path.stat().st_mtime)
    return TICK.findall(logs[-1].read_text(errors="replace")) if logs else []


def wait(until: Callable[[], object], what: str) -> None:
    eventually(until, 60 * SLOWNESS, what)


if __name__ == "__main__":
    main()
