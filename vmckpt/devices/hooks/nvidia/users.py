"""Finds the GPUs, the processes that use them, and which of these are jobs that can be carried."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import NamedTuple

from vmckpt.devices.hooks.nvidia import system
from vmckpt.devices.hooks.nvidia.system import HookError

# From this driver on, shared device memory can be carried.
IPC_DRIVER = 610
PERSISTENCED = "nvidia-persiste"
MPS = ("nvidia-cuda-mps", "nvidia-cuda-mp")
GRAPHICS = ("Xorg", "Xwayland", "gnome-shell", "weston")


class Gpu(NamedTuple):
    """A GPU as reported by nvidia-smi."""

    uuid: str
    name: str
    driver: int
    persistence: bool
    mig: bool
    used_mib: int


class User(NamedTuple):
    """A process that has one of the driver's devices open; `start` tells it from a later one."""

    pid: int
    start: int
    comm: str
    devices: list[str]
    shares: bool


def gpus() -> list[Gpu]:
    """The guest's GPUs. Raises HookError if the driver is not loaded."""
    fields = "uuid,name,driver_version,persistence_mode,mig.mode.current,memory.used"
    found = []
    for line in system.run(
        "nvidia-smi", "--query-gpu=" + fields, "--format=csv,noheader,nounits"
    ).splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) == 6:
            uuid, name, version, persistence, mig, used = words
            driver = int(version.partition(".")[0])
            used_mib = int(used) if used.isdigit() else 0
            found.append(
                Gpu(uuid, name, driver, persistence == "Enabled", mig == "Enabled", used_mib)
            )
    return found


def users() -> list[User]:
    """The driver's users: from all processes' descriptors and mappings, and from nvidia-smi."""
    listed = listed_pids()
    found = []
    for entry in sorted(system.PROC.iterdir()):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        pid = int(entry.name)
        devices, shares = opened(entry)
        if devices or pid in listed:
            with contextlib.suppress(OSError, ValueError, IndexError):
                comm = system.read_text(entry / "comm").strip()
                found.append(User(pid, started(pid), comm, sorted(devices), shares))
    return found


def opened(entry: Path) -> tuple[set[str], bool]:
    """The driver's devices that a process has open, and whether it shares device memory."""
    devices, shares = set(), False
    with contextlib.suppress(OSError):
        for link in (entry / "fd").iterdir():
            with contextlib.suppress(OSError):
                devices |= nvidia(os.readlink(link))
    with contextlib.suppress(OSError):
        for line in system.read_text(entry / "maps").splitlines():
            devices |= nvidia(line[line.find("/") :] if "/" in line else "")
            shares |= "/dev/shm/cuda.shm." in line or "/dev/shm/nccl-" in line
    return devices, shares


def nvidia(path: str) -> set[str]:
    """The name of the driver's device at a path, if it is one."""
    name = path.partition("/dev/")[2].split(" ")[0]
    return {name} if name.startswith("nvidia") else set()


def listed_pids() -> set[int]:
    """The processes that nvidia-smi lists; none while the driver is not loaded."""
    if not (system.MODULES / "nvidia").exists():
        return set()
    output = system.run(
        "nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader", check=False
    )
    return {int(line) for line in output.split() if line.isdigit()}


def started(pid: int) -> int:
    """When a process started, in ticks; -1: it has ended."""
    try:
        stat = system.read_text(system.PROC / str(pid) / "stat")
        return int(stat.rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return -1


def jobs(cards: list[Gpu]) -> list[User]:
    """The CUDA jobs to carry. Raises HookError for what cannot be carried."""
    if any(card.mig for card in cards):
        raise HookError("MIG is on, which CUDA checkpoints do not support", "nvidia-smi -mig 0")
    found = []
    for user in users():
        who = f"process {user.pid} ({user.comm})"
        if user.comm.startswith(PERSISTENCED):
            continue
        if user.comm.startswith(MPS):
            raise HookError(f"{who} is MPS, which CUDA checkpoints do not support", "end it")
        if user.comm in GRAPHICS or "nvidia-modeset" in user.devices:
            raise HookError(f"{who} draws with the GPU: that is not supported", "end it")
        if user.devices and not any(re.fullmatch(r"nvidia\d+", name) for name in user.devices):
            only = ", ".join(user.devices)
            raise HookError(
                f"{who} has only {only} open: it is not a job that can be locked", "end it"
            )
        if user.shares and cards and cards[0].driver < IPC_DRIVER:
            why = f"{who} shares device memory with others (CUDA IPC), which is not supported"
            raise HookError(why, f"use driver {IPC_DRIVER}")
        found.append(user)
    return found
