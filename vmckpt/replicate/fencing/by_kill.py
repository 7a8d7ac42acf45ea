"""vmckpt-fence-by-kill: a fencing agent that kills the primary's processes.

    vmckpt-fence-by-kill [TRANSPORT ...] check|fence

TRANSPORT is a command prefix that runs `kill`, `cat` and `readlink` on the primary's host: nothing
for this machine, `nsenter -t PID ...`, `ssh HOST`. vmckpt/replicate/fencing/agent.py defines the
interface of fencing agents.

The proof is what /proc, read through TRANSPORT, shows after the kill: it is the /proc that the
primary named (boot id and process namespace), it has init, and it has none of the processes. A pid
with another start time belongs to another process; a zombie without threads does nothing. This
agent cannot fence a host that is unreachable or has rebooted: that takes a power switch.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

POLL_S = 0.002
USAGE = 2
# Limits the output of a compromised host.
MOST_SAID_BYTES = 1 << 20
BOOT_ID = "/proc/sys/kernel/random/boot_id"
# A process chooses the name in brackets itself: any bytes, newlines too, but few.
_STAT = re.compile(r"^(\d+) \((?s:.{0,64}?)\) (\w)((?: -?\d+){20,})$", re.MULTILINE)


class CannotFenceError(Exception):
    """Nothing is proved; the message says why."""


def main() -> int:
    """The agent's exit status."""
    *transport, action = sys.argv[1:] or [""]
    deadline_s = time.monotonic() + float(os.environ.get("VMCKPT_FENCE_TIMEOUT_S", "10"))
    try:
        targets = parse(os.environ["VMCKPT_FENCE_PROCESSES"])
        machine = os.environ["VMCKPT_FENCE_MACHINE"]
        if action == "check":
            left = alive(transport, machine, targets)
            print(f"reached the host; of its processes {len(left)} run")
        elif action == "fence":
            print(f"gone: {fence(transport, machine, targets, deadline_s)}")
        else:
            print(__doc__, file=sys.stderr)
            return USAGE
    except KeyError as missing:
        print(f"{missing} is not in the environment", file=sys.stderr)
        return USAGE
    except (CannotFenceError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def parse(words: str) -> dict[int, int]:
    """Start times by pid. Raises ValueError."""
    starts = {}
    for word in words.split():
        pid, start_ticks = map(int, word.split(":"))
        starts[pid] = start_ticks
    if not starts or min(starts) < 2:
        raise ValueError(f"'{words}' names no processes: nothing can be proved")
    return starts


def fence(
    transport: Sequence[str], machine: str, targets: dict[int, int], deadline_s: float
) -> str:
    """Kill the targets; returns which are gone, which is all of them. Raises CannotFenceError."""
    while left := alive(transport, machine, targets):
        if time.monotonic() > deadline_s:
            raise CannotFenceError(f"processes {left} survive SIGKILL")
        run([*transport, "kill", "-KILL", *map(str, left)])
        time.sleep(POLL_S)
    return " ".join(map(str, targets))


def alive(transport: Sequence[str], machine: str, targets: dict[int, int]) -> list[int]:
    """Which of the targets can still act. Raises CannotFenceError if that cannot be determined."""
    # Only root may read init's; the answer must match what the primary said.
    namespaces = set(run([*transport, "readlink", "/proc/1/ns/pid", "/proc/self/ns/pid"]).split())
    paths = [f"/proc/{pid}/stat" for pid in (1, *targets)]
    boot_id, _, output = run([*transport, "cat", BOOT_ID, *paths]).partition("\n")
    if machine.split() != [boot_id, *namespaces]:
        found = " ".join([boot_id, *sorted(namespaces)]) or "no answer"
        raise CannotFenceError(f"the transport leads to {found}, the primary was on {machine}")
    stats = dict(parse_stats(output))
    if 1 not in stats:
        raise CannotFenceError("the host's processes cannot be seen through the transport")
    return [pid for pid, start in targets.items() if pid in stats and stats[pid].acts(start)]


class ProcessStat(NamedTuple):
    """From /proc/PID/stat."""

    state: str
    threads: int
    start_ticks: int

    def acts(self, start_ticks: int) -> bool:
        """Whether it is the process that started then, and any of its threads may still run."""
        ended = self.state in "ZX" and self.threads <= 1
        return self.start_ticks == start_ticks and not ended


def parse_stats(text: str) -> Iterator[tuple[int, ProcessStat]]:
    """Each process's pid and stat. Raises ValueError if there is anything else."""
    if other := _STAT.sub("", text).strip():
        raise ValueError(f"'{other}' is not a process")
    for pid, state, numbers in _STAT.findall(text):
        fields = [state, *numbers.split()]
        yield int(pid), ProcessStat(state, int(fields[17]), int(fields[19]))


def run(argv: list[str]) -> str:
    """A command's output; its exit status is ignored (a process may be gone)."""
    try:
        with subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        ) as child:
            output = child.stdout.read(MOST_SAID_BYTES + 1) if child.stdout else b""
            if len(output) > MOST_SAID_BYTES:
                child.kill()
                raise CannotFenceError("the host behind the transport prints without end")
    except OSError as exc:
        raise CannotFenceError(f"{argv[0]} does not start: {exc}") from exc
    return output.decode(errors="replace")


if __name__ == "__main__":
    sys.exit(main())
