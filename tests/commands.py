"""`vmckpt` as a process, for tests of commands that need no guest."""

import os
import subprocess
import sys
from pathlib import Path

COMMAND = (sys.executable, "-m", "vmckpt.cli.entry")
TIMEOUT_S = 60


def vmckpt(state: Path, *words: str, cwd: Path | None = None) -> "subprocess.CompletedProcess[str]":
    """A command to its end, with a state directory of its own; never with a traceback."""
    done = subprocess.run(
        [*COMMAND, *words],
        env=os.environ | {"VMCKPT_STATE_DIR": str(state)},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done
