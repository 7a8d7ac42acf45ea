"""What makes a checkpoint for `tests.schedule_process`: DIRECTORY/made/ID, under the VM's lock."""

import os
import random
import sys
import time
from pathlib import Path

from vmckpt.errors import BusyError
from vmckpt.hosts.lock import Owner, held

MOST_S = 0.15


def main(directory: Path, name: str) -> int:
    """Make it, unless it is there; each time that it is made is written down."""
    time.sleep(random.uniform(0, MOST_S))
    try:
        with held(directory / "vm.lock", Owner("-", "checkpoint create", os.getpid(), time.time())):
            if not (directory / "made" / name).exists():
                time.sleep(random.uniform(0, MOST_S))
                with (directory / "log").open("a") as log:
                    log.write(f"{name}\n")
                (directory / "made" / name).touch()
    except BusyError:
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
