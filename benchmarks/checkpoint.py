"""What a checkpoint costs its guest, beside what a stock QEMU offers; what it stores; coming back.

Run: python -m benchmarks.checkpoint [PART ...] ; parts are pauses, stored, restore, forks; without
any, all. Each part adds to results/checkpoint.json. One guest under TCG, its disk a qcow2:

- pauses: of `checkpoint create`, of QEMU's savevm and of a save to a file (mapped-ram), for guests
  of 256 MiB, 1 and 4 GiB that dirty 0, 20 and 100 MB/s.
- stored: what a checkpoint of a guest that dirties 20 MB/s adds to the store, beside zstd over the
  pages and blocks that differ; twenty of them; the first one of a booted guest of 1 GiB beside a
  dump of its memory by QEMU.
- restore: from the end of the checks to a guest that runs, lazily, 256 MiB and 4 GiB, with its disk
  and without one, and to the first answer of its TCP server.
- forks: how long each takes, and what 16 of a guest of 256 MiB use of this machine's memory.
"""

import argparse
import asyncio
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import zstandard

from benchmarks.replication_rivals import saved_to_files
from benchmarks.setting import RESULTS, await_quiet, machine, write_result
from benchmarks.summary import Verdict, verdicts_as_json
from tests.qemu.world import World, image, qemu, world
from vmckpt.checkpoint.place import own_place
from vmckpt.lab.guest import GuestControl
from vmckpt.lab.labguest import LabGuest
from vmckpt.qemu.monitor import session
from vmckpt.store.open import open_store
from vmckpt.vm.inventory import Vm, read_vm

NAME, PATIENCE_S, SETTLE_S = "bench", 60.0, 3.0
SIZES, RATES = ("256M", "1G", "4G"), ("0", "20M", "100M")
SETS = {"256M": "96M", "1G": "256M", "4G": "256M"}
ROUNDS, MANY = 3, 20
NO_DISK, WITH_DISK = None, "128M"


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


async def pauses() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for memory in SIZES:
        for rate in RATES:
            with world(qemu("10.0")) as made:
                control = await loaded(made, memory, rate, WITH_DISK)
                taken = [await create(made) for _ in range(ROUNDS)]
                cell: dict[str, Any] = {
                    "ours_ms": [one["pause_ms"] for one in taken],
                    "took_s": [one["took_s"] for one in taken],
                    "added_bytes": [one["stored"] for one in taken],
                    "passes": [one["passes"] for one in taken],
                }
                if memory != "4G" or rate == "0":
                    cell["savevm_ms"] = await savevm(made)
                    cell["files"] = await saved_to_files(made, "lab-a", NAME)
                await control.close()
            found[f"{memory} {rate}"] = cell
            print(memory, rate, {k: v for k, v in cell.items() if k != "files"}, flush=True)
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
    found: dict[str, Any] = {}
    with world(qemu("10.0")) as made:
        control = await loaded(made, "256M", "20M", WITH_DISK)
        await control.load_disk("rate=2M size=32M")
        taken = []
        for _ in range(MANY):
            taken.append(await create(made))
            await asyncio.sleep(1.0)
        await control.close()
        place = own_place(made.asked("lab-a").state_dir)
        ids = [one["id"] for one in taken]
        changed = await asyncio.to_thread(zstd_of_changes, place, ids)
        added = [one["stored"] for one in taken]
        found["twenty"] = {
            "added_bytes": added,
            "zstd_of_changes_bytes": changed,
            "ratios": [a / c for a, c in zip(added[1:], changed, strict=True)],
            "whole_over_first": sum(added) / added[0],
        }
    with world(qemu("10.0")) as made:
        control = await loaded(made, "1G", "0", NO_DISK)
        first = await create(made)
        dump_s, dump_bytes = await dumped(made)
        await control.close()
        found["booted"] = {
            "added_bytes": first["stored"],
            "took_s": first["took_s"],
            "dump_bytes": dump_bytes,
            "dump_s": dump_s,
        }
    print(json.dumps(found), flush=True)
    return found


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


async def dumped(made: World) -> tuple[float, int]:
    """All of the memory by QEMU's dump-guest-memory: seconds, and bytes."""
    vm = await vm_of(made)
    path = Path("/dev/shm") / f"vk-dump-{vm.qemu.process.pid}"
    async with session(await vm.host.connect(vm.qemu.files.operator), NAME) as monitor:
        began_s = time.monotonic()
        await monitor.tell(
            "dump-guest-memory", {"paging": False, "protocol": f"file:{path}"}, timeout_s=None
        )
        took_s = time.monotonic() - began_s
    size = path.stat().st_size
    path.unlink()
    return took_s, size


