"""A guest of 3 GiB that writes four times as much as the link takes: never killed, never silent.

Run: python -m benchmarks.replication_overload [--memory 3G] [--set 1G] [--times 4] [--seconds 60].
The guest rewrites whole pages of its working set, nothing of which packs, at the rate that it was
seen to reach here; the lab's link between the hosts is shaped (tc-tbf) to a fraction of that. It
is protected at 25 ms epochs, and followed for so long; its heartbeats, a thousand a second, are
observed outside of it. The bound for a silence is that of an epoch (`epochs.LONGEST_S`): what the
guest sends is held for no longer, or the protection ends with the reason. The lab takes twice the
memory, and the set once more.
"""

import argparse
import asyncio
import json
import time
from typing import Any

from benchmarks.replication import FIGURES, NAME, told
from benchmarks.setting import await_quiet, machine, write_result
from benchmarks.summary import Verdict, verdicts_as_json
from tests.qemu.world import World, image, qemu, world
from vmckpt.lab.guests.guest import GuestControl
from vmckpt.lab.guests.labguest import LabGuest
from vmckpt.lab.network import shape_link
from vmckpt.memory.ram_file import PAGE_BYTES
from vmckpt.replicate.primary.epochs import LONGEST_S

PATIENCE_S, MEASURED_S, LOOK_S, START_S = 10.0, 10.0, 1.0, 900.0
MOST_ANSWER_BYTES = 64 << 20
CONTENT = "pattern=uniform content=random touch=page"


def main(given: argparse.Namespace) -> None:
    """Printed and written to results/replication_overload.json."""
    busy = asyncio.run(await_quiet(10.0, PATIENCE_S))
    found: dict[str, Any] = {"machine": machine(), "others_use_percent": round(busy, 1)}
    found |= {"memory": given.memory, "set": given.set, "times": given.times}
    with world(qemu("10.0"), qemu("10.0")) as made:
        found |= asyncio.run(overloaded(made, given))
    verdicts = [
        Verdict("longest silence, s", found["longest_silence_s"], LONGEST_S),
        Verdict("guests killed", 0 if found["lives"] else 1, 0),
        Verdict("pages that are wrong", found["memory_errors"], 0),
    ]
    found["verdicts"] = verdicts_as_json(verdicts)
    print(json.dumps(found, indent=1))
    print(f"written: {write_result('replication_overload', found)}")


async def overloaded(made: World, given: argparse.Namespace) -> dict[str, Any]:
    """What was heard of the guest, and what the primary told."""
    guest = LabGuest(NAME, 1, image(), memory=given.memory, disk=None)
    await asyncio.to_thread(made.run_guest, guest, "lab-a")
    control = await guest.control(made.lab)
    (pid,) = made.pids(NAME)
    await control.load_memory(f"rate=8G set={given.set} {CONTENT}")
    written_bytes_per_s = await writes(control)
    await control.load_memory(f"rate={int(written_bytes_per_s)}")
    link_bytes_per_s = int(written_bytes_per_s / given.times)
    for host in ("lab-a", "lab-b"):
        await shape_link(made.lab, host, link_bytes_per_s)
    began_ns = time.monotonic_ns()
    code, said = await started(made)
    started_s = (time.monotonic_ns() - began_ns) / 1e9
    print(f"link {link_bytes_per_s} bytes/s; started after {started_s:.1f} s: {said}", flush=True)
    copied = await observed(made, began_ns)
    followed_ns = time.monotonic_ns()
    seen = [] if code else await followed(made, given.seconds)
    heard = await observed(made, began_ns)
    protected = await observed(made, followed_ns)
    stopped = await asyncio.to_thread(made.vmckpt, "replicate", "stop", NAME)
    memory = await checked(control)
    lives = made.pids(NAME) == [pid]
    await control.close()
    return {
        "written_bytes_per_s": round(written_bytes_per_s),
        "link_bytes_per_s": link_bytes_per_s,
        "start_code": code,
        "start_s": round(started_s, 1),
        "start_said": said,
        "stop_code": stopped.code,
        "lives": lives,
        "memory_errors": memory,
        "longest_silence_s": round(heard["longest_gap_ms"] / 1e3, 3),
        "longest_silence_at_start_s": round(copied["longest_gap_ms"] / 1e3, 3),
        "longest_silence_protected_s": round(protected["longest_gap_ms"] / 1e3, 3),
        "beats": heard["received"],
        "beats_lost": heard["lost"],
        "seen": seen,
    }


async def writes(control: GuestControl) -> float:
    """How many bytes the guest writes in a second."""
    before, began_s = (await control.stat()).mem_touches, time.monotonic()
    await asyncio.sleep(MEASURED_S)
    touches = (await control.stat()).mem_touches - before
    return touches * PAGE_BYTES / (time.monotonic() - began_s)


async def started(made: World) -> tuple[int, Any]:
    """The exit code of `replicate start`, and its warnings or its error."""
    command = made.begin("replicate", "start", NAME, "lab-b")
    out, _ = await asyncio.to_thread(command.communicate, None, START_S)
    found = json.loads(out)
    return command.returncode, found.get("error") or found.get("warnings")


async def followed(made: World, seconds: float) -> list[dict[str, Any]]:
    """What the primary tells each second; of a protection that ends, why it did."""
    seen, until_s = list[dict[str, Any]](), time.monotonic() + seconds
    while time.monotonic() < until_s:
        now = await told(made)
        seen.append(
            {key: now.get(key) for key in (*FIGURES, "state", "why", "slowed_percent", "epochs")}
        )
        if now["state"] == "ended":
            break
        await asyncio.sleep(LOOK_S)
    return seen


async def checked(control: GuestControl) -> int:
    """How much of its memory is wrong."""
    await control.stop_memory()
    found = await control.verify_memory()
    return 0 if found.sound else 1


async def observed(made: World, since_ns: int) -> dict[str, Any]:
    """What the lab's observer heard of the guest's heartbeats since then."""
    observer = str(made.lab.heartbeats)
    reader, writer = await asyncio.open_unix_connection(observer, limit=MOST_ANSWER_BYTES)
    writer.write(json.dumps({"id": 1, "since_ns": since_ns}).encode() + b"\n")
    reply: dict[str, Any] = json.loads(await reader.readline())
    writer.close()
    return reply


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory", default="3G")
    parser.add_argument("--set", default="1G")
    parser.add_argument("--times", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=60.0)
    main(parser.parse_args())
