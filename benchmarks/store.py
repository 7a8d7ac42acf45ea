"""The store's own speed and sizes, with the memory of a guest of 1 GiB: `make bench BENCH=store`.

Its RAM file is looked at 21 times, a second apart, while it answers requests and writes 1 MB/s of
text to its memory; the first look becomes a full checkpoint, each other an incremental of what
differs. A plain dump is all of its RAM written to a file, zeroes too. Both are synced.
"""

import asyncio
import hashlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from benchmarks.setting import machine, write_result
from benchmarks.store_plot import draw
from tests.qemu.world import World, image, qemu, world
from vmckpt.lab.guests.labguest import LabGuest
from vmckpt.memory.ram_file import extents
from vmckpt.store.area import Area
from vmckpt.store.check import check
from vmckpt.store.files.manifest import PAGE_CHUNK_BYTES, Manifest
from vmckpt.store.open import create_store
from vmckpt.store.sealing.keys import KeyHolder, KeySource, make_key_file
from vmckpt.store.sealing.seal import HASH_BYTES, Sealer
from vmckpt.store.store import Store

GUEST = LabGuest("stored", 1, image(), memory="1G")
LOOKS = 21
FAULTS = 2000
RAM = "ram"


@dataclass(frozen=True, slots=True)
class Look:
    """The guest's memory as of one moment: the first in a file, later ones what differs."""

    numbers: "np.ndarray[tuple[int], np.dtype[np.int64]]"
    data: bytes


def timed(what: Callable[[], Any]) -> float:
    """How long it takes."""
    began_s = time.perf_counter()
    what()
    return time.perf_counter() - began_s


@asynccontextmanager
async def working(made: World) -> AsyncIterator[None]:
    """The guest answers and writes, for the block."""
    control = await GUEST.control(made.lab)
    client = await GUEST.key_value(made.lab)
    await control.load_memory("rate=1M set=16M pattern=zipf content=text")

    async def ask() -> None:
        while True:
            await client.incr("count")

    asking = asyncio.ensure_future(ask())
    try:
        yield
    finally:
        asking.cancel()
        await asyncio.wait({asking})
        await client.close()
        await control.close()


