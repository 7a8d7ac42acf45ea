"""What a checkpoint costs its guest, beside what a stock QEMU offers; what it stores; coming back.

Run: make bench BENCH=checkpoint, or python -m benchmarks.checkpoint [PART ...] for pieces of at
most four minutes; each adds to results/checkpoint.json. One guest under TCG, its disk a qcow2:

- pauses-SIZE: of `checkpoint create` (the longest of each, and all of them together), of QEMU's
  savevm and of a save to a file (mapped-ram), for guests of 256M, 1G and 4G that dirty 0, 20 and
  100 MB/s.
- stored: what checkpoints of a guest of 256M add to the store, beside zstd over the pages and
  blocks that differ; twenty of them, of one that works (1 MB/s) and of one that dirties 20 MB/s.
- booted: the first checkpoint of a booted guest of 1 GiB beside a dump of its memory by QEMU onto
  the same file system, synced as the store is.
- restore-SIZE: from the end of the checks (a QEMU is started for the last of them) to a guest that
  runs, lazily, 256M and 4G, with its disk and without one, and to the first answer of its TCP
  server, which a client outside asks for all the time; its memory is checked each time.
- forks: how long each takes, and what 16 of a guest of 256 MiB use of this machine's memory. It
  sends no heartbeats: those of 16 guests are more than two processors can emulate.
"""

import argparse
import asyncio
import itertools
import json
import os
import statistics
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import zstandard

from benchmarks.checkpoint_plot import draw
from benchmarks.first_answer import asking
from benchmarks.parts import measure
from benchmarks.replication_rivals import saved_to_files
from benchmarks.summary import Verdict
from tests.qemu.world import World, image, qemu, world
from vmckpt.checkpoint.catalogue.location import own_location
from vmckpt.lab.guests.guest import CONTROL_PORT, GuestControl
from vmckpt.lab.guests.labguest import LabGuest
from vmckpt.qemu.monitor import session
from vmckpt.store.open import open_store
from vmckpt.vm.inventory import Vm, read_vm

NAME, PATIENCE_S, SETTLE_S = "bench", 60.0, 3.0
SIZES, RATES = ("256M", "1G", "4G"), ("0", "20M", "100M")
SETS = {"256M": "96M", "1G": "256M", "4G": "256M"}
ROUNDS, MANY = 5, 20
NO_DISK, WITH_DISK = None, "128M"


@asynccontextmanager
async def a_world() -> AsyncIterator[World]:
    """A lab with one host for the block."""
    with ExitStack() as stack:
        made = await asyncio.to_thread(stack.enter_context, world(qemu("10.0")))
        try:
            yield made
        finally:
            await asyncio.to_thread(stack.pop_all().close)


async def loaded(made: World, memory: str, rate: str, disk: str | None) -> GuestControl:
    """A guest that dirties so much a second, warm."""
    guest = LabGuest(NAME, 1, image(), memory=memory, disk=disk)
    await asyncio.to_thread(made.run_guest, guest, "lab-a")
    control = await guest.control(made.lab)
    if rate != "0":
        await control.load_memory(f"rate={rate} set={SETS[memory]} pattern=uniform content=text")
    await asyncio.sleep(SETTLE_S)
    return control


async def vm_of(made: World) -> Vm:
    found = await read_vm(made.asked("lab-a"), NAME)
    if found is None:
        raise SystemExit(f"{NAME} has gone")
    return found


async def create(made: World) -> dict[str, Any]:
    return await asyncio.to_thread(made.ok, "checkpoint", "create", NAME)


