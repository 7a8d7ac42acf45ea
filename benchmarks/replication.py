"""What protecting a guest costs, beside what a stock QEMU offers otherwise.

Run: python -m benchmarks.replication [--seconds 20]. All in one run, on one
guest of 256 MiB under TCG (`replication_sizes` has larger ones):

- Pauses, epochs a second and bytes: a guest that dirties 20 MB/s of text, as `status` tells it.
- Work lost: touches of memory a second by a guest that does nothing else, with noise, protected and
  in the seconds before and after. It rewrites all of its working set within each epoch: 1 MiB is
  what the guest dirties that pauses are measured with, 20 MB/s and a little more; 4 MiB, more than
  100 MB/s of what nothing makes smaller, is about the worst.
- Added latency: a client's answers over TCP, asked for at random moments, protected and not; beside
  it the formula: half the run time between epochs as it was, and from there until the epoch is
  safe. (Asked for in a pause, an answer waits for all of the run time after it: so a little more.)
- The alternative: stop, save everything to a file (plain, mapped-ram) or by savevm, continue.
- Failovers: what benchmarks.replication_kills found, which runs by itself.
"""

import argparse
import asyncio
import random
import statistics
from typing import Any

from benchmarks.replication_kills import failovers
from benchmarks.replication_plot import draw
from benchmarks.replication_rivals import saved_by_savevm, saved_to_files
from benchmarks.setting import await_quiet, machine, write_result
from benchmarks.summary import Verdict, verdicts_as_json
from tests.qemu.world import World, image, qemu, world
from vmckpt.lab.guests.guest import GuestControl, KvClient
from vmckpt.lab.guests.labguest import LabGuest

NAME, PATIENCE_S, SETTLE_S = "bench", 10.0, 2.0
LONGEST_THOUGHT_S = 0.2
TEXT = "rate=20M set=64M pattern=uniform content=text touch=line"
NOTHING_ELSE = "rate=8G set={} pattern=uniform content=random touch=line"
LIKE_THE_TEXT, WORST = "1M", "4M"
SETS = (LIKE_THE_TEXT, WORST)
PACES = {"25 ms": "25ms", "25 a second": "32ms", "5 a second": "195ms"}


def main(seconds: float) -> None:
    """Everything, printed and written to results/replication.json."""
    busy = asyncio.run(await_quiet(10.0, PATIENCE_S))
    found: dict[str, Any] = {"machine": machine(), "others_use_percent": round(busy, 1)}
    with world(qemu("10.0"), qemu("10.0")) as made:
        found |= asyncio.run(small(made, seconds))
    found["verdicts"] = verdicts_as_json(verdicts(found))
    path = write_result("replication", found)
    draw(found, path.with_suffix(".png"))
    print(f"written: {path} and its picture")
    for verdict in found["verdicts"]:
        print(f"  {'met ' if verdict['met'] else 'NOT '} {verdict['promise']}: "
              f"{verdict['measured']:.3g}")  # fmt: skip


async def small(made: World, seconds: float) -> dict[str, Any]:
    """All that is measured on the guest of 256 MiB."""
    guest = LabGuest(NAME, 1, image(), disk=None)
    await asyncio.to_thread(made.run_guest, guest, "lab-a")
    control = await guest.control(made.lab)
    client = await guest.key_value(made.lab)
    paces = {
        label: await cost(made, control, client, pace, seconds) for label, pace in PACES.items()
    }
    await control.load_memory(TEXT)
    rivals = await saved_to_files(made, "lab-a", NAME)
    await client.close()
    await control.close()
    await asyncio.to_thread(made.ok, "vm", "stop", NAME, "--force")
    rivals["savevm"] = await saved_by_savevm(made)
    return {"paces": paces, "rivals": rivals, "kills": failovers()}


async def cost(
    made: World, control: GuestControl, client: KvClient, pace: str, seconds: float
) -> dict[str, Any]:
    """What one pace costs."""
    before = await works(control, client, seconds / 2)
    await control.load_memory(TEXT)
    await asyncio.to_thread(made.ok, "replicate", "start", NAME, "lab-b", "--epoch", pace)
    await asyncio.sleep(SETTLE_S)
    began = await told(made)
    await asyncio.sleep(seconds)
    ended = await told(made)
    protected = await works(control, client, seconds)
    busy = await told(made)
    await asyncio.to_thread(made.ok, "replicate", "stop", NAME)
    after = await works(control, client, seconds / 2)
    added_ms = protected[WORST]["latency_mean_ms"] - statistics.mean(
        unprotected[WORST]["latency_mean_ms"] for unprotected in (before, after)
    )
    return {
        "figures": {key: ended[key] for key in FIGURES},
        "sent_of_raw": (ended["sent_bytes"] - began["sent_bytes"])
        / (ended["raw_bytes"] - began["raw_bytes"]),
        "unprotected": [before, after],
        "protected": protected,
        "work_lost": {
            size: 1
            - protected[size]["touches_per_s"]
            / statistics.mean(free[size]["touches_per_s"] for free in (before, after))
            for size in SETS
        },
        "added_latency_mean_ms": added_ms,
        "formula_latency_mean_ms": formula_latency_ms(busy),
        "figures_without_text": {key: busy[key] for key in FIGURES},
    }


