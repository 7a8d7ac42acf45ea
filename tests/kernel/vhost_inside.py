"""What is tried in the machine of test_vhost.py, its only program; see tests/nested.py.

A guest whose NIC has vhost is flooded with packets. Each is marked, so the memory shows which
pages vhost has written, and the tracker has to have found every page that differs.
"""

import asyncio
import socket
import subprocess
import threading
import time
from pathlib import Path

from tests.nested import tell
from tests.qemu import world
from tests.waiting import eventually
from vmckpt.hosts.processes.kernel import PageTracking, page_tracking
from vmckpt.memory.private.guest_ram import GuestRam
from vmckpt.memory.private.process_memory import read_memory
from vmckpt.memory.ram_file import PAGE_BYTES
from vmckpt.memory.tracker import Tracker, tracking
from vmckpt.qemu import commands
from vmckpt.qemu.device_state import query_ram_blocks
from vmckpt.qemu.monitor import Monitor, session

ROUNDS, FLOOD_S, SIZE = 10, 3.0, 128 << 20
HOST, GUEST = "10.8.0.1", "10.8.0.2"
MARK = b"VHOST-WROTE-THIS"
BOOTED_S = 600


def main() -> None:
    assert page_tracking() is PageTracking.PROTECTION
    for words in (
        "tuntap add dev tap0 mode tap",
        f"addr add {HOST}/24 dev tap0",
        "link set tap0 up",
    ):
        subprocess.run(["ip", *words.split()], check=True)
    ours, theirs = socket.socketpair()
    with theirs:
        guest = start(theirs.fileno())
    try:
        asyncio.run(watch(guest.pid, ours))
    finally:
        guest.kill()
        guest.wait()


def start(monitor: int) -> subprocess.Popen[bytes]:
    """A guest whose memory its QEMU has alone, and whose NIC the kernel serves."""
    image = world.image()
    boot = ["-kernel", str(image / "vmlinuz"), "-initrd", str(image / "initrd")]
    words = f"console=ttyS0 quiet panic=-1 cryptomgr.notests vk.ip={GUEST}/24 vk.gw={HOST}"
    return subprocess.Popen(
        [
            *(str(world.qemu("10.0")), "-nodefaults", "-display", "none", "-machine", "q35"),
            *("-accel", "tcg", "-m", f"{SIZE >> 20}M", *boot, "-append", words),
            *("-netdev", "tap,id=n,ifname=tap0,script=no,downscript=no,vhost=on"),
            *("-device", "virtio-net-pci,netdev=n", "-serial", "file:/tmp/console"),
            *("-chardev", f"socket,id=qmp,fd={monitor}", "-mon", "chardev=qmp,mode=control"),
        ],
        stdin=subprocess.DEVNULL,
        pass_fds=(monitor,),
    )


async def watch(pid: int, sock: socket.socket) -> None:
    sock.setblocking(False)
    await asyncio.to_thread(eventually, answers, BOOTED_S, "the guest answers")
    opened = {str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()}
    assert "/dev/vhost-net" in opened, opened
    async with session(sock, "the guest's QEMU", 60) as monitor:
        [ram] = [one for one in await query_ram_blocks(monitor) if one.used_bytes == SIZE]
        assert ram.address is not None
        private = GuestRam(None, ((ram.address, ram.address + SIZE),))
        await commands.stop(monitor)
        with tracking(pid, private, PageTracking.PROTECTION, SIZE) as tracker:
            await rounds(monitor, tracker, pid, ram.address)
            await stopped(tracker)


async def rounds(monitor: Monitor, tracker: Tracker, pid: int, address: int) -> None:
    changed = packets = 0
    missed = set[int]()
    before = read_memory(pid, [(address, address + SIZE)])
    for number in range(ROUNDS):
        tracker.take_spans()
        await commands.cont(monitor)
        await asyncio.to_thread(flood, number)
        await commands.stop(monitor)
        found = {
            page
            for start, end in tracker.take_spans()
            for page in range(start // PAGE_BYTES, end // PAGE_BYTES)
        }
        after = read_memory(pid, [(address, address + SIZE)])
        differ = set(differing(before, after))
        missed |= differ - found
        changed += len(differ)
        packets += sum(after.count(marked(number), *span(page)) for page in differ)
        before = after
    tell(
        "the tracker has seen all that vhost wrote",
        rounds=ROUNDS,
        changed_pages=changed,
        packets_in_changed_pages=packets,
        missed_pages=len(missed),
    )


async def stopped(tracker: Tracker) -> None:
    """QEMU stops vhost with the guest."""
    tracker.take_spans()
    await asyncio.to_thread(flood, ROUNDS)
    assert tracker.take_spans() == []
    tell("a stopped guest is not written")


def flood(number: int) -> None:
    """Send marked packets for a while, from two threads."""

    def send() -> None:
        end = time.monotonic() + FLOOD_S
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            while time.monotonic() < end:
                sock.sendto(marked(number) * 40, (GUEST, 9))
                time.sleep(0.001)

    threads = [threading.Thread(target=send) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def marked(number: int) -> bytes:
    return MARK + b"%03d" % number


def differing(before: bytes, after: bytes) -> list[int]:
    return [
        page
        for page in range(SIZE // PAGE_BYTES)
        if before[slice(*span(page))] != after[slice(*span(page))]
    ]


def span(page: int) -> tuple[int, int]:
    return page * PAGE_BYTES, (page + 1) * PAGE_BYTES


def answers() -> bool:
    """It replies to a ping of its address resolution: the neighbour is known."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.sendto(b"hello", (GUEST, 9))
    time.sleep(1)
    known = subprocess.run(
        ["ip", "neigh", "show", GUEST], capture_output=True, text=True, check=True
    )
    return "lladdr" in known.stdout


if __name__ == "__main__":
    main()
