"""vmckpt's hook for NVIDIA GPUs: CUDA jobs into the guest's memory, and back onto another card.

Runs in the guest, as root, as `HOOK PHASE`, packed into one file (devices/bundle.py); Python 3.9's
standard library is all it needs, and the driver with `nvidia-smi`. It works by `cuda-checkpoint`
where that is installed, else by libcuda. It takes all of the guest's NVIDIA GPUs together. What it
knows between two phases is in /run/vmckpt-nvidia.
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
    """One phase; the answer is one line of JSON."""
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
    """Wait for a call that was given up and still works, and for that of another card."""
    system.STATE.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (system.STATE / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