async def pauses(memory: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for rate in RATES:
        async with a_world() as made:
            control = await loaded(made, memory, rate, WITH_DISK)
            taken = [await create(made) for _ in range(ROUNDS)]
            cell: dict[str, Any] = {
                "ours_ms": [one["pause_ms"] for one in taken],
                "together_ms": [one["stopped_ms"] for one in taken],
                "took_s": [one["took_s"] for one in taken],
                "added_bytes": [one["stored"] for one in taken],
                "passes": [one["passes"] for one in taken],
                "left_pages": [one["changed_pages"] for one in taken],
            }
            cell["savevm_ms"] = await savevm(made)
            files = await saved_to_files(made, "lab-a", NAME)
            cell["mapped_ram_ms"] = files["to a file, mapped-ram"]["pauses_ms"]
            await control.close()
        found[rate] = cell
        print(memory, rate, cell, flush=True)
    return found


async def savevm(made: World) -> list[float]:
    vm, pauses_ms = await vm_of(made), []
    async with session(await vm.host.connect(vm.qemu.files.onlooker), NAME) as monitor:
        for number in range(2):
            with monitor.events("STOP", "RESUME") as events:
                await asyncio.to_thread(made.ok, "snapshot", "save", NAME, f"s{number}")
                stamps: list[Any] = [event["timestamp"] for event in events.drain()][:2]
            seconds = [stamp["seconds"] + stamp["microseconds"] / 1e6 for stamp in stamps]
            pauses_ms.append((seconds[1] - seconds[0]) * 1e3)
    return pauses_ms


async def stored() -> dict[str, Any]:
    """Of a guest that works (1 MB/s, its hottest pages most often), and of one under load."""
    loads = {
        "1M": ("rate=1M set=16M pattern=zipf content=text", "rate=200K size=16M"),
        "20M": ("rate=20M set=96M pattern=uniform content=text", "rate=2M size=32M"),
    }
    return {rate: await twenty(*words) for rate, words in loads.items()}


async def twenty(memory_load: str, disk_load: str) -> dict[str, Any]:
    async with a_world() as made:
        control = await loaded(made, "256M", "0", WITH_DISK)
        await control.load_memory(memory_load)
        await control.load_disk(disk_load)
        await asyncio.sleep(SETTLE_S)
        taken = []
        for _ in range(MANY):
            taken.append(await create(made))
            await asyncio.sleep(1.0)
        await control.close()
        place = own_location(made.asked("lab-a").state_dir)
        changed = await asyncio.to_thread(zstd_of_changes, place, [one["id"] for one in taken])
    added = [one["stored"] for one in taken]
    found = {
        "added_bytes": added,
        "zstd_of_changes_bytes": changed,
        "ratios": [a / c for a, c in zip(added[1:], changed, strict=True)],
        "whole_over_first": sum(added) / added[0],
    }
    print(json.dumps(found), flush=True)
    return found


async def booted() -> dict[str, Any]:
    runs = []
    for _ in range(2):
        async with a_world() as made:
            control = await loaded(made, "1G", "0", NO_DISK)
            first = await create(made)
            dump = await dumped(made)
            await control.close()
        runs.append({"added_bytes": first["stored"], "took_s": first["took_s"], **dump})
    print(json.dumps(runs), flush=True)
    return {"runs": runs}


def zstd_of_changes(place: str, ids: list[str]) -> list[int]:
    """zstd, each changed page or block by itself joined to megabytes, of what differs each time."""
    packer, sizes = zstandard.ZstdCompressor(level=3), []
    with open_store(place) as store:
        for before, after in itertools.pairwise(ids):
            total = 0
            with store.read(after) as point:
                for name, numbers in store.diff(before, after).items():
                    area = point.area(name)
                    step = (1 << 20) // area.chunk_bytes
                    for at in range(0, len(numbers), step):
                        data = bytes(area.read(numbers[at : at + step]))
                        total += len(packer.compress(data))
            sizes.append(total)
    return sizes


async def dumped(made: World) -> dict[str, Any]:
    """All of the memory by QEMU's dump-guest-memory: seconds without and with a sync, and bytes."""
    vm = await vm_of(made)
    path = made.state_dir / "dump"
    async with session(await vm.host.connect(vm.qemu.files.operator), NAME) as monitor:
        began_s = time.monotonic()
        await monitor.tell(
            "dump-guest-memory", {"paging": False, "protocol": f"file:{path}"}, timeout_s=None
        )
        dumped_s = time.monotonic() - began_s
    with path.open("rb") as file:
        os.fsync(file.fileno())
    synced_s, size = time.monotonic() - began_s, path.stat().st_size
    path.unlink()
    return {"dump_bytes": size, "dump_s": dumped_s, "dump_synced_s": synced_s}


async def restored(memory: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for disk in (NO_DISK, WITH_DISK):
        async with a_world() as made:
            control = await loaded(made, memory, "20M", disk)
            if disk:
                await control.load_disk("rate=2M size=32M")
            await control.close()
            point = await create(made)
            guest = LabGuest(NAME, 1, image(), memory=memory, disk=disk)
            runs = [await come_back(made, guest, point["id"]) for _ in range(ROUNDS)]
        key = f"{memory} {'with a disk' if disk else 'no disk'}"
        found[key] = runs
        print(key, runs, flush=True)
    return found


async def come_back(made: World, guest: LabGuest, point: str) -> dict[str, Any]:
    """Restored where there is no such VM any longer; who asks all the time is answered when?"""
    await asyncio.to_thread(made.ok, "vm", "stop", NAME, "--force")
    await asyncio.to_thread(made.ok, "vm", "rm", NAME)
    (made.shared / f"{NAME}.qcow2").unlink(missing_ok=True)
    probe = await asyncio.to_thread(asking, made.lab, guest.address, CONTROL_PORT)
    with probe:
        done = await asyncio.to_thread(made.ok, "checkpoint", "restore", point)
        answered_unix_s = float((await asyncio.to_thread(probe.communicate))[0])
    answered_ms = (answered_unix_s - done["ran_unix_s"]) * 1e3 + done["running_ms"]
    while (  # noqa: ASYNC110 - no one tells
        await asyncio.to_thread(made.ok, "vm", "show", NAME)
    )["operation"]:
        await asyncio.sleep(0.2)
    whole_s = time.time() - done["ran_unix_s"]
    control = await guest.control(made.lab)
    sound = (await control.verify_memory()).sound
    await control.close()
    if not sound:
        raise SystemExit("the guest's memory is wrong")
    return done | {"answered_ms": answered_ms, "whole_s": whole_s}


async def forked() -> dict[str, Any]:
    async with a_world() as made:
        control = await loaded(made, "256M", "0", NO_DISK)
        await control.beat(None)
        await control.close()
        point = await create(made)
        one = memory_used(made, NAME)
        began_s = time.monotonic()
        words = ("fork", point["id"], "--count", "16", "--name", "fork")
        done = await asyncio.to_thread(made.ok, *words)
        command_s = time.monotonic() - began_s
        await asyncio.sleep(SETTLE_S)
        names = [one["name"] for one in done["forks"]]
        apart_bytes = sum(sum(memory_used(made, name)[:2]) for name in names)
        [base, *_] = Path("/dev/shm").glob("vmckpt-fork-1-*")
        shared_bytes = base.stat().st_blocks * 512
    found = {
        "took_ms": [one["took_ms"] for one in done["forks"]],
        "command_s": command_s,
        "errors": [one["error"] for one in done["forks"] if one["error"]],
        "one_bytes": sum(one),
        "apart_bytes": apart_bytes,
        "shared_bytes": shared_bytes,
        "sixteen_bytes": apart_bytes + shared_bytes,
    }
    print(json.dumps(found), flush=True)
    return found


def memory_used(made: World, name: str) -> tuple[int, int, int]:
    """The VM's share of this machine's memory, in bytes: its own, of programs', and of RAM files.

    What others have too counts in part (Pss).
    """
    [pid] = made.pids(name)
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    found = {line.split()[0]: int(line.split()[1]) * 1024 for line in lines[1:]}
    return found["Pss_Anon:"], found["Pss_File:"], found["Pss_Shmem:"]


def verdicts(found: dict[str, Any]) -> list[Verdict]:
    judged = []
    for memory in SIZES:
        for rate, seen in found.get(f"pauses-{memory}", {}).items():
            ours, savevm_ms = (statistics.median(seen[key]) for key in ("ours_ms", "savevm_ms"))
            judged.append(Verdict(f"pause, {memory} at {rate}, ms", ours, 10.0))
            if memory == "1G":
                name = f"pause / savevm's, {memory} at {rate}"
                judged.append(Verdict(name, ours / savevm_ms, 1 / 50))
    for rate, seen in found.get("stored", {}).items():
        median = statistics.median(seen["ratios"])
        judged += [
            Verdict(f"stored / zstd of what changed, {rate}", median, 1.2),
            Verdict(f"20 checkpoints / the first, {rate}", seen["whole_over_first"], 2.0),
        ]
    for run in found.get("booted", {}).get("runs", []):
        judged += [
            Verdict("booted 1 GiB: stored / dump", run["added_bytes"] / run["dump_bytes"], 0.19),
            Verdict("booted 1 GiB: time / dump's", run["took_s"] / run["dump_synced_s"], 1.0),
        ]
    for memory in ("256M", "4G"):
        for key, runs in found.get(f"restore-{memory}", {}).items():
            for field, limit in (("running_ms", 60.0), ("answered_ms", 150.0)):
                median = statistics.median(one[field] for one in runs)
                judged.append(Verdict(f"restore, {key}: {field}", median, limit))
    if "forks" in found:
        forks = found["forks"]
        judged += [
            Verdict("a fork, the slowest, ms", max(forks["took_ms"]), 100.0),
            Verdict("16 forks' memory / one's", forks["sixteen_bytes"] / forks["one_bytes"], 6.0),
        ]
    return judged


PARTS: dict[str, Callable[[], Coroutine[Any, Any, dict[str, Any]]]] = {
    **{f"pauses-{memory}": partial(pauses, memory) for memory in SIZES},
    "stored": stored,
    "booted": booted,
    **{f"restore-{memory}": partial(restored, memory) for memory in ("256M", "4G")},
    "forks": forked,
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="checkpoints, measured")
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[])
    chosen = parser.parse_args().parts or list(PARTS)
    measure("checkpoint", {part: PARTS[part] for part in chosen}, verdicts, draw, PATIENCE_S)
