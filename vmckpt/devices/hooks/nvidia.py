#!/usr/bin/env python3
"""vmckpt's hook for NVIDIA GPUs: CUDA jobs into the guest's memory, and back onto another card.

Runs in the guest, as root, as `HOOK PHASE`; the standard library is all it needs, and the driver
with `nvidia-smi`. It works by `cuda-checkpoint` where that is installed, else by libcuda. It takes
all of the guest's NVIDIA GPUs together. What it knows between two phases is in /run/vmckpt-nvidia.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

# Other than / and the system's own in tests alone.
ROOT = Path(os.environ.get("VMCKPT_HOOK_ROOT", "/"))
LIBCUDA = os.environ.get("VMCKPT_HOOK_LIBCUDA", "libcuda.so.1")
STATE = ROOT / "run/vmckpt-nvidia"
PROC, MODULES = ROOT / "proc", ROOT / "sys/module"
LOCK_MS = 30_000
ENDS_S, APPEARS_S = 10.0, 60.0
# In the order in which they are unloaded.
DRIVERS = ("nvidia_uvm", "nvidia_drm", "nvidia_modeset", "nvidia_peermem", "nvidia")
# Jobs on another card than before: by UUIDs, since this driver.
LEAST_DRIVER = 580
IPC_DRIVER = 610
PERSISTENCED = "nvidia-persiste"
MPS = ("nvidia-cuda-mps", "nvidia-cuda-mp")
GRAPHICS = ("Xorg", "Xwayland", "gnome-shell", "weston")
RUNNING, LOCKED, CHECKPOINTED, FAILED = "running", "locked", "checkpointed", "failed"


class HookError(Exception):
    """Says why a phase cannot be done, and what would mend it."""

    def __init__(self, why: str, remedy: str = "") -> None:
        super().__init__(why)
        self.why, self.remedy = why, remedy


class Gpu(NamedTuple):
    """A GPU as nvidia-smi has it."""

    uuid: str
    name: str
    driver: int
    persistence: bool
    mig: bool
    used_mib: int


class User(NamedTuple):
    """A process that has a device of the driver's open; `start` tells it from a later one."""

    pid: int
    start: int
    comm: str
    devices: list[str]
    shares: bool


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
    STATE.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (STATE / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# --- what is there


def run(*argv: str, check: bool = True) -> str:
    """A program's output. Raises HookError."""
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    except OSError as exc:
        raise HookError(f"{argv[0]} cannot be run: {exc}", "install the driver") from exc
    if check and done.returncode:
        said = (done.stderr or done.stdout).strip()[-300:] or f"status {done.returncode}"
        raise HookError(f"{' '.join(argv)} failed: {said}")
    return done.stdout


def gpus() -> list[Gpu]:
    """The guest's GPUs. Raises HookError when the driver is not there."""
    fields = "uuid,name,driver_version,persistence_mode,mig.mode.current,memory.used"
    found = []
    for line in run(
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
    """Who uses the driver: by the descriptors and mappings of all processes, and by nvidia-smi."""
    told = told_pids()
    found = []
    for entry in sorted(PROC.iterdir()):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        pid = int(entry.name)
        devices, shares = opened(entry)
        if devices or pid in told:
            with contextlib.suppress(OSError, ValueError, IndexError):
                comm = (entry / "comm").read_text().strip()
                found.append(User(pid, started(pid), comm, sorted(devices), shares))
    return found


def opened(entry: Path) -> tuple[set[str], bool]:
    """A process's devices of the driver's, and whether it shares device memory with others."""
    devices, shares = set(), False
    with contextlib.suppress(OSError):
        for link in (entry / "fd").iterdir():
            with contextlib.suppress(OSError):
                devices |= nvidia(os.readlink(link))
    with contextlib.suppress(OSError):
        for line in (entry / "maps").read_text().splitlines():
            devices |= nvidia(line[line.find("/") :] if "/" in line else "")
            shares |= "/dev/shm/cuda.shm." in line or "/dev/shm/nccl-" in line
    return devices, shares


def nvidia(path: str) -> set[str]:
    """The name of the driver's device that a path is, if it is one."""
    name = path.partition("/dev/")[2].split(" ")[0]
    return {name} if name.startswith("nvidia") else set()


def told_pids() -> set[int]:
    """Whom nvidia-smi knows; nobody while the driver is not loaded."""
    if not (MODULES / "nvidia").exists():
        return set()
    said = run("nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader", check=False)
    return {int(line) for line in said.split() if line.isdigit()}


def started(pid: int) -> int:
    """When a process began, in ticks; -1: it has ended."""
    try:
        return int((PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return -1


def jobs(cards: list[Gpu]) -> list[User]:
    """The CUDA jobs to be carried. Raises HookError for what cannot be."""
    if any(card.mig for card in cards):
        raise HookError("MIG is on, which CUDA checkpoints do not carry", "nvidia-smi -mig 0")
    found = []
    for user in users():
        who = f"process {user.pid} ({user.comm})"
        if user.comm.startswith(PERSISTENCED):
            continue
        if user.comm.startswith(MPS):
            raise HookError(f"{who} is MPS, which CUDA checkpoints do not carry", "end it")
        if user.comm in GRAPHICS or "nvidia-modeset" in user.devices:
            raise HookError(f"{who} draws with the GPU: that is not carried", "end it")
        if user.devices and not any(re.fullmatch(r"nvidia\d+", name) for name in user.devices):
            only = ", ".join(user.devices)
            raise HookError(
                f"{who} has only {only} open: it is no job that can be locked", "end it"
            )
        if user.shares and cards and cards[0].driver < IPC_DRIVER:
            why = f"{who} shares device memory with others (CUDA IPC), which is not carried"
            raise HookError(why, f"use driver {IPC_DRIVER}")
        found.append(user)
    return found


# --- what is remembered


def read_state() -> dict[str, Any]:
    """What earlier phases left; nothing when none has begun."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((STATE / "state.json").read_text())
        return found if isinstance(found, dict) else {}
    return {}


def write_state(state: dict[str, Any]) -> None:
    """Replace it in one step."""
    part = STATE / "state.part"
    part.write_text(json.dumps(state))
    part.rename(STATE / "state.json")


def remembered(state: dict[str, Any]) -> list[dict[str, Any]]:
    """The jobs that are carried and still there."""
    return [job for job in state.get("jobs", []) if started(job["pid"]) == job["start"]]


def about(user: User) -> dict[str, Any]:
    """What it takes to begin the job anew."""
    entry = PROC / str(user.pid)

    def words(name: str) -> list[str]:
        with contextlib.suppress(OSError):
            text = (entry / name).read_bytes().decode(errors="surrogateescape")
            return [word for word in text.split("\0") if word]
        return []

    job: dict[str, Any] = {"pid": user.pid, "start": user.start, "comm": user.comm}
    job["argv"], job["env"] = words("cmdline"), words("environ")
    job["cwd"], job["uid"], job["gid"], job["unit"] = "/", 0, 0, ""
    with contextlib.suppress(OSError):
        job["cwd"] = os.readlink(entry / "cwd")
    with contextlib.suppress(OSError):
        status = (entry / "status").read_text()
        for key, name in (("uid", "Uid"), ("gid", "Gid")):
            found = re.search(rf"^{name}:\s+(\d+)", status, re.MULTILINE)
            job[key] = int(found[1]) if found else 0
    with contextlib.suppress(OSError):
        found = re.search(r"/([^/\s]+\.service)$", (entry / "cgroup").read_text(), re.MULTILINE)
        job["unit"] = found[1] if found else ""
    return job


# --- the vendor's tool, one way or the other


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
        return run("cuda-checkpoint", "--get-state", "--pid", str(pid)).strip().lower()

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
        run(*words)


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
        """As Command."""
        number = ctypes.c_int(-1)
        self._call("cuCheckpointProcessGetState", pid, ctypes.byref(number))
        return self.NAMES[number.value] if 0 <= number.value < len(self.NAMES) else FAILED

    def act(self, action: str, pid: int, pairs: dict[str, str]) -> None:
        """As Command."""
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
    """A UUID as CUDA has it."""
    return (ctypes.c_ubyte * 16)(*bytes.fromhex(uuid.replace("GPU-", "").replace("-", "")))


def tool() -> Any:
    """Which of the two."""
    return Command() if shutil.which("cuda-checkpoint") else Library()


# --- the phases


def preflight() -> dict[str, Any]:
    """Whether all that uses the GPUs now could be carried. Changes nothing."""
    cards = gpus()
    if not cards:
        raise HookError("nvidia-smi shows no GPU", "load the driver")
    if cards[0].driver < LEAST_DRIVER:
        why = f"driver {cards[0].driver} cannot restore onto another card"
        raise HookError(why, f"use driver {LEAST_DRIVER} or newer")
    found, how = jobs(cards), tool()
    for user in found:
        if (now := how.state(user.pid)) != RUNNING:
            why = f"process {user.pid} ({user.comm}) is {now} already"
            raise HookError(why, "unlock it: cuda-checkpoint --action unlock")
    free = available_bytes()
    held = sum(card.used_mib for card in cards) << 20
    if held > free:
        why = f"the GPUs hold {held >> 20} MiB, and {free >> 20} MiB of the guest's memory are free"
        raise HookError(why, "give the guest more memory")
    return {"device_bytes": held, "notes": [f"{len(found)} CUDA jobs"]}


def available_bytes() -> int:
    """Memory of the guest's that what the GPUs hold can go to."""
    text = (PROC / "meminfo").read_text()
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) << 10 if found else 0


def quiesce() -> dict[str, Any]:
    """What is to be carried is written down, once."""
    state = read_state()
    if not state:
        cards = gpus()
        carried = [about(user) for user in jobs(cards)]
        write_state({
            "jobs": carried,
            "cards": [[card.uuid, card.name] for card in cards],
            "persistence": any(card.persistence for card in cards),
            "persistenced": any(user.comm.startswith(PERSISTENCED) for user in users()),
            "held": sum(card.used_mib for card in cards) << 20,
            "drivers": [],
        })  # fmt: skip
    return {}


def lock() -> dict[str, Any]:
    """Every CUDA job is locked, those too that began meanwhile."""
    how = tool()
    for _ in range(10):
        state = read_state()
        known = {(job["pid"], job["start"]) for job in remembered(state)}
        late = [user for user in jobs([]) if (user.pid, user.start) not in known]
        state["jobs"] = remembered(state) + [about(user) for user in late]
        write_state(state)
        for job in state["jobs"]:
            if how.state(job["pid"]) == RUNNING:
                how.act("lock", job["pid"], {})
        if not late:
            return {}
    raise HookError("new CUDA jobs begin all the time", "stop whatever begins them")


def checkpoint() -> dict[str, Any]:
    """Every job's device memory is in its own memory, and it has no device open."""
    how, state = tool(), read_state()
    for job in remembered(state):
        if how.state(job["pid"]) == LOCKED:
            how.act("checkpoint", job["pid"], {})
        now, who = how.state(job["pid"]), f"process {job['pid']} ({job['comm']})"
        if now != CHECKPOINTED:
            raise HookError(f"{who} is {now}, not checkpointed")
        if devices := opened(PROC / str(job["pid"]))[0]:
            still = ", ".join(sorted(devices))
            raise HookError(f"{who} is checkpointed and still has {still} open")
    return {"device_bytes": state.get("held", 0)}


def release() -> dict[str, Any]:
    """Nobody uses the driver, and it is unloaded: an unplug with users left blocks for ever."""
    state = read_state()
    if not (MODULES / "nvidia").exists():
        return {}
    run("nvidia-smi", "-pm", "0")
    if state.get("persistenced"):
        run("systemctl", "stop", "nvidia-persistenced", check=False)
    end_persistenced()
    if left := users():
        who = ", ".join(f"{one.pid} ({one.comm}: {' '.join(one.devices)})" for one in left)
        raise HookError(f"the driver has users: {who}", "end them")
    state["drivers"] = [name for name in DRIVERS if (MODULES / name).exists()]
    write_state(state)
    for name in state["drivers"]:
        run("modprobe", "-r", name)
    stay = [name for name in state["drivers"] if (MODULES / name).exists()]
    if stay:
        raise HookError(
            "the drivers {} stay loaded".format(", ".join(stay)), "see lsmod: who uses them?"
        )
    return {}


def end_persistenced() -> None:
    """The persistence daemon is a user of the driver's."""
    deadline = time.monotonic() + ENDS_S
    while found := [user for user in users() if user.comm.startswith(PERSISTENCED)]:
        if time.monotonic() > deadline:
            raise HookError("nvidia-persistenced does not end")
        for user in found:
            with contextlib.suppress(OSError):
                os.kill(user.pid, signal.SIGTERM)
        time.sleep(0.1)


def reattach() -> dict[str, Any]:
    """The driver is loaded and has as many GPUs of the same kind as before."""
    state = read_state()
    if not state:
        return {}
    for name in reversed(state["drivers"]):
        if not (MODULES / name).exists():
            run("modprobe", name)
    wanted = sorted(name for _, name in state["cards"])
    deadline = time.monotonic() + APPEARS_S
    while True:
        with contextlib.suppress(HookError):
            if sorted(card.name for card in gpus()) == wanted:
                break
        if time.monotonic() > deadline:
            raise HookError("the driver does not show {}".format(", ".join(wanted)), "see dmesg")
        time.sleep(0.2)
    # A restore needs it, or somebody who holds the driver meanwhile.
    run("nvidia-smi", "-pm", "1")
    return {}


def restore() -> dict[str, Any]:
    """Every job's device memory is on the cards that are there now.

    One that cannot be is ended and begun anew: it would be stuck for good.
    """
    state = read_state()
    if not state:
        return {}
    how, pairs, restarted = tool(), device_map(state), []
    for job in remembered(state):
        if how.state(job["pid"]) not in (CHECKPOINTED, FAILED):
            continue
        try:
            how.act("restore", job["pid"], pairs)
        except HookError as exc:
            restarted.append(f"{begin_anew(job)}: {exc.why}")
    return {"restarted": restarted}


def device_map(state: dict[str, Any]) -> dict[str, str]:
    """Which card of now each of then becomes, all of them named; nothing when they are the same."""
    there = gpus()
    if {uuid for uuid, _ in state["cards"]} == {card.uuid for card in there}:
        return {}
    pairs, left = {}, list(there)
    for uuid, name in state["cards"]:
        match = next((card for card in left if card.name == name), None)
        if match is None:
            raise HookError(f"there is no {name} for the one that it was")
        left.remove(match)
        pairs[uuid] = match.uuid
    return pairs


def begin_anew(job: dict[str, Any]) -> str:
    """End the job for certain and begin it again; which it was."""
    who = f"{' '.join(job['argv']) or job['comm']} (process {job['pid']})"
    with contextlib.suppress(OSError):
        os.kill(job["pid"], signal.SIGKILL)
    if job["unit"]:
        run("systemctl", "restart", job["unit"], check=False)
    elif job["argv"]:
        environment = dict(word.split("=", 1) for word in job["env"] if "=" in word)
        try:
            subprocess.Popen(
                job["argv"], cwd=job["cwd"], env=environment, user=job["uid"], group=job["gid"],
                start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )  # fmt: skip
        except (OSError, subprocess.SubprocessError) as exc:
            return f"{who}, which does not start again ({exc})"
    return who


def resume() -> dict[str, Any]:
    """Every job goes on, persistence is as it was, and nothing is remembered."""
    state = read_state()
    if not state:
        return {}
    how = tool()
    for job in remembered(state):
        now = how.state(job["pid"])
        if now == LOCKED:
            how.act("unlock", job["pid"], {})
        elif now != RUNNING:
            raise HookError(f"process {job['pid']} ({job['comm']}) is {now}")
    if state["persistenced"]:
        run("systemctl", "start", "nvidia-persistenced", check=False)
    if not state["persistence"]:
        run("nvidia-smi", "-pm", "0")
    (STATE / "state.json").unlink()
    return {}


def abort() -> dict[str, Any]:
    """From wherever it is: the jobs go on."""
    reattach()
    answer = restore()
    resume()
    return answer


PHASES: dict[str, Callable[[], dict[str, Any]]] = {
    "preflight": preflight,
    "quiesce": quiesce,
    "lock": lock,
    "checkpoint": checkpoint,
    "release": release,
    "reattach": reattach,
    "restore": restore,
    "resume": resume,
    "abort": abort,
}

if __name__ == "__main__":
    sys.exit(main(sys.argv))
