"""What is under way with a domain: enough to tidy up after a command that died.

It stands in the operator's state directory; the migration itself is libvirt's, and goes on.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from vmckpt.errors import UsageError
from vmckpt.hosts.inventory import local_host, state_dir
from vmckpt.migrate.disk_files import CopiedDisk

FORMAT = 1


@dataclass(frozen=True, slots=True)
class DomainJournal:
    """One migration of one domain. `disks` are files made on the target for it.

    `may_postcopy`: the guest may come to run there before its memory is. `known_to_target`: its
    definition was there before. `moved`: it is the target's; only the source is not tidied yet.
    `stayed`: it is the source's; only the target is not. `held_mib_per_s`: see hold.py; the guest
    may stand still for `max_downtime_ms`. `offline`: the domain is off.
    """

    run: str
    vm: str
    uuid: str
    source: str
    target: str
    persistent: bool
    disks: tuple[CopiedDisk, ...] = ()
    may_postcopy: bool = False
    known_to_target: bool = False
    moved: bool = False
    stayed: bool = False
    held_mib_per_s: int = 0
    max_downtime_ms: int = 0
    offline: bool = False

    async def write(self) -> None:
        """Keep it. Raises StorageError."""
        path = _path(self.vm)
        await local_host().make_dir(path.parent)
        await local_host().write_text(path, json.dumps({"format": FORMAT, **asdict(self)}))

    async def remove(self) -> None:
        """Forget it."""
        await local_host().remove(_path(self.vm))

    @classmethod
    async def read(cls, vm: str) -> Self | None:
        """The journal of the domain of that name; None when there is none. Raises UsageError."""
        path = _path(vm)
        text = await local_host().read_text(path)
        if text is None:
            return None
        try:
            data = json.loads(text)
            if data.pop("format") != FORMAT:
                raise ValueError("written by another version of vmckpt")
            disks = tuple(CopiedDisk(**disk) for disk in data.pop("disks"))
            return cls(**data, disks=disks)
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise UsageError(
                f"{path} is damaged",
                why=f"{type(exc).__name__}: {exc}",
                remedy="see where the domain runs (virsh list), and remove the file",
            ) from exc


def _path(vm: str) -> Path:
    # A name that is no file name (libvirt forbids "/") has no journal.
    return state_dir() / "domains" / f"{vm.replace('/', '_')}.json"
