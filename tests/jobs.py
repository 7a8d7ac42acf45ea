"""Jobs at work on this machine, as tests look for them."""

import re
from contextlib import suppress
from pathlib import Path

from vmckpt.checkpoint.jobs import KINDS
from vmckpt.hosts.processes.process import ProcessId, find_by_argument


def at_work(state_dir: Path) -> list[ProcessId]:
    """Processes of checkpoints, restores and forks of hosts whose state is below a directory.

    And what recovers them after their death.
    """
    kinds = "|".join(kind.name for kind in KINDS)
    mark = re.compile(f"job\0(?:{kinds})\0{re.escape(str(state_dir))}")
    found = []
    for process in find_by_argument(f"\0{state_dir}"):
        with suppress(OSError):  # it has just ended
            if mark.search(Path(f"/proc/{process.pid}/cmdline").read_text(errors="replace")):
                found.append(process)
    return found