async def restored() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for memory in ("256M", "4G"):
        for disk in (NO_DISK, WITH_DISK):
            with world(qemu("10.0")) as made:
                control = await loaded(made, memory, "20M", disk)
                await control.close()
                point = await create(made)
                guest = LabGuest(NAME, 1, image(), memory=memory, disk=disk)
                runs = []
                for _ in range(ROUNDS):
                    words = ("checkpoint", "restore", point["id"], "--in-place")
                    done = await asyncio.to_thread(made.ok, *words)
                    began_s = time.monotonic()
                    control = await guest.control(made.lab)
                    answered_ms = (time.monotonic() - began_s) * 1e3
                    sound = (await control.verify_memory()).sound
                    await control.close()
                    runs.append(done | {"answered_ms": answered_ms, "sound": sound})
                    while (  # noqa: ASYNC110 - nobody tells
                        await asyncio.to_thread(made.ok, "vm", "show", NAME)
                    )["operation"]:
                        await asyncio.sleep(0.2)
            key = f"{memory} {'with a disk' if disk else 'no disk'}"
            found[key] = runs
            print(key, runs, flush=True)
    return found


async def forked() -> dict[str, Any]:
    with world(qemu("10.0")) as made:
        control = await loaded(made, "256M", "0", NO_DISK)
        await control.close()
        point = await create(made)
        one_bytes = memory_used(made, NAME)
        done = await asyncio.to_thread(
            made.ok, "fork", point["id"], "--count", "16", "--name", "fork"
        )
        await asyncio.sleep(SETTLE_S)
        names = [one["name"] for one in done["forks"]]
        all_bytes = sum(memory_used(made, name) for name in names)
    found = {
        "took_ms": [one["took_ms"] for one in done["forks"]],
        "errors": [one["error"] for one in done["forks"] if one["error"]],
        "one_bytes": one_bytes,
        "sixteen_bytes": all_bytes,
    }
    print(json.dumps(found), flush=True)
    return found


def memory_used(made: World, name: str) -> int:
    """The VM's share of this machine's memory, pages that others have too counted in part (Pss)."""
    [pid] = made.pids(name)
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("no Pss")


def verdicts(found: dict[str, Any]) -> list[Verdict]:
    judged = []
    for cell, seen in found.get("pauses", {}).items():
        judged.append(Verdict(f"pause, {cell}, ms", statistics.median(seen["ours_ms"]), 10.0))
        if cell.startswith("1G") and "savevm_ms" in seen:
            ratio = statistics.median(seen["ours_ms"]) / statistics.median(seen["savevm_ms"])
            judged.append(Verdict(f"pause / savevm's, {cell}", ratio, 1 / 50))
    if "stored" in found:
        twenty, booted = found["stored"]["twenty"], found["stored"]["booted"]
        median = statistics.median(twenty["ratios"])
        judged += [
            Verdict("stored by an incremental / zstd of what changed", median, 1.2),
            Verdict("20 checkpoints / the first", twenty["whole_over_first"], 2.0),
            Verdict(
                "booted 1 GiB: stored / dump", booted["added_bytes"] / booted["dump_bytes"], 0.19
            ),
            Verdict("booted 1 GiB: time / dump's", booted["took_s"] / booted["dump_s"], 1.0),
        ]
    for key, runs in found.get("restore", {}).items():
        running = statistics.median(one["running_ms"] for one in runs)
        judged.append(Verdict(f"restore to running, {key}, ms", running, 60.0))
    if "forks" in found:
        forks = found["forks"]
        judged += [
            Verdict("a fork, the slowest, ms", max(forks["took_ms"]), 100.0),
            Verdict("16 forks' memory / one's", forks["sixteen_bytes"] / forks["one_bytes"], 6.0),
        ]
    return judged


PARTS = {"pauses": pauses, "stored": stored, "restore": restored, "forks": forked}


def main(parts: list[str]) -> None:
    """The parts, printed and written to results/checkpoint.json."""
    busy = asyncio.run(await_quiet(10.0, PATIENCE_S))
    before = RESULTS / "checkpoint.json"
    found: dict[str, Any] = json.loads(before.read_text()) if before.exists() else {}
    for part in parts or list(PARTS):
        found[part] = asyncio.run(PARTS[part]())
    found |= {"machine": machine(), "others_use_percent": round(busy, 1)}
    found["verdicts"] = verdicts_as_json(verdicts(found))
    print(f"written: {write_result('checkpoint', found)}")
    for verdict in found["verdicts"]:
        met = "met " if verdict["met"] else "NOT "
        print(f"  {met} {verdict['promise']}: {verdict['measured']:.3g} (at most "
              f"{verdict['limit']:.3g})")  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="checkpoints, measured")
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], default=[])
    main(parser.parse_args().parts)
