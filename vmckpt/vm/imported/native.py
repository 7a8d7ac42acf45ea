"""A stopped domain, described for adoption by the command line that libvirt would start. Pure.

The guest is off, so that what only a running one needs unchanged may differ: its memory becomes one
file of vmckpt's, and what belongs to libvirt or to a screen is left out.
"""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from vmckpt.errors import RefusedError, UsageError
from vmckpt.foreign import MOST_INTEGER
from vmckpt.qemu.inside import GuestDrive
from vmckpt.qemu.replies import QemuVersion
from vmckpt.units import whole_number
from vmckpt.vm.adopted.facts import AdoptedFacts
from vmckpt.vm.adopted.images import FORMATS
from vmckpt.vm.adopted.options import Option, split_options
from vmckpt.vm.adopted.settings import KeyValues, Settings, parse_settings
from vmckpt.vm.record import Platform

# The key of a first value that has none.
_IMPLIED = {"machine": "type", "accel": "accel", "smp": "cpus", "m": "size", "device": "driver",
            "object": "qom-type", "chardev": "backend", "blockdev": "driver"}  # fmt: skip
_SIZE = re.compile(r"([0-9]{1,15})([bkKmMgGtT]?)")
_UNITS = {"b": 1, "k": 1 << 10, "": 1 << 20, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
# libvirt encrypts secrets of the command line with it.
_MASTER_KEY = "masterKey0"
_FLASH = ("pflash0", "pflash1")


class NativeMachine(NamedTuple):
    """What adoption needs to know, and what the new VM does without."""

    facts: AdoptedFacts
    notes: tuple[str, ...]


def native_argv(text: str) -> tuple[str, ...]:
    """The command line in libvirt's text, without the environment before it. Raises UsageError."""
    try:
        words = shlex.split(text.replace("\\\n", " "))
    except ValueError as exc:
        raise _unreadable(str(exc)) from exc
    while words and not words[0].startswith("/"):
        words.pop(0)
    if not words:
        raise _unreadable("it names no QEMU")
    return tuple(words)


def native_machine(name: str, argv: Sequence[str], images_dir: Path) -> NativeMachine:
    """Raises RefusedError naming everything that a VM of vmckpt's own cannot have; UsageError."""
    line = _Line([_parsed(option) for option in split_options(argv[1:])])
    memory = line.memory()
    kept = [one for one in line.options if line.keeps(one, memory)]
    if line.refusals:
        raise RefusedError(
            f"the domain '{name}' cannot become a VM of vmckpt's own",
            why="; ".join(line.refusals),
            remedy="change the domain (virsh edit), or leave it to libvirt",
        )
    words = [argv[0], *(word for option, settings in kept for word in _words(option, settings))]
    return NativeMachine(line.facts(words, memory, images_dir), tuple(line.notes))


Parsed = tuple[Option, Settings]


@dataclass(slots=True)
class _Line:
    """The options of the command line, with what is refused and noted about them."""

    options: list[Parsed]
    refusals: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def all(self, name: str) -> list[Settings]:
        """The values of every option of that name."""
        return [settings for option, settings in self.options if option.name == name]

    def one(self, name: str) -> Settings:
        """The value of the only option of that name. Raises UsageError."""
        found = self.all(name)
        if len(found) != 1:
            raise _unreadable(f"it has {len(found)} times -{name}, instead of once")
        return found[0]

    def memory(self) -> str:
        """The name of the guest's memory. Raises UsageError."""
        name = self.one("machine").get("memory-backend")
        if name is None and not self.all("numa"):
            raise _unreadable("the machine names no memory (libvirt before 9.0?)")
        return name or ""

    def keeps(self, parsed: Parsed, memory: str) -> bool:
        """Whether the option stays; if not, a note or a refusal says so where it matters."""
        option, settings = parsed
        if option.name in ("no-shutdown", "S"):
            return False
        if option.name == "numa":
            self.refusals.append("it has NUMA nodes, which vmckpt does not import")
        if option.name == "object":
            return self._keeps_object(settings, memory)
        if option.name == "device":
            return self._keeps_device(settings)
        return True

    def _keeps_object(self, settings: Settings, memory: str) -> bool:
        kind, name = settings.get("qom-type") or "", settings.get("id") or ""
        if kind.startswith("memory-backend-"):
            if name != memory:
                self.refusals.append(f"'{name}' is memory besides the main one")
            return False
        if kind == "secret":
            if name != _MASTER_KEY:
                self.refusals.append(f"'{name}' is a secret that libvirt keeps")
            return False
        return True

    def _keeps_device(self, settings: Settings) -> bool:
        driver = settings.get("driver") or ""
        if driver.startswith("qxl"):
            self.refusals.append(
                f"'{driver}' needs SPICE: give it another video device, e.g. <model type='virtio'/>"
            )
        if driver == "usb-redir":
            self.notes.append("SPICE's USB redirection is left out")
            return False
        return True

    def facts(self, words: Sequence[str], memory: str, images_dir: Path) -> AdoptedFacts:
        """Everything that adoption would ask a running QEMU for. Raises UsageError."""
        machine = self.one("machine")
        devices, memory_bytes = self.all("device"), _size(_given(self.one("m"), "size"))
        return AdoptedFacts(
            argv=tuple(words),
            cwd=Path("/"),
            platform=Platform(_given(machine, "type"), self._accel(machine), self._cpu()),
            ram_id=memory,
            memory_bytes=memory_bytes,
            back_ends={memory: memory_bytes},
            version=QemuVersion(0, 0, 0),  # unknown, and of no account for one block
            vcpus=_number(_given(self.one("smp"), "cpus")),
            drives=tuple(self._drives(machine, devices)),
            devices={
                name: driver
                for one in devices
                if (name := one.get("id")) and (driver := one.get("driver"))
            },
            late={},
            slots={},
            modules={},
            networks={},
            labels=frozenset(name for one in self.all("chardev") if (name := one.get("id"))),
            directories=frozenset(),
            huge_pages=frozenset(),
            images_dir=images_dir,
        )

    def _accel(self, machine: Settings) -> str:
        found = [*self.all("accel"), machine]
        return next((accel for one in found if (accel := one.get("accel"))), "tcg")

    def _cpu(self) -> str:
        for option, _ in self.options:
            if option.name == "cpu" and option.value:
                return option.value
        raise _unreadable("it names no CPU")

    def _drives(self, machine: Settings, devices: Iterable[Settings]) -> Iterable[GuestDrive]:
        nodes = {name: one for one in self.all("blockdev") if (name := one.get("node-name"))}
        used = [(one.get("id") or "", one.get("drive")) for one in devices]
        used += [("", machine.get(flash)) for flash in _FLASH]
        return [_drive(owner, node, nodes) for owner, node in used if node]


def _drive(owner: str, node: str, nodes: Mapping[str, Settings]) -> GuestDrive:
    """The drive whose top node is `node`. Raises UsageError."""
    name, image_format, is_read_only = node, "", False
    for _ in range(len(nodes)):
        if (settings := nodes.get(name)) is None:
            break
        driver = settings.get("driver") or ""
        is_read_only = is_read_only or settings.get("read-only") == "on"
        image_format = image_format or (driver if driver in FORMATS else "")
        if (below := settings.get("file")) is None:
            # An image on a network has no file name, and no VM of vmckpt's own has one.
            file = settings.get("filename") or f"{driver} of node '{name}'"
            return GuestDrive("", owner, node, image_format, file, is_read_only, direct=False)
        name = below
    raise _unreadable(f"it has no block node '{name}'")


def _words(option: Option, settings: Settings) -> list[str]:
    if option.value is None:
        return [f"-{option.name}"]
    if option.name == "machine" and isinstance(settings, KeyValues):
        return ["-machine", str(settings.without("memory-backend"))]
    return [f"-{option.name}", option.value]


def _parsed(option: Option) -> Parsed:
    try:
        return option, parse_settings(option.value or "", _IMPLIED.get(option.name))
    except ValueError as exc:
        raise _unreadable(f"'{option.text}': {exc}") from exc


def _given(settings: Settings, key: str) -> str:
    value = settings.get(key)
    if value is None:
        raise _unreadable(f"'{settings}' has no {key}")
    return value


def _number(text: str) -> int:
    if (number := whole_number(text, MOST_INTEGER)) is None:
        raise _unreadable(f"'{text}' is not a number")
    return number


def _size(text: str) -> int:
    found = _SIZE.fullmatch(text)
    if found is None:
        raise _unreadable(f"'{text}' is not a size")
    return int(found[1]) * _UNITS[found[2].lower()]


def _unreadable(why: str) -> UsageError:
    return UsageError(
        "libvirt's command line for the domain cannot be read",
        why=why,
        remedy="see it: virsh domxml-to-native qemu-argv --domain NAME",
    )
