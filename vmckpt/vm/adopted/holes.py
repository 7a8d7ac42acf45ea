"""Placeholders in an adopted VM's command line, which each of its QEMUs fills in."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from vmckpt.vm.adopted.escape import escaped
from vmckpt.vm.adopted.settings import parse_settings
from vmckpt.vm.paths import QemuDir

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
            name, offset = settings.get("id"), settings.get("offset") or "0"
            if not name or not offset.isdecimal():
                return ()
            found[int(offset)] = name
    return tuple(name for _, name in sorted(found.items()))


def substitute(argument: str, values: dict[str, str]) -> str:
    """Fill an argument's placeholders, escaped as its syntax requires."""
    for hole, text in values.items():
        argument = argument.replace(hole, escaped(text, argument))
    return argument
