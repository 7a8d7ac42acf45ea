"""The first process of a host that looks like a machine.

Run in separate namespaces, as `python -m vmckpt.lab.real.first PLAN`: sets up the host that the
plan describes, prints READY on a line or the reason of the failure, and then reaps the dead, as the
kernel expects of a first process. Everything in the host ends with it.
"""

import os
import signal
import socket
import sys
import time
from pathlib import Path

from vmckpt.lab.real.machine import read_plan
from vmckpt.lab.real.services import ServiceError, start_services
from vmckpt.lab.real.tree import LayoutError, lay_out

READY = "ready"


def main() -> int:
    """Set up the host, then run until killed."""
    # Without a handler the kernel does not deliver signals to a first process.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    os.umask(0o022)
    machine = read_plan(Path(sys.argv[1]))
    try:
        socket.sethostname(machine.name)
        lay_out(machine)
        start_services(machine)
    except (OSError, LayoutError, ServiceError) as exc:
        _say(str(exc))
        return 1
    _say(READY)
    while True:
        try:
            os.wait()
        except ChildProcessError:
            time.sleep(0.1)


def _say(words: str) -> None:
    sys.stdout.write(f"{words}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
