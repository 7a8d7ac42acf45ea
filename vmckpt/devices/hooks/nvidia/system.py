"""The guest as seen by the hook: where its files are, and how its programs are run."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

# Only tests set it.
ROOT = Path(os.environ.get("VMCKPT_HOOK_ROOT", "/"))
STATE = ROOT / "run/vmckpt-nvidia"
PROC, MODULES = ROOT / "proc", ROOT / "sys/module"


class HookError(Exception):
    """Why a phase failed, and a remedy."""

    def __init__(self, why: str, remedy: str = "") -> None:
        super().__init__(why)
        self.why, self.remedy = why, remedy


def run(*argv: str, check: bool = True) -> str:
    """A program's output. Raises HookError."""
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    except OSError as exc:
        raise HookError(f"{argv[0]} cannot be run: {exc}", "install the driver") from exc
    if check and done.returncode:
        output = (done.stderr or done.stdout).strip()[-300:] or f"status {done.returncode}"
        raise HookError(f"{' '.join(argv)} failed: {output}")
    return done.stdout


def read_text(path: Path) -> str:
    """A file of /proc: it may contain others' names, not always UTF-8. Raises OSError."""
    return path.read_bytes().decode(errors="replace")


def available_bytes() -> int:
    """Guest memory that is available for the GPUs' content."""
    text = (PROC / "meminfo").read_text()
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) << 10 if found else 0
