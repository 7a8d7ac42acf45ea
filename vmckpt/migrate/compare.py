"""Are both QEMUs the same machine? QEMU itself does not notice another CPU: the guest just dies."""

import asyncio

from vmckpt.qemu import commands
from vmckpt.qemu.monitor import Monitor

Features = frozenset[tuple[tuple[str, str | int], ...]]


async def differences(source: Monitor, target: Monitor) -> list[str]:
    """What the guest would find changed on the target: machine type, vCPUs, CPU model, features."""
    (machine, cpus, model, features), theirs, plugged, theirs_plugged = await asyncio.gather(
        _machine(source), _machine(target), _devices(source), _devices(target)
    )
    found = []
    if machine != theirs[0]:
        found.append(f"machine type: {machine} here, {theirs[0]} there")
    if cpus != theirs[1]:
        found.append(f"vCPUs: {cpus} here, {theirs[1]} there")
    if model != theirs[2]:
        found.append(f"CPU model: {model} here, {theirs[2]} there")
    elif features != theirs[3]:
        changed = len(features ^ theirs[3]) // 2
        found.append(f"CPU features: {changed} CPUID words of {model} differ")
    for name, kind in sorted(plugged.items() - theirs_plugged.items()):
        found.append(f"device '{name}' ({kind}) is here and not there")
    for name, kind in sorted(theirs_plugged.items() - plugged.items()):
        found.append(f"device '{name}' ({kind}) is there and not here")
    return found


async def _devices(monitor: Monitor) -> dict[str, str]:
    """What was given on the command line or plugged later, by id, or by number where it has none.

    Devices that belong to the machine type are the same when that is.
    """
    named, unnamed = await asyncio.gather(
        commands.qom_children(monitor, "/machine/peripheral"),
        commands.qom_children(monitor, "/machine/peripheral-anon"),
    )
    return named | unnamed


async def _machine(monitor: Monitor) -> tuple[str, int, str, Features]:
    machine, cpus = await asyncio.gather(
        commands.qom_get(monitor, "/machine", "type"), commands.query_cpus(monitor)
    )
    first = cpus[0].qom_path
    model, words = await asyncio.gather(
        commands.qom_get(monitor, first, "type"), commands.qom_get(monitor, first, "feature-words")
    )
    # A word that is zero may be unknown to the other QEMU, which is the same to the guest.
    features = frozenset(tuple(sorted(word.items())) for word in words if word["features"])
    return machine, len(cpus), model, features
