"""Where an adopted QEMU's memory goes: into one file of vmckpt's, from which it is captured. Pure.

A block of it is a part of that file, which is in huge pages if all of them are. Memory that such a
file cannot replace (memory bound to nodes of its host, files elsewhere) stays as the command line
says, and is not captured.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vmckpt.qemu.replies import QemuVersion
from vmckpt.vm.adopted import holes
from vmckpt.vm.adopted.facts import AdoptedFacts
from vmckpt.vm.adopted.options import Option
from vmckpt.vm.adopted.settings import JsonObject, Settings, parse_settings
from vmckpt.vm.paths import IN_MEMORY

BACK_END = re.compile(r"memory-backend-(ram|file|memfd|shm)")
# The first QEMU whose blocks may be parts of a file (`offset`).
BLOCKS_IN_A_FILE = QemuVersion(8, 1, 0)
# What one of these may have besides its id, so that a file of vmckpt's can take its place; without
# `align`, `pmem`, `readonly`, ..., which say what is in the file, and what binds it to its host.
_SAME = {"qom-type", "id", "size", "share", "mem-path", "merge", "dump", "prealloc", "seal"}
# Machine types up to 3.1, and Red Hat's of that age: QEMU would call such memory by its path, and
# migrates by name.
_NAMES_BY_PATH = re.compile(r"-([0-3]\.\d+(\.\d+)?|rhel[67]\.\d+\.\d+)$")


class MemoryLayout(NamedTuple):
    """The offset in the file of each memory back end, by its id, and the file's directory."""

    offsets: Mapping[str, int]
    ram_dir: Path = IN_MEMORY


def layout(options: Sequence[Option], facts: AdoptedFacts) -> MemoryLayout:
    """Of a command line; without offsets: none of its memory is replaced.

    QEMU makes its back ends in the order of its arguments, and the file as large as the first one
    needs: that is the last in it.
    """
    given = [
        settings
        for option in options
        if option.name == "object"
        and BACK_END.fullmatch((settings := _settings(option)).get("qom-type") or "")
    ]
    names = [one.get("id") or "" for one in given]
    directories = [_directory(one.get("mem-path"), facts) for one in given if _is_plain(one)]
    if not has_own_memory(options) and facts.ram_id:
        paths = [option.value for option in options if option.name == "mem-path"]
        names.append(facts.ram_id)
        directories.append(_directory(paths[-1] if paths else None, facts))
    sizes = [facts.back_ends.get(name, 0) for name in names]
    # Others are no RAM of the guest: an NVDIMM, memory shared with others.
    is_all = sum(sizes) == facts.memory_bytes and len(set(names)) == len(names) == len(directories)
    if not is_all or (len(names) > 1 and facts.version < BLOCKS_IN_A_FILE):
        return MemoryLayout({})
    (ram_dir, *others) = {*directories}
    if ram_dir is None or others:
        return MemoryLayout({})
    return MemoryLayout({name: sum(sizes[at + 1 :]) for at, name in enumerate(names)}, ram_dir)


def has_own_memory(options: Sequence[Option]) -> bool:
    """Whether the command line names the back ends of the machine's memory, besides modules."""
    for option in options:
        if option.name in ("machine", "M") and _settings(option).get("memory-backend"):
            return True
        if option.name == "numa" and _settings(option).get("memdev"):
            return True
    return False


def in_file(name: str, offset: int, facts: AdoptedFacts, *, kind: str = "ram") -> JsonObject:
    """A back end whose memory is in the file; `kind`: what it was."""
    ram: dict[str, Any] = {
        "qom-type": "memory-backend-file",
        "id": name,
        "size": facts.back_ends.get(name, facts.memory_bytes),
        "mem-path": holes.RAM,
        "share": True,
    }
    if offset:
        ram["offset"] = offset
    if kind in ("ram", "shm") and _NAMES_BY_PATH.search(facts.platform.machine):
        ram["x-use-canonical-path-for-ramblock-id"] = False
    return JsonObject(ram)


def _is_plain(back_end: Settings) -> bool:
    """Whether a file of vmckpt's can take its place, wherever that is."""
    keys = back_end.data if isinstance(back_end, JsonObject) else dict(back_end.pairs)
    return keys.keys() <= _SAME


def _directory(path: str | None, facts: AdoptedFacts) -> Path | None:
    """Where a file may be that takes the place of memory at `path` (None: of memory in no file).

    None: nowhere.
    """
    if path is None or IN_MEMORY in (Path(path), *Path(path).parents):
        return IN_MEMORY
    if path not in facts.huge_pages:
        return None
    return Path(path) if path in facts.directories else Path(path).parent


def _settings(option: Option) -> Settings:
    implied = {"object": "qom-type", "machine": "type", "M": "type", "numa": "type"}
    return parse_settings(option.value or "", implied.get(option.name))
