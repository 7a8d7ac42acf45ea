"""The dirty-rate monitor on real guests."""

import asyncio
import os
import random
import time
from itertools import pairwise
from pathlib import Path

import pytest

from tests.qemu.world import World, image, kill, qemu, world
from tests.waiting import eventually
from vmckpt.hosts.processes.process import find_by_argument
from vmckpt.lab.guests.labguest import LabGuest
from vmckpt.memory.ram_file import PAGE_BYTES

MIB = 1 << 20
NO_FILE = "its RAM is not in a file of its own"


def test_a_known_load_is_measured_and_others_are_given_way_to() -> None:
    guest = LabGuest("one", 1, image(), disk=None)
    with world(qemu("10.0")) as made:
        made.run_guest(guest, "lab-a")

        async def play() -> None:
            control = await guest.control(made.lab)
            await control.load_memory("rate=20M set=32M pattern=uniform content=text")
            before = (await control.stat()).mem_touches
            found = await asyncio.to_thread(made.ok, "dirty-rate", "one", "--for", "4s")
            touched = (await control.stat()).mem_touches - before
            await control.close()
            assert found["source"] == "page-tracking"
            # 32 MiB are dirtied, at 20 MiB/s of touches, some of them twice, and little else.
            assert 0.8 * 32 * MIB < found["working_set_bytes"] < 64 * MIB
            points = found["curve"]["points"]
            assert points[0][0] < 0.5
            assert points[-1][0] > 3
            assert all(before <= after for before, after in pairwise(points))
            short_s, _, short_pages, _ = points[0]
            assert short_pages / short_s < 2 * touched / 4
            assert found["dirtied"]["compressible"] > 0.5
            assert 0 < found["ram"]["zero"] < 1
            holes, zeroes, *_ = (sum(piece) for piece in zip(*found["layout"], strict=True))
            assert 0 < holes <= zeroes < len(found["layout"])
            assert zeroes / len(found["layout"]) == pytest.approx(found["ram"]["zero"], abs=0.01)
            assert found["course"]["pages"][0][-1] * PAGE_BYTES >= found["working_set_bytes"]

        asyncio.run(play())
        (process,) = made.qemus("one")
        assert not any("userfaultfd" in link for link in links(process.pid))
        measuring = made.begin("dirty-rate", "one", "--for", "60s")
        eventually(lambda: "userfaultfd" in str(links(measuring.pid)), 20, "it measures")
        busy = made.vmckpt("dirty-rate", "one")
        assert (busy.code, "tracked" in busy.error["what"]) == (5, True)
        made.ok("vm", "stop", "one", "--force")
        out, _ = measuring.communicate(timeout=20)
        assert measuring.returncode in (4, 5), out
        refused = made.vmckpt("dirty-rate", "one")
        assert (refused.code, "stopped" in refused.error["what"]) == (4, True)
        assert made.vmckpt("dirty-rate", "one", "--for", "3").code == 2
        assert made.vmckpt("dirty-rate", "one", "--plot", "dirty.gif").code == 2


def links(pid: int) -> list[str]:
    directory = f"/proc/{pid}/fd"
    found = []
    for name in os.listdir(directory):
        try:
            found.append(str(Path(directory, name).readlink()))
        except FileNotFoundError:
            continue
    return found


def test_a_measurement_killed_as_it_begins_harms_nothing() -> None:
    guest = LabGuest("one", 1, image(), disk=None)
    moments = random.Random(seed := time.time_ns())
    print(f"seed {seed}")
    with world(qemu("10.0"), qemu("10.0")) as made:
        picture = made.state_dir / "dirty.svg"
        made.run_guest(guest, "lab-a")
        (process,) = made.qemus("one")

        async def play() -> None:
            control = await guest.control(made.lab)
            await control.load_memory("rate=20M set=32M pattern=uniform content=random")
            began_s = time.monotonic()
            measuring = made.begin("dirty-rate", "one", "--for", "60s")
            eventually(lambda: "userfaultfd" in str(links(measuring.pid)), 20, "it measures")
            starts_s = time.monotonic() - began_s
            kill(measuring)
            for round_ in range(15):
                measuring = made.begin("dirty-rate", "one", "--for", "60s")
                if round_ % 3:
                    await asyncio.sleep(max(0.0, moments.uniform(starts_s - 0.2, starts_s + 0.1)))
                else:
                    wait_until_traced(process.pid, starts_s + 0.5)
                kill(measuring)
                tracer = f"process_call.py\0{process.pid}\0"
                eventually(lambda it=tracer: not find_by_argument(it), 20, "QEMU is let go")
                await control.ping(timeout_s=20)
            assert made.qemus("one") == [process]
            assert not any("userfaultfd" in link for link in links(process.pid))
            assert (await control.verify_memory()).sound
            words = ("dirty-rate", "one", "--for", "1s", "--plot", str(picture))
            found = await asyncio.to_thread(made.ok, *words)
            assert found["source"] == "page-tracking"
            assert "<svg" in picture.read_text()
            await asyncio.to_thread(made.ok, "migrate", "one", "lab-b")
            assert (await control.verify_memory()).sound
            await control.close()

        asyncio.run(play())


def wait_until_traced(pid: int, within_s: float) -> None:
    """Return while ptrace holds it, which is for some 0.3 ms; it may be missed."""
    deadline = time.monotonic() + within_s
    with Path(f"/proc/{pid}/status").open("rb", 0) as status:
        while b"TracerPid:\t0\n" in os.pread(status.fileno(), 512, 0):
            if time.monotonic() > deadline:
                return


@pytest.mark.parametrize("version", ["10.0", pytest.param("7.2", marks=pytest.mark.long)])
def test_where_pages_cannot_be_tracked_qemu_samples_them(version: str) -> None:
    guest = LabGuest("one", 1, image(), disk=None)
    with world(qemu(version)) as made:
        made.run_guest(guest, "lab-a")
        (ram,) = Path("/dev/shm").glob(f"vmckpt-one-{qemu_id(made)}/ram")

        async def play() -> None:
            control = await guest.control(made.lab)
            await control.load_memory("rate=20M set=64M pattern=sequential content=text")
            ram.unlink()  # to an onlooker it is no named file any longer
            found = await asyncio.to_thread(made.ok, "dirty-rate", "one", "--for", "3s")
            await control.close()
            assert (found["source"], found["why"]) == ("qemu-page-sampling", NO_FILE)
            (first_s, _, pages, _), (second_s, *_) = found["curve"]["points"]
            assert (first_s, second_s) == (1, 2)
            assert 10 * MIB < 4096 * pages < 40 * MIB
            assert found["ram"] is None

        asyncio.run(play())


def qemu_id(made: World) -> str:
    (directory,) = (made.lab.host("lab-a").state_dir / "vms/one").glob("qemu-*")
    return directory.name.removeprefix("qemu-")
