"""Are both QEMUs the same machine? QEMU itself does not notice another CPU: the guest just dies."""

import asyncio
from collections.abc import Mapping
from typing import NamedTuple

from vmckpt.qemu import commands
from vmckpt.qemu.monitor import Monitor
from vmckpt.qemu.shapes import FEATURE_WORDS, TEXT

Features = frozenset[tuple[tuple[str, str | int], ...]]


class Machine(NamedTuple):
    """What a guest finds itself on. `devices` maps ids to types; CPUID words of 0 are left out.

    Devices that belong to the machine type are not named: they are the same when that is.
    """

    kind: str
    vcpus: int
    cpu_model: str
    features: Features
    devices: Mapping[str, str]


def differences(here: Machine, there: Machine) -> list[str]:
    """What the guest would find changed. Pure."""
    found = []
    if here.kind != there.kind:
        found.append(f"machine type: {here.kind} here, {there.kind} there")
    if here.vcpus != there.vcpus:
        found.append(f"vCPUs: {here.vcpus} here, {there.vcpus} there")
    if here.cpu_model != there.cpu_model:
        found.append(f"CPU model: {here.cpu_model} here, {there.cpu_model} there")
    elif here.features != there.features:
        changed = len(here.features ^ there.features) // 2
        found.append(f"CPU features: {changed} CPUID words of {here.cpu_model} differ")
    for name, kind in sorted(here.devices.items() - there.devices.items()):
        found.append(f"device '{name}' ({kind}) is here and not there")
    for name, kind in sorted(there.devices.items() - here.devices.items()):
        found.append(f"device '{name}' ({kind}) is there and not here")
    return found


async def describe(monitor: Monitor) -> Machine:
    """The machine that a QEMU is to its guest."""
    kind, cpus, devices = await asyncio.gather(
        commands.qom_get(monitor, "/machine", "type", TEXT),
        commands.query_cpus(monitor),
        _devices(monitor),
    )
    first = cpus[0].qom_path
    model, words = await asyncio.gather(
        commands.qom_get(monitor, first, "type", TEXT),
        commands.qom_get(monitor, first, "feature-words", FEATURE_WORDS),
    )
    # A word that is zero may be unknown to the other QEMU, which is the same to the guest.
    features = frozenset(tuple(sorted(word.items())) for word in words if word["features"])
    return Machine(kind, len(cpus), model, features, devices)


async def _devices(monitor: Monitor) -> dict[str, str]:
    """What was given at the start or plugged later, by id, or by number where it has none."""
    named, unnamed = await asyncio.gather(
        commands.qom_children(monitor, "/machine/peripheral"),
        commands.qom_children(monitor, "/machine/peripheral-anon"),
    )
    return named | unnamed
