"""Do both QEMUs present the same machine? QEMU does not notice another CPU: the guest just dies."""

import asyncio
from collections.abc import Mapping
from typing import NamedTuple, cast

from vmckpt.qemu import commands
from vmckpt.qemu.monitor import Monitor
from vmckpt.qemu.shapes import FeatureWord

Features = frozenset[tuple[tuple[str, str | int], ...]]


class GuestMachine(NamedTuple):
    """The machine that a guest sees. `devices` maps ids to types; CPUID words of 0 are left out.

    Devices that belong to the machine type are not listed: they are the same if it is.
    """

    kind: str
    vcpus: int
    cpu_model: str
    features: Features
    devices: Mapping[str, str]


def differences(here: GuestMachine, there: GuestMachine) -> list[str]:
    """The differences that the guest would see. Pure."""
    found = []
    if here.kind != there.kind:
        found.append(f"machine type: {here.kind} here, {there.kind} there")
    if here.vcpus != there.vcpus:
        found.append(f"vCPUs: {here.vcpus} here, {there.vcpus} there")
    if here.cpu_model != there.cpu_model:
        found.append(f"CPU model: {here.cpu_model} here, {there.cpu_model} there")
    elif changed := _changed_words(here.features, there.features):
        of = f"{len(changed)} CPUID word{'s' * (len(changed) > 1)} of {here.cpu_model}"
        found.append(f"CPU features: {of} not the same: {'; '.join(changed)}")
    for name, kind in sorted(here.devices.items() - there.devices.items()):
        found.append(f"device '{name}' ({kind}) is here and not there")
    for name, kind in sorted(there.devices.items() - here.devices.items()):
        found.append(f"device '{name}' ({kind}) is there and not here")
    return found


def _changed_words(here: Features, there: Features) -> list[str]:
    """The words whose values differ, each with the features that only one side has.

    A word that only one side has is included: it is 0 on the other.
    """
    ours, theirs = _words(here), _words(there)
    changed = []
    for word in sorted(ours.keys() | theirs.keys()):
        before, after = ours.get(word, 0), theirs.get(word, 0)
        sides = [(before & ~after, "only here"), (after & ~before, "only there")]
        bits = [f"{only:#x} {where}" for only, where in sides if only]
        if bits:
            leaf, subleaf, register = word
            changed.append(f"{leaf:#x}.{subleaf} {register}: {', '.join(bits)}")
    return changed


def _words(features: Features) -> dict[tuple[int, int, str], int]:
    """The words by leaf, subleaf (0 if QEMU names none) and register."""
    words = [dict(word) for word in features]
    return {
        (
            int(word["cpuid-input-eax"]),
            int(word.get("cpuid-input-ecx", 0)),
            str(word["cpuid-register"]),
        ): int(word["features"])
        for word in words
    }


async def describe(monitor: Monitor) -> GuestMachine:
    """The machine that a QEMU presents to its guest."""
    kind, cpus, devices = await asyncio.gather(
        commands.qom_get(monitor, "/machine", "type", str),
        commands.query_cpus(monitor),
        _devices(monitor),
    )
    first = cpus[0].qom_path
    model, words = await asyncio.gather(
        commands.qom_get(monitor, first, "type", str),
        commands.qom_get(monitor, first, "feature-words", list[FeatureWord]),
    )
    # A zero word may be unknown to the other QEMU, which makes no difference to the guest.
    features = frozenset(tuple(sorted(word.items())) for word in words if word["features"])
    return GuestMachine(kind, len(cpus), model, cast("Features", features), devices)


async def _devices(monitor: Monitor) -> dict[str, str]:
    """The devices given at the start or plugged later, by id, or by number without one."""
    named, unnamed = await asyncio.gather(
        commands.qom_children(monitor, "/machine/peripheral"),
        commands.qom_children(monitor, "/machine/peripheral-anon"),
    )
    return named | unnamed
