"""What a running QEMU and /proc say of it: all that adoption needs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from vmckpt.qemu.inside import GuestDrive
from vmckpt.vm.argv import Platform


class AdoptedFacts(NamedTuple):
    """One QEMU as it is now.

    `devices` are those with an id, with their types; `late` the settings of those that its command
    line does not have; `places` the PCI addresses of those that have one. `networks` are QEMU's
    words on its network back ends, by id; `labels` the names of its character devices.
    `directories` are those of the paths on its command line that are directories.
    """

    argv: tuple[str, ...]
    cwd: Path
    platform: Platform
    ram_id: str | None
    memory_bytes: int
    vcpus: int
    drives: tuple[GuestDrive, ...]
    devices: Mapping[str, str]
    late: Mapping[str, Mapping[str, Any]]
    places: Mapping[str, str]
    networks: Mapping[str, str]
    labels: frozenset[str]
    directories: frozenset[str]
    images_dir: Path
