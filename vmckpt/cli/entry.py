"""The process `vmckpt`: it lives briefly, so starting and ending it must cost little."""

import gc
import os
import sys

# Importing makes tens of thousands of objects that all stay: looking for garbage among them took a
# quarter of the start.
_GC_THRESHOLD = 100_000


def start() -> None:
    """Run the command line and end the process."""
    gc.set_threshold(_GC_THRESHOLD)
    code = _serve() if sys.argv[1:] == ["serve"] else _run()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # whoever read the output has gone
        code = code or 1
    # Taking the interpreter apart costs 30 ms; the kernel does the same at once.
    os._exit(code)


def _run() -> int:
    from vmckpt.cli.main import main

    return main()


def _serve() -> int:
    """`vmckpt serve` without the command line: every command waits for it, once for each host."""
    os.umask(0o077)
    try:
        from vmckpt.cli.loop import end_running
        from vmckpt.cli.serve import serve

        serve()
        end_running()
    except Exception as exc:  # noqa: BLE001 - whatever it is, it is told
        from vmckpt.cli.main import told

        return told(exc)
    return 0


if __name__ == "__main__":
    start()
