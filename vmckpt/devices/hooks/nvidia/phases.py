"""The phases of the hook contract; each does what is left to do."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from vmckpt.devices.hooks.nvidia import system
from vmckpt.devices.hooks.nvidia.carried import (
    about,
    begin_anew,
    forget,
    read_state,
    remembered,
    write_state,
)
from vmckpt.devices.hooks.nvidia.system import HookError, available_bytes
from vmckpt.devices.hooks.nvidia.tool import (
    CHECKPOINTED,
    FAILED,
    LEAST_DRIVER,
    LOCKED,
    RUNNING,
    tool,
)
from vmckpt.devices.hooks.nvidia.users import PERSISTENCED, gpus, jobs, opened, users

ENDS_S, APPEARS_S = 10.0, 60.0
# In the order of unloading.
DRIVERS = ("nvidia_uvm", "nvidia_drm", "nvidia_modeset", "nvidia_peermem", "nvidia")


def preflight() -> dict[str, Any]:
    """Whether all current users of the GPUs could be carried. Changes nothing."""
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


def quiesce() -> dict[str, Any]:
    """Record what will be carried, once."""
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
    """Lock every CUDA job, including those that started meanwhile."""
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
    """Move every job's device memory into its own memory; then it has no device open."""
    how, state = tool(), read_state()
    for job in remembered(state):
        if how.state(job["pid"]) == LOCKED:
            how.act("checkpoint", job["pid"], {})
        now, who = how.state(job["pid"]), f"process {job['pid']} ({job['comm']})"
        if now != CHECKPOINTED:
            raise HookError(f"{who} is {now}, not checkpointed")
        if devices := opened(system.PROC / str(job["pid"]))[0]:
            still = ", ".join(sorted(devices))
            raise HookError(f"{who} is checkpointed and still has {still} open")
    return {"device_bytes": state.get("held", 0)}


def release() -> dict[str, Any]:
    """Unload the driver, which has no users left: an unplug with users would block."""
    state = read_state()
    if not (system.MODULES / "nvidia").exists():
        return {}
    system.run("nvidia-smi", "-pm", "0")
    if state.get("persistenced"):
        system.run("systemctl", "stop", "nvidia-persistenced", check=False)
    end_persistenced()
    if left := users():
        who = ", ".join(f"{one.pid} ({one.comm}: {' '.join(one.devices)})" for one in left)
        raise HookError(f"the driver has users: {who}", "end them")
    loaded = [name for name in DRIVERS if (system.MODULES / name).exists()]
    # Including those that it had unloaded before it was interrupted.
    state["drivers"] = [n for n in DRIVERS if n in loaded or n in state.get("drivers", ())]
    write_state(state)
    for name in loaded:
        system.run("modprobe", "-r", name)
    stay = [name for name in state["drivers"] if (system.MODULES / name).exists()]
    if stay:
        raise HookError(
            "the drivers {} stay loaded".format(", ".join(stay)), "see lsmod: who uses them?"
        )
    return {}


def end_persistenced() -> None:
    """End the persistence daemon, which uses the driver."""
    deadline = time.monotonic() + ENDS_S
    while found := [user for user in users() if user.comm.startswith(PERSISTENCED)]:
        if time.monotonic() > deadline:
            raise HookError("nvidia-persistenced does not end")
        for user in found:
            with contextlib.suppress(OSError):
                os.kill(user.pid, signal.SIGTERM)
        time.sleep(0.1)


def reattach() -> dict[str, Any]:
    """Load the driver; require as many GPUs of the same kind as before."""
    state = read_state()
    if not state:
        return {}
    for name in reversed(state["drivers"]):
        if not (system.MODULES / name).exists():
            system.run("modprobe", name)
    wanted = sorted(name for _, name in state["cards"])
    deadline = time.monotonic() + APPEARS_S
    while True:
        with contextlib.suppress(HookError):
            if sorted(card.name for card in gpus()) == wanted:
                break
        if time.monotonic() > deadline:
            raise HookError("the driver does not show {}".format(", ".join(wanted)), "see dmesg")
        time.sleep(0.2)
    # A restore needs it, or another process that keeps the driver loaded meanwhile.
    system.run("nvidia-smi", "-pm", "1")
    return {}


def restore() -> dict[str, Any]:
    """Move every job's device memory to the current cards.

    A job for which that fails is ended and restarted: it would be stuck permanently.
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
    """Which current card replaces each earlier one, naming all; empty if they are the same."""
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


def resume() -> dict[str, Any]:
    """Resume every job, restore the persistence setting, and delete the state."""
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
        system.run("systemctl", "start", "nvidia-persistenced", check=False)
    if not state["persistence"]:
        system.run("nvidia-smi", "-pm", "0")
    forget()
    return {}


def abort() -> dict[str, Any]:
    """From any phase: resume the jobs."""
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
