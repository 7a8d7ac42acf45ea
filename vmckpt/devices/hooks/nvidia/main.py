"""vmckpt's hook for NVIDIA GPUs: moves CUDA jobs into the guest's memory, and onto another card.

Runs in the guest, as root, as `HOOK PHASE`, packed into one file (devices/bundle.py). It needs only
Python 3.9's standard library, and the driver with `nvidia-smi`. It uses `cuda-checkpoint` if that
is installed, else libcuda. It handles all of the guest's NVIDIA GPUs together. Its state between
two phases is in /run/vmckpt-nvidia.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import sys
from collections.abc import Iterator

from vmckpt.devices.hooks.nvidia import system
from vmckpt.devices.hooks.nvidia.phases import PHASES
from vmckpt.devices.hooks.nvidia.system import HookError


def main(argv: list[str]) -> int:
    """Do one phase; the answer is one line of JSON."""
    phase = argv[1] if len(argv) == 2 else ""
    sys.stdin.read()
    act = PHASES.get(phase)
    try:
        if act is None:
            raise HookError(f"unknown phase '{phase}'")
        with alone():
            answer = act()
    except HookError as exc:
        print(json.dumps({"ok": False, "why": exc.why, "remedy": exc.remedy}))
        return 1
    except Exception as exc:  # noqa: BLE001 - whatever it is, vmckpt has to hear of it
        why = f"{type(exc).__name__}: {exc}"
        print(json.dumps({"ok": False, "why": why, "remedy": "report it"}))
        return 1
    print(json.dumps({"ok": True, **answer}))
    return 0


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Wait for a call that timed out and still works, and for one for another card."""
    system.STATE.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (system.STATE / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
