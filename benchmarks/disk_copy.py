"""Does a moving disk lose a record, and how fast is it copied against a bare blockdev-mirror?

Run: python -m benchmarks.disk_copy [--runs 50] [--pairs 5]. First a guest writes and verifies
records while its local disk moves there and back. Then 512 MiB of random data are copied by
`vmckpt migrate` and by two bare QEMUs, in turns: start of the copy to both sides alike.
"""

import argparse
import asyncio
import json
import shutil
import statistics
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.disk_copy_plot import draw
from benchmarks.setting import machine, write_result
from tests.qemu.world import World, image, qemu, world
from vmckpt.hosts.host import Host
from vmckpt.hosts.local import LocalHost
from vmckpt.lab.guests.labguest import LabGuest
from vmckpt.qemu import block
from vmckpt.qemu.monitor import Monitor
from vmckpt.vm.start import greeted

GUEST = LabGuest("mover", 1, image(), disk="512M", disk_format="raw")
DATA_BYTES = 512 << 20
PORT = 47811


def run_guest(made: World, guest: LabGuest) -> None:
    """On lab-a, with a disk of the host's own."""
    spec = made.state_dir / f"{guest.name}.toml"
    spec.write_text(guest.spec().replace("path =", "image ="))
    made.ok("vm", "run", str(spec), "--host", "lab-a")


async def records(made: World, runs: int) -> list[dict[str, Any]]:
    """One row a move: what it took, and whether the guest finds every record afterwards."""
    guest, rows = replace(GUEST, disk="128M"), []
    await asyncio.to_thread(run_guest, made, guest)
    control = await guest.control(made.lab)
    await control.load_disk("rate=4M size=64M")
    for number in range(runs):
        target = "lab-a" if number % 2 else "lab-b"
        moved = await asyncio.to_thread(made.ok, "migrate", guest.name, target)
        disk = await control.verify_disk()
        row = {key: moved[key] for key in ("total_time_s", "downtime_ms", "guest_downtime_ms")}
        rows.append(row | {"records": disk.records, "sound": disk.sound})
        print(f"{number + 1}: {rows[-1]}", flush=True)
    await control.close()
    await asyncio.to_thread(made.ok, "vm", "stop", guest.name, "--force")
    await asyncio.to_thread(made.ok, "vm", "rm", guest.name)
    return rows


def fill(path: Path) -> None:
    """Data that neither zero detection nor holes make shorter."""
    with path.open("r+b") as file:
        subprocess.run(["head", "-c", str(DATA_BYTES), "/dev/urandom"], stdout=file, check=True)


async def by_vmckpt(made: World, target: str) -> float:
    """Seconds from the step "mirror" to the step "transfer"."""
    moved = await asyncio.to_thread(made.ok, "migrate", GUEST.name, target)
    record = json.loads(Path(moved["run_record"]).read_text())
    began = {event["phase"]: event["at_s"] for event in record["events"] if "phase" in event}
    return float(began["transfer"] - began["mirror"])


async def by_hand(source: Host, target: Host, data: Path) -> float:
    """Seconds that a bare blockdev-mirror takes between QEMUs that do nothing else."""
    copy = target.state_dir / "images" / "bare.raw"
    copy.parent.mkdir(exist_ok=True)
    with copy.open("wb") as file:
        file.truncate(DATA_BYTES)
    here, there = await start(source, data), await start(target, copy)
    try:
        began_s = time.monotonic()
        await block.nbd_server_start(there, target.migration_address, PORT)
        await block.block_export_add(there, "bare", "disk")
        server = {"type": "inet", "host": target.migration_address, "port": str(PORT)}
        nbd = {"driver": "nbd", "node-name": "copy", "server": server, "export": "bare"}
        await block.blockdev_add(here, nbd | {"discard": "unmap", "detect-zeroes": "unmap"})
        with here.events("BLOCK_JOB_READY") as ready:
            await block.blockdev_mirror(here, "bare", "disk", "copy", 0)
            if await ready.next(60.0) is None:
                raise SystemExit("the bare mirror does not become ready")
        return time.monotonic() - began_s
    finally:
        for monitor in (here, there):
            await monitor.tell("quit")
            await monitor.close()
        copy.unlink()


async def start(host: Host, path: Path) -> Monitor:
    """A QEMU without a guest, with one image open."""
    sock, log = host.state_dir / "bare.sock", host.state_dir / "bare.log"
    file = {"driver": "file", "filename": str(path), "cache": {"direct": True}, "discard": "unmap"}
    node = {"driver": "raw", "node-name": "disk", "discard": "unmap", "file": file}
    argv = [host.qemu, "-machine", "none", "-nodefaults", "-display", "none"]
    argv += ["-blockdev", json.dumps(node), "-qmp", f"unix:{sock},server=on,wait=off"]
    _, monitor = await greeted(host, argv, sock, log)
    return monitor


async def throughput(made: World, pairs: int) -> list[dict[str, float]]:
    """One row a pair: MB/s of both."""
    await asyncio.to_thread(run_guest, made, GUEST)
    control = await GUEST.control(made.lab)
    names = ("lab-a", "lab-b")
    hosts = [
        LocalHost(
            one.name, one.state_dir, one.migration_address, enter=one.enter, qemu=str(one.qemu)
        )
        for one in (made.lab.host(name) for name in names)
    ]
    rows = []
    for number in range(pairs):
        source, target = hosts if number % 2 == 0 else hosts[::-1]
        if number == 0:
            # The guest is stopped for it: QEMU holds a lock on its image.
            await control.close()
            await asyncio.to_thread(made.ok, "vm", "stop", GUEST.name, "--force")
            fill(source.state_dir / "images" / f"{GUEST.name}.raw")
            await asyncio.to_thread(made.ok, "vm", "start", GUEST.name)
            control = await GUEST.control(made.lab)
        data = source.state_dir / "bare-data.raw"
        image_file = source.state_dir / "images" / f"{GUEST.name}.raw"
        await asyncio.to_thread(shutil.copyfile, image_file, data)
        bare_s = await by_hand(source, target, data)
        data.unlink()
        ours_s = await by_vmckpt(made, target.name)
        rows.append({"bare_mb_per_s": DATA_BYTES / 1e6 / bare_s,
                     "vmckpt_mb_per_s": DATA_BYTES / 1e6 / ours_s})  # fmt: skip
        print(rows[-1], flush=True)
    await control.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=50, help="moves under a guest that writes")
    parser.add_argument("--pairs", type=int, default=5, help="copies timed against a bare one")
    asked = parser.parse_args()
    with world(qemu("10.0"), qemu("10.0")) as made:
        rows = asyncio.run(records(made, asked.runs))
        speeds = asyncio.run(throughput(made, asked.pairs))
    ratios = [row["vmckpt_mb_per_s"] / row["bare_mb_per_s"] for row in speeds]
    summary = {
        "runs": len(rows),
        "runs_that_lost_records": sum(not row["sound"] for row in rows),
        "throughput_ratio_median": round(statistics.median(ratios), 3) if ratios else None,
    }
    print(json.dumps(summary))
    result = {"machine": machine(), **summary, "moves": rows, "throughput": speeds}
    path = write_result("disk_copy", result)
    draw(result, path.with_suffix(".png"))
    print(path)


if __name__ == "__main__":
    main()
