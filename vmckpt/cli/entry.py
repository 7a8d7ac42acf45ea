"""The process `vmckpt`: it lives briefly, so starting and ending it must cost little."""

import gc
import os
import sys

# Importing makes tens of thousands of objects that all stay: looking for garbage among them took a
# quarter of the start.
_GC_THRESHOLD = 50_000


def start() -> None:
    """Run the command line and end the process."""
    gc.set_threshold(_GC_THRESHOLD)
    from vmckpt.cli.main import main

    code = main()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # whoever read the output has gone
        code = code or 1
    # Taking the interpreter apart costs 30 ms; the kernel does the same at once.
    os._exit(code)


if __name__ == "__main__":
    start()
