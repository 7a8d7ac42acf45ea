"""The memory that new processes can use: the kernel's estimate, within cgroup limits."""

from collections.abc import Iterator
from pathlib import Path

from vmckpt.errors import HostDownError
from vmckpt.procfs import NOT_NOW

_CGROUPS = Path("/sys/fs/cgroup")


def available_bytes(host: str) -> int:
    """The kernel's estimate, without swapping, within the limits of this process's cgroups.

    Raises OSError if one of these cannot be read now.
    """
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return max(0, min(int(line.split()[1]) * 1024, *_left_in(_CGROUPS)))
    raise HostDownError(
        f"cannot tell how much memory {host} has",
        why="MemAvailable is missing in /proc/meminfo",
        remedy=f"run `vmckpt host check {host}`",
    )


def _left_in(root: Path) -> list[int]:
    """The rest below each existing limit; always one value, which is not a limit."""
    found = [1 << 62]
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            found += _left(root, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            found += _left(root / "memory", path, *names)
    return found


def _left(root: Path, path: str, limit: str, usage: str, reclaimable: str) -> Iterator[int]:
    """For one group and its ancestors. Reclaimable memory does not count as used."""
    here = root / path.lstrip("/")
    for group in (here, *here.parents):
        if not group.is_relative_to(root):
            return
        try:
            most = (group / limit).read_text().strip()
            if most == "max":
                continue
            used = int((group / usage).read_text())
            lines = (group / "memory.stat").read_text().splitlines()
        except OSError as exc:
            if exc.errno in NOT_NOW:
                raise
            continue  # the root has no limit; a namespace shows its groups under other paths
        droppable = [int(line.split()[1]) for line in lines if line.split()[0] == reclaimable]
        yield int(most) - used + sum(droppable)