async def look(made: World, folder: Path) -> tuple[Path, list[Look]]:
    """The guest's memory while it works."""
    looks: list[Look] = []
    first = folder / "ram"
    async with working(made):
        [source] = Path("/dev/shm").glob(f"vmckpt-{GUEST.name}-*.ram")
        shutil.copyfile(source, first)
        before = np.fromfile(first, dtype=np.uint64).reshape(-1, PAGE_CHUNK_BYTES // 8)
        for _ in range(LOOKS - 1):
            await asyncio.sleep(1)
            now = np.fromfile(source, dtype=np.uint64).reshape(before.shape)
            dirty = np.flatnonzero((now != before).any(axis=1))
            looks.append(Look(dirty, now[dirty].tobytes()))
            before = now
    return first, looks


def dump(ram: Path, target: Path) -> None:
    """A plain dump."""
    with ram.open("rb") as source, target.open("wb") as file:
        shutil.copyfileobj(source, file, 1 << 20)
        file.flush()
        os.fsync(file.fileno())


def full(store: Store, ram: Path) -> Manifest:
    """A checkpoint of all of it."""
    fd = os.open(ram, os.O_RDONLY)
    try:
        with store.begin("guest") as new:
            size = os.fstat(fd).st_size
            area = new.area(RAM, size_bytes=size, chunk_bytes=PAGE_CHUNK_BYTES)
            area.put_file(fd, extents(fd, size))
            return new.commit({})
    finally:
        os.close(fd)


def incremental(store: Store, parent: Manifest, one: Look) -> Manifest:
    """A checkpoint of what differs."""
    with store.begin("guest", parent.id) as new:
        size = parent.areas[0].size_bytes
        area = new.area(RAM, size_bytes=size, chunk_bytes=PAGE_CHUNK_BYTES)
        area.put(one.numbers, one.data)
        return new.commit({})


def hashing(ram: Path) -> dict[str, float]:
    """How fast pages get their names, and how much smaller than in frames all of it would be."""
    pages = np.fromfile(ram, dtype=np.uint8).reshape(-1, PAGE_CHUNK_BYTES)
    data = pages[pages.any(axis=1)].reshape(-1).data
    sealer, key = Sealer(bytes(32), encrypted=False), bytes(32)

    def blake2b() -> None:
        for at in range(0, len(data), PAGE_CHUNK_BYTES):
            page = data[at : at + PAGE_CHUNK_BYTES]
            hashlib.blake2b(page, key=key, digest_size=HASH_BYTES).digest()

    return {
        "blake3_bytes_per_s": len(data) / timed(lambda: sealer.hashes(data, PAGE_CHUNK_BYTES)),
        "blake2b_bytes_per_s": len(data) / timed(blake2b),
        "one_stream_bytes": len(zstandard.compress(bytes(data), 1)),
    }


def faults(area: Area) -> list[float]:
    """How long single pages take, in no order, as they do when a guest asks for them."""
    rng = np.random.default_rng(1)
    pages = rng.permutation(area.numbers())[:FAULTS]
    return sorted(timed(partial(area.read_around, page)) for page in pages.tolist())


def measure(store: Store, ram: Path, looks: list[Look], folder: Path) -> dict[str, Any]:
    """One kind of store."""
    dump_s = timed(lambda: dump(ram, folder / "dump"))
    began_s = time.perf_counter()
    first = full(store, ram)
    full_s = time.perf_counter() - began_s
    latest, increments = first, []
    for one in looks:
        began_s = time.perf_counter()
        latest = incremental(store, latest, one)
        increments.append(
            {
                "dirty_pages": len(one.numbers),
                "seconds": time.perf_counter() - began_s,
                "added_bytes": latest.added_bytes,
                "zstd_bytes": len(zstandard.compress(one.data, 3)),
            }
        )
    with store.read(latest.id) as point:
        area = point.area(RAM)
        taken = faults(area)
        stream_s = timed(lambda: [None for _ in area.stream()])
        read_bytes = len(area.numbers()) * PAGE_CHUNK_BYTES
    check_s = timed(lambda: check(store))
    added, packed = (sum(i[key] for i in increments) for key in ("added_bytes", "zstd_bytes"))
    return {
        "dump_s": dump_s,
        "dump_bytes": ram.stat().st_size,
        "full_s": full_s,
        "full_bytes": first.added_bytes,
        "full_ratio": first.added_bytes / ram.stat().st_size,
        "pages": first.areas[0].chunks,
        "incrementals": increments,
        "incremental_ratio": added / packed,
        "twenty_ratio": (first.added_bytes + added) / first.added_bytes,
        "fault_ms": {
            "median": 1e3 * statistics.median(taken),
            "p99": 1e3 * taken[int(len(taken) * 0.99)],
            "most": 1e3 * taken[-1],
        },
        "stream_bytes_per_s": read_bytes / stream_s,
        "check_s": check_s,
    }


def main() -> None:
    """Measure both kinds, print, and write the result."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=Path.cwd() / "build") as name, world(qemu("10.0")) as made:
        folder = Path(name)
        made.run_guest(GUEST, "lab-a")
        ram, looks = asyncio.run(look(made, folder))
        made.ok("vm", "stop", "--force", GUEST.name)
        make_key_file(folder / "key")
        hashed = hashing(ram)
        print(hashed)
        for kind, key in (
            ("clear", None),
            ("encrypted", KeySource(KeyHolder.FILE, f"{folder}/key")),
        ):
            with create_store(str(folder / kind), key) as store:
                results[kind] = found = measure(store, ram, looks, folder)
            print(
                f"{kind}: dump {found['dump_s']:.2f} s, full {found['full_s']:.2f} s and "
                f"{found['full_ratio']:.3f} of it, incrementals {found['incremental_ratio']:.2f} "
                f"of zstd, all {found['twenty_ratio']:.2f} of one full, a page "
                f"{found['fault_ms']['median']:.2f} ms (p99 {found['fault_ms']['p99']:.2f}), "
                f"all pages {found['stream_bytes_per_s'] / 1e6:.0f} MB/s"
            )
    found = {"machine": machine(), "hashing": hashed, "stores": results}
    path = write_result("store", found)
    draw(found, path.with_suffix(".png"))
    print(f"written: {path}")


if __name__ == "__main__":
    main()
