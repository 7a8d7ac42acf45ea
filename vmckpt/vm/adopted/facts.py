"""The facts about a running QEMU that adoption needs, from QMP and /proc."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vmckpt.qemu.inside import GuestDrive, MemoryModule
from vmckpt.qemu.replies import QemuVersion
from vmckpt.vm.record import Platform


class AdoptedFacts(NamedTuple):
    """One QEMU as it is now.

    `devices` are those with an id, with their types; `late` the settings of those that are not on
    its command line; `slots` the PCI addresses of those that have one. `networks` are QEMU's
    descriptions of its network back ends, by id; `labels` the names of its character devices.
    `directories` are the memory paths on its command line that are directories, `huge_pages` those
    that are absolute, and in huge pages. `memory_bytes` includes
    memory modules (`modules`); `back_ends` are the sizes of its memory back ends, by id.
    """

    argv: tuple[str, ...]
    cwd: Path
    platform: Platform
    ram_id: str | None
    memory_bytes: int
    back_ends: Mapping[str, int]
    version: QemuVersion
    vcpus: int
    drives: tuple[GuestDrive, ...]
    devices: Mapping[str, str]
    late: Mapping[str, Mapping[str, Any]]
    slots: Mapping[str, str]
    modules: Mapping[str, MemoryModule]
    networks: Mapping[str, str]
    labels: frozenset[str]
    directories: frozenset[str]
    huge_pages: frozenset[str]
    images_dir: Path
