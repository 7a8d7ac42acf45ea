"""How many moves under load lose something? There and back, every answer, page and record checked.

Run: python -m benchmarks.soak [--trips 100]. A guest dirties 20 MB/s of memory and writes 2 MB/s
to its disk, all self-checking; a client outside holds a TCP connection and checks every answer. A
damaged guest is started again and counted. Moves with a QEMU 7.2 source under TCG are counted
apart: it loses dirty pages by a bug of its own (benchmarks/results/soak.json shows how often).
"""

import argparse
import asyncio
import json
import time
from collections import Counter
from contextlib import suppress
from typing import Any

from benchmarks.setting import machine, write_result
from benchmarks.soak_plot import draw, name
from tests.qemu.world import World, image, qemu, world
from vmckpt.errors import VmckptError
from vmckpt.lab.guests.guest import GuestControl, KvClient
from vmckpt.lab.guests.labguest import LabGuest

PLAN = (("10.0", "10.0", "precopy"), ("10.0", "10.0", "postcopy"), ("10.0", "7.2", "precopy"),
        ("10.0", "7.2", "postcopy"))  # fmt: skip
MACHINE = "pc-q35-7.2"
LOAD = ("rate=20M set=64M pattern=uniform content=random", "rate=2M size=32M")


async def soak(made: World, pair: tuple[str, str], method: str, trips: int) -> list[dict[str, Any]]:
    """Every hop of `trips` trips there and back, as a row."""
    guest = LabGuest("soak", 1, image(), machine=MACHINE)
    rows = []
    load = await Load.begin(made, guest)
    for hop in range(2 * trips):
        source, target = pair if hop % 2 == 0 else pair[::-1]
        host = "lab-b" if hop % 2 == 0 else "lab-a"
        # From 7.2 under TCG vmckpt refuses post-copy, which destroys the guest; auto stops it.
        asked = "auto" if source == "7.2" and method == "postcopy" else method
        done = await asyncio.to_thread(made.vmckpt, "migrate", "soak", host, "--method", asked)
        lost = await load.lost() if done.code == 0 else [f"exit code {done.code}: {done.stderr}"]
        keys = ("method", "total_time_s", "downtime_ms", "guest_downtime_ms", "transferred_bytes")
        figures = {key: done.result.get(key) for key in keys}
        rows.append({"source": source, "target": target, "asked": asked, "lost": lost} | figures)
        if lost:
            await load.end()
            made.ok("vm", "stop", "soak", "--force")
            made.ok("vm", "rm", "soak")
            (made.state_dir / "soak.qcow2").unlink()
            load = await Load.begin(made, guest, "lab-a" if hop % 2 else "lab-b")
    await load.end()
    return rows


class Load:
    """What the guest does, and the client that asks it."""

    def __init__(self, control: GuestControl, client: KvClient) -> None:
        self._control, self._client = control, client
        self._answers = 0
        self._asking = asyncio.ensure_future(self._ask())

    @classmethod
    async def begin(cls, made: World, guest: LabGuest, host: str = "lab-a") -> "Load":
        await asyncio.to_thread(made.run_guest, guest, host)
        control = await guest.control(made.lab)
        await control.load_memory(LOAD[0])
        await control.load_disk(LOAD[1])
        return cls(control, await guest.key_value(made.lab))

    async def _ask(self) -> None:
        while True:
            self._answers += 1
            count = await self._client.incr("count")
            if count != self._answers:
                raise ValueError(f"answer {self._answers} was {count}")
            await asyncio.sleep(0.01)

    async def lost(self) -> list[str]:
        """What the guest has lost so far, in words; empty when nothing."""
        before = self._answers
        try:
            memory = await self._control.verify_memory()
            disk = await self._control.verify_disk()
        except VmckptError as exc:
            return [f"the guest is gone: {exc}"]
        await asyncio.sleep(0.1)
        found = [] if memory.sound else [f"memory: {memory}"]
        found += [] if disk.sound else [f"disk: {disk}"]
        if self._asking.done():
            found.append(f"connection: {self._asking.exception()}")
        elif self._answers <= before:
            found.append("connection: no answer")
        return found

    async def end(self) -> None:
        self._asking.cancel()
        with suppress(asyncio.CancelledError, VmckptError, ValueError):
            await self._asking
        await self._client.close()
        await self._control.close()


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Hops, and hops that lost something, by source, target and method."""
    hops, damaged = Counter[str](), Counter[str]()
    for row in rows:
        hops[name(row)] += 1
        damaged[name(row)] += bool(row["lost"])
    return {way: {"hops": hops[way], "damaged": damaged[way]} for way in hops}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trips", type=int, default=100, help="there and back, for each way")
    parser.add_argument("--only", help="one way, e.g. '10.0 7.2 stop'")
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = []
    began_s = time.monotonic()
    for first, second, method in PLAN:
        if asked.only and asked.only != f"{first} {second} {method}":
            continue
        with world(qemu(first), qemu(second)) as made:
            rows += asyncio.run(soak(made, (first, second), method, asked.trips))
        print(f"{time.monotonic() - began_s:.0f} s: {json.dumps(summary(rows))}", flush=True)
        if not asked.only:
            parameters = {"trips": asked.trips, "machine_type": MACHINE, "load": LOAD}
            result = {"machine": machine(), "parameters": parameters, "summary": summary(rows)}
            path = write_result("soak", result | {"hops": rows})
            draw(result | {"hops": rows}, path.with_suffix(".png"))
    for row in rows:
        if row["lost"]:
            print(row["source"], "->", row["target"], row["asked"], row["lost"])


if __name__ == "__main__":
    main()
