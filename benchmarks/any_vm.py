"""What a checkpoint and a replication cost guests of every kind: with a screen, adopted, forked.

Run: make bench BENCH=any_vm, or python -m benchmarks.any_vm [PART ...]. Guests of 256 MiB under
TCG (QEMU 10.0) that dirty 20 MB/s of text; the screen is a VGA card beside a USB tablet.

- checkpoints: the longest pause of each `checkpoint create`, and all of it together, for a VM of
  vmckpt's own, one that was adopted, and a fork; with and without a screen, in turn, so that all
  kinds see the machine alike.
- replication: pauses at epochs of 25 ms with and without a screen, as `replicate status` has them.
"""

import argparse
import asyncio
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.any_vm_plot import draw
from benchmarks.parts import measure
from benchmarks.summary import Verdict
from tests.qemu.test_adopt import BLOCKDEV, HAND, adopt, by_hand
from tests.qemu.world import World, image, qemu, world
from vmckpt.lab.guests.labguest import LabGuest

NAME, PATIENCE_S, SETTLE_S = "bench", 60.0, 3.0
LOAD = "rate=20M set=64M pattern=uniform content=text"
ROUNDS, CHECKPOINTS, REPLICATED_S = 2, 5, 15.0
SCREEN = """
[[devices]]
driver = "VGA"
[[devices]]
driver = "qemu-xhci"
id = "usb"
[[devices]]
driver = "usb-tablet"
bus = "usb.0"
"""
BY_HAND_SCREEN = " -device VGA -device qemu-xhci,id=usb -device usb-tablet,bus=usb.0"
PLAIN, WITH = "without a screen", "with a screen"


@contextmanager
def own(screen: str) -> Iterator[tuple[World, str]]:
    """A VM of vmckpt's own, under load; what it is called."""
    with world(qemu("10.0"), qemu("10.0")) as made:
        guest = LabGuest(NAME, 1, image(), memory="256M")
        made.run_guest(guest, "lab-a", own_disk=True, more=SCREEN if screen == WITH else "")
        asyncio.run(under_load(made, guest))
        yield made, NAME


@contextmanager
def adopted(screen: str) -> Iterator[tuple[World, str]]:
    """A QEMU that was started by hand, with memory of its own, under load."""
    style = BLOCKDEV + (BY_HAND_SCREEN if screen == WITH else "")
    with world(qemu("10.0")) as made, by_hand(made, style, monitors=3):
        adopt(made)
        asyncio.run(under_load(made, HAND))
        yield made, HAND.name


@contextmanager
def forked(screen: str) -> Iterator[tuple[World, str]]:
    """A fork; it goes on dirtying as its original did, which is off."""
    with own(screen) as (made, name):
        (fork,) = made.ok("fork", name, "--count", "1", "--name", "f")["forks"]
        if fork["error"]:
            raise SystemExit(fork["error"])
        made.ok("vm", "stop", name, "--force")
        yield made, "f-1"


KINDS = {"own": own, "adopted": adopted, "fork": forked}


async def under_load(made: World, guest: LabGuest) -> None:
    """It dirties from now on."""
    control = await guest.control(made.lab)
    await control.load_memory(LOAD)
    await control.close()
    await asyncio.sleep(SETTLE_S)


async def checkpoints() -> dict[str, Any]:
    return await asyncio.to_thread(_checkpoints)


def _checkpoints() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(ROUNDS):
        for kind, make in KINDS.items():
            for screen in (PLAIN, WITH):
                with make(screen) as (made, name):
                    taken = [made.ok("checkpoint", "create", name) for _ in range(CHECKPOINTS)]
                cell = found.setdefault(f"{kind} {screen}", {"pause_ms": [], "stopped_ms": []})
                for field, values in cell.items():
                    values += [one[field] for one in taken]
                print(kind, screen, [round(one["pause_ms"], 1) for one in taken], flush=True)
    return found


async def replication() -> dict[str, Any]:
    return await asyncio.to_thread(_replication)


def _replication() -> dict[str, Any]:
    found: dict[str, Any] = {PLAIN: [], WITH: []}
    for _ in range(ROUNDS):
        for screen, told in found.items():
            with own(screen) as (made, name):
                made.ok("replicate", "start", name, "lab-b", "--epoch", "25ms")
                asyncio.run(asyncio.sleep(REPLICATED_S))
                sides = made.ok("replicate", "status", name)["sides"]
                (primary,) = (side for side in sides if side["role"] == "primary")
                told.append({field: primary[field] for field in FIGURES})
                made.ok("replicate", "stop", name)
            print(screen, told[-1], flush=True)
    return found


FIGURES = ("pause_p50_ms", "pause_p99_ms", "epochs_per_s", "safe_after_p50_ms")


def verdicts(found: dict[str, Any]) -> list[Verdict]:
    made = []
    for cell, seen in found.get("checkpoints", {}).items():
        median_ms = statistics.median(seen["pause_ms"])
        made.append(Verdict(f"pause of a checkpoint, {cell}, median, ms", median_ms, 10))
    if told := found.get("replication"):
        with_ms, without_ms = (
            statistics.median(one["pause_p50_ms"] for one in told[screen])
            for screen in (WITH, PLAIN)
        )
        made.append(Verdict("pause of an epoch with a screen, of that without one",
                            with_ms / without_ms, 1.3))  # fmt: skip
    return made


PARTS = {"checkpoints": checkpoints, "replication": replication}


def main() -> None:
    """Measure the parts that are named, or all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    chosen = parser.parse_args().parts or list(PARTS)
    measure("any_vm", {part: PARTS[part] for part in chosen}, verdicts, draw, PATIENCE_S)


if __name__ == "__main__":
    main()
