"""Placeholders in an adopted VM's command line, which each of its QEMUs fills in."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from vmckpt.units import whole_number
from vmckpt.vm.adopted.escape import escaped
from vmckpt.vm.adopted.settings import parse_settings
from vmckpt.vm.paths import QemuDir

_END_OF_FILES = 1 << 63
MARK = "<vmckpt:"
DIRECTORY, RAM = f"{MARK}dir>", f"{MARK}ram>"


def tap(number: int) -> str:
    """The tap of NIC `number`."""
    return f"{MARK}tap{number}>"


def disk(number: int) -> str:
    """The image of disk `number`."""
    return f"{MARK}disk{number}>"


def fill(
    arguments: Iterable[str], files: QemuDir, ram: Path, disks: Sequence[Path], taps: int
) -> list[str]:
    """The command line of one QEMU."""
    values = {DIRECTORY: str(files.path), RAM: str(ram)}
    values |= {tap(number): files.tap(number) for number in range(taps)}
    values |= {disk(number): str(path) for number, path in enumerate(disks)}
    return [substitute(argument, values) for argument in arguments]


def ram_names(arguments: Iterable[str]) -> tuple[str, ...]:
    """The names of the blocks of the guest's RAM in QEMU, as they are in its file.

    (): it is not where vmckpt puts it.
    """
    found = dict[int, str]()
    for argument in arguments:
        if RAM in argument and argument.startswith("{"):
            settings = parse_settings(argument)
            name = settings.get("id")
            offset = whole_number(settings.get("offset") or "0", _END_OF_FILES)
            if not name or offset is None:
                return ()
            found[offset] = name
    return tuple(name for _, name in sorted(found.items()))


def substitute(argument: str, values: dict[str, str]) -> str:
    """Fill an argument's placeholders, escaped as its syntax requires."""
    for hole, text in values.items():
        argument = argument.replace(hole, escaped(text, argument))
    return argument