def formula_latency_ms(told: dict[str, Any]) -> float:
    """What output commit adds on average; the guest runs for longer than it was asked to."""
    ran_ms: float = 1e3 / told["epochs_per_s"] - told["pause_p50_ms"]
    safe_ms: float = told["safe_after_p50_ms"]
    return ran_ms / 2 + safe_ms


FIGURES = ("epochs_per_s", "pause_p50_ms", "pause_p99_ms", "pause_worst_ms", "safe_after_p50_ms",
           "lag_ms", "epoch_ms")  # fmt: skip


async def works(
    control: GuestControl, client: KvClient, seconds: float
) -> dict[str, dict[str, float]]:
    """`work` with each working set, so long each."""
    found = {}
    for size in SETS:
        await control.load_memory(NOTHING_ELSE.format(size))
        await asyncio.sleep(SETTLE_S)
        found[size] = await work(control, client, seconds)
    return found


async def work(control: GuestControl, client: KvClient, seconds: float) -> dict[str, float]:
    """What the guest gets done, and how long a client waits for an answer."""
    loop, latencies_ms, chance = asyncio.get_running_loop(), [], random.Random(1)
    began, began_s = (await control.stat()).mem_touches, loop.time()
    while loop.time() - began_s < seconds:
        asked_s = loop.time()
        await client.echo("x")
        latencies_ms.append((loop.time() - asked_s) * 1e3)
        # At random moments: one that asks again at once goes in step with the epochs.
        await asyncio.sleep(chance.uniform(0.0, LONGEST_THOUGHT_S))
    took_s = loop.time() - began_s
    touches = (await control.stat()).mem_touches - began
    return {
        "touches_per_s": touches / took_s,
        "latency_mean_ms": statistics.mean(latencies_ms),
        "latency_p50_ms": statistics.median(latencies_ms),
    }


async def told(made: World) -> dict[str, Any]:
    """What the primary says of itself."""
    status = await asyncio.to_thread(made.ok, "replicate", "status", NAME)
    (primary,) = (side for side in status["sides"] if side["role"] == "primary")
    return dict(primary)


def verdicts(found: dict[str, Any]) -> list[Verdict]:
    """What was promised, and what came of it; turned round where more would be better."""
    fast, steady, slow = (found["paces"][label] for label in PACES)
    pause_ms = fast["figures"]["pause_p50_ms"]
    rivals_ms = min(rival["pause_p50_ms"] for rival in found["rivals"].values())
    formula = fast["added_latency_mean_ms"] / fast["formula_latency_mean_ms"]
    listed = [
        Verdict("pause at 25 ms epochs, p50, ms", pause_ms, 5),
        Verdict("pause at 25 ms epochs, p99, ms", fast["figures"]["pause_p99_ms"], 12),
        Verdict("ms an epoch takes, all in all (25 a second)",
                1e3 / fast["figures"]["epochs_per_s"], 40),
        Verdict("ms an epoch takes where 25 a second are asked for",
                1e3 / steady["figures_without_text"]["epochs_per_s"], 40),
        *(
            Verdict(f"work lost {where}, {size} of noise", pace["work_lost"][size], most)
            for where, pace, most in (
                ("at that rate", steady, 0.25),
                ("at 25 ms epochs", fast, 0.25),
                ("at 5 epochs a second", slow, 0.08),
            )
            for size in SETS
        ),
        Verdict("added latency against the formula, off by", abs(formula - 1), 0.20),
        Verdict("bytes sent of raw dirty pages, text", fast["sent_of_raw"], 0.5),
        Verdict("our pause of the shortest other one's", pause_ms / rivals_ms, 1 / 20),
        Verdict("failovers in which an answer was lost", found["kills"]["lost"], 0),
    ]  # fmt: skip
    if found["kills"]["took_over_ms"]:
        worst_ms = max(found["kills"]["took_over_ms"])
        listed.append(Verdict("resume alone, worst, ms", worst_ms, 20))
    return listed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20.0)
    given = parser.parse_args()
    main(given.seconds)
