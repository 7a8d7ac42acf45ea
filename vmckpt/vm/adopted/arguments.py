"""Find options in an adopted machine's arguments, which are read again later. Pure."""

from collections.abc import Iterator, Sequence

from vmckpt.vm.adopted.options import WITH_VALUE
from vmckpt.vm.adopted.settings import Settings, parse_settings

# The key of a first value that has none.
IMPLIED = {
    "blockdev": "driver",
    "chardev": "backend",
    "device": "driver",
    "machine": "type",
    "net": "type",
    "netdev": "type",
    "nic": "type",
    "object": "qom-type",
}


def options(arguments: Sequence[str]) -> Iterator[tuple[str, int]]:
    """The options that have a value, without dashes, and where in `arguments` the value is."""
    at = 0
    while at < len(arguments):
        name = arguments[at].lstrip("-")
        has_value = name in WITH_VALUE and at + 1 < len(arguments)
        if has_value:
            yield name, at + 1
        at += 2 if has_value else 1


def values(arguments: Sequence[str], *names: str) -> Iterator[tuple[int, str, Settings]]:
    """The values of options of these names: where each is, the option's name, the value."""
    for name, at in options(arguments):
        if name in names:
            yield at, name, parse_settings(arguments[at], IMPLIED.get(name))
