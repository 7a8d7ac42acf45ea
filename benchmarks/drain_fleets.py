"""Fleets for benchmarks/drain: hosts and VMs by chance, always the same by the same seed."""

import random
from dataclasses import replace
from typing import NamedTuple

from vmckpt.forecast.drain.fleet import HostRoom, MoveCost, Mover
from vmckpt.units import GIB

# Memory of VMs, and how often it is met.
SIZES_GIB, OFTEN = (1, 2, 4, 8, 16, 32, 64), (14, 20, 26, 20, 12, 6, 2)
HOST_GIB, HOST_CPUS, VCPUS_A_CPU = (256, 384, 512), (32, 48, 64), 6
LINK_BYTES_PER_S = (1.1e9, 2.8e9)
# A service has so many VMs that are not to be on one host.
REPLICAS = (2, 3, 5)


class Fleet(NamedTuple):
    """What is to be planned: the VMs that have to leave, and room on the hosts that stay."""

    seed: int
    movers: tuple[Mover, ...]
    rooms: tuple[HostRoom, ...]


def fleet(seed: int, vms: int = 1000, hosts: int = 50, drained: int = 1) -> Fleet:
    """So many VMs on so many hosts, of which the first `drained` are to be empty.

    Half of the VMs belong to services whose replicas are on different hosts, one in twenty has
    another that it has to be with; each host lacks what one in ten VMs needs.
    """
    rng = random.Random(seed)
    names = [f"h{number:02}" for number in range(hosts)]
    memory = {name: rng.choice(HOST_GIB) * GIB for name in names}
    vcpus = {name: rng.choice(HOST_CPUS) * VCPUS_A_CPU for name in names}
    speed = rng.choice(LINK_BYTES_PER_S)
    there = {name: list[Mover]() for name in names}
    leaving, staying = names[:drained], names[drained:]
    service, left = "", 0
    for number in range(vms):
        if left == 0:
            service, left = f"service{number}", rng.choice(REPLICAS)
        left -= 1
        apart = frozenset({service}) if rng.random() < 0.5 else frozenset[str]()
        size = rng.choices(SIZES_GIB, OFTEN)[0] * GIB
        home = _home(rng, there, memory, size, apart)
        # A part of memory is used, and some of it dirtied again while it goes.
        used = rng.uniform(0.2, 0.9) * size * rng.choice((1.0, 1.0, 1.05, 1.3))
        open_ = [name for name in staying if rng.random() > 0.1] if home in leaving else []
        costs = {name: _cost(rng, used, speed) for name in open_}
        there[home].append(
            Mover(f"vm{number:04}", home, size, rng.choice((1, 2, 2, 4, 8)), costs, apart)
        )
    return Fleet(
        seed,
        tuple(_pairs(rng, there, leaving)),
        tuple(_room(name, memory[name], vcpus[name], there[name]) for name in staying),
    )


def _pairs(rng: random.Random, there: dict[str, list[Mover]], leaving: list[str]) -> list[Mover]:
    """Those that leave; some of one host belong together."""
    movers = []
    for name in leaving:
        ones = there[name]
        for number in range(0, len(ones) - 1, 20):
            pair = ones[number : number + 2]
            if not pair[0].apart & pair[1].apart:
                word = frozenset({f"pair-{pair[0].name}"})
                ones[number : number + 2] = [replace(one, together=word) for one in pair]
        movers += ones
    return movers


def _room(name: str, memory: int, vcpus: int, there: list[Mover]) -> HostRoom:
    return HostRoom(
        name,
        memory - sum(one.memory_bytes for one in there),
        vcpus - sum(one.vcpus for one in there),
        100 - len(there),
        apart=frozenset(word for one in there for word in one.apart),
    )


def _home(
    rng: random.Random,
    there: dict[str, list[Mover]],
    memory: dict[str, int],
    size: int,
    apart: frozenset[str],
) -> str:
    """A host with room for it, without a replica of its service; some room stays everywhere."""
    for name in rng.sample(list(there), len(there)):
        used = sum(one.memory_bytes for one in there[name])
        if used + size < 0.8 * memory[name] and not any(one.apart & apart for one in there[name]):
            return name
    raise ValueError("the hosts are full")


def _cost(rng: random.Random, used: float, speed: float) -> MoveCost:
    """Hosts of one generation are alike, more or less."""
    work_s = used / (speed * rng.uniform(0.95, 1.0))
    return MoveCost(rng.uniform(0.8, 1.2), work_s, rng.uniform(0.3, 0.4), 0.08 * work_s)
