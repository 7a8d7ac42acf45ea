"""The vendor's tool in either form: cuda-checkpoint, or libcuda's functions."""

from __future__ import annotations

import ctypes
import os
import shutil
from typing import Any

from vmckpt.devices.hooks.nvidia import system
from vmckpt.devices.hooks.nvidia.system import HookError

# Only tests set it.
LIBCUDA = os.environ.get("VMCKPT_HOOK_LIBCUDA", "libcuda.so.1")
LOCK_MS = 30_000
# From this driver on, jobs can move to another card, by UUIDs.
LEAST_DRIVER = 580
RUNNING, LOCKED, CHECKPOINTED, FAILED = "running", "locked", "checkpointed", "failed"


class GpuPair(ctypes.Structure):
    """CUcheckpointGpuPair."""

    _fields_ = (("old", ctypes.c_ubyte * 16), ("new", ctypes.c_ubyte * 16))


class RestoreArgs(ctypes.Structure):
    """CUcheckpointRestoreArgs: 64 bytes."""

    _fields_ = (
        ("pairs", ctypes.POINTER(GpuPair)),
        ("count", ctypes.c_uint),
        ("reserved", ctypes.c_char * 52),
    )


class LockArgs(ctypes.Structure):
    """CUcheckpointLockArgs: 64 bytes."""

    _fields_ = (("timeout_ms", ctypes.c_uint), ("reserved", ctypes.c_char * 60))


class Command:
    """cuda-checkpoint."""

    def state(self, pid: int) -> str:
        """running, locked, checkpointed or failed."""
        return system.run("cuda-checkpoint", "--get-state", "--pid", str(pid)).strip().lower()

    def act(self, action: str, pid: int, pairs: dict[str, str]) -> None:
        """lock, checkpoint, restore or unlock."""
        words = ["cuda-checkpoint", "--action", action, "--pid", str(pid)]
        if action == "lock":
            words += ["--timeout", str(LOCK_MS)]
        if action == "restore" and pairs:
            words += [
                "--device-map",
                ",".join("{}={}".format(*pair) for pair in sorted(pairs.items())),
            ]
        system.run(*words)


class Library:
    """libcuda's own functions."""

    NAMES = (RUNNING, LOCKED, CHECKPOINTED, FAILED)

    def __init__(self) -> None:
        try:
            self._cuda = ctypes.CDLL(LIBCUDA)
        except OSError as exc:
            raise HookError(f"neither cuda-checkpoint nor libcuda is here: {exc}",
                            "install one of them") from exc  # fmt: skip
        if not hasattr(self._cuda, "cuCheckpointProcessGetState"):
            raise HookError("this libcuda has no checkpoints", f"use driver {LEAST_DRIVER}")

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code:
            raise HookError(f"{name}: CUDA error {code}", "see the driver's documentation")

    def state(self, pid: int) -> str:
        """Like Command."""
        number = ctypes.c_int(-1)
        self._call("cuCheckpointProcessGetState", pid, ctypes.byref(number))
        return self.NAMES[number.value] if 0 <= number.value < len(self.NAMES) else FAILED

    def act(self, action: str, pid: int, pairs: dict[str, str]) -> None:
        """Like Command."""
        args: Any = (ctypes.c_uint64 * 8)()
        if action == "lock":
            args = LockArgs(LOCK_MS)
        elif action == "restore":
            self._call("cuInit", 0)
            table = (GpuPair * len(pairs))(*(
                GpuPair(uuid_bytes(old), uuid_bytes(new)) for old, new in sorted(pairs.items())
            ))  # fmt: skip
            args = RestoreArgs(table if pairs else None, len(pairs))
        self._call("cuCheckpointProcess" + action.capitalize(), pid, ctypes.byref(args))


def uuid_bytes(uuid: str) -> Any:
    """A UUID in CUDA's form."""
    return (ctypes.c_ubyte * 16)(*bytes.fromhex(uuid.replace("GPU-", "").replace("-", "")))


def tool() -> Any:
    """The available one of the two."""
    return Command() if shutil.which("cuda-checkpoint") else Library()
