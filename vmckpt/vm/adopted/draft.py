"""Collects a destination's command line: what is carried over, noted, refused."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from vmckpt.vm.adopted.facts import AdoptedFacts
from vmckpt.vm.adopted.memory import MemoryLayout
from vmckpt.vm.adopted.options import Option, split_options
from vmckpt.vm.adopted.settings import parse_settings


class NamedImage(NamedTuple):
    """An image as the command line names it; `drive` is its -drive's id, if any.

    `node` is the block node that a device would use; "" if QEMU generated its name.
    """

    file: str
    path: Path
    drive: str | None
    node: str
    fixed_format: bool
    leaf_of_blockdev: bool


@dataclass(slots=True)
class Draft:
    """Grows option by option. `users` counts the devices and ports at each character device.

    `agent` and `console` name those that vmckpt itself uses; `vanished` are the -drives whose
    device was unplugged; `memory`: where that goes.
    """

    facts: AdoptedFacts
    users: Counter[str]
    arguments: list[str] = field(default_factory=list)
    images: list[NamedImage] = field(default_factory=list)
    nics: list[str] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)
    forwards: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    refusals: list[tuple[str, str]] = field(default_factory=list)
    vanished: set[str] = field(default_factory=set)
    chardevs: int = 0
    ports: Counter[str] = field(default_factory=Counter)
    agent: str | None = None
    console: str | None = None
    has_own_memory: bool = False
    memory: MemoryLayout = field(default_factory=lambda: MemoryLayout({}))

    def add(self, name: str, value: object = None) -> None:
        """Add an option for the destination."""
        self.arguments.append(f"-{name}")
        if value is not None:
            self.arguments.append(str(value))

    def refuse(self, what: str, why: str) -> None:
        """Refuse something that cannot be carried over."""
        self.refusals.append((what, why))

    def refuse_option(self, option: Option, why: str) -> None:
        """Refuse an option."""
        self.refuse(f"'{option.text}'", why)

    def path(self, text: str, option: Option) -> Path:
        """A path of the command line, made absolute. Refused if its base directory is unknown."""
        path = Path(text)
        if not path.is_absolute() and (leaves := _leaving(self.facts.argv)):
            self.refuse_option(
                option, f"'{text}' is a relative path, and -{leaves} has changed its directory"
            )
        return self.facts.cwd / path

    def file(self, text: str, option: Option) -> Path:
        """A file that the destination needs too."""
        path = self.path(text, option)
        if str(path) in self.facts.directories:
            self.refuse_option(option, f"{path} is a directory")
        self.files.append(path)
        return path


def _leaving(argv: Sequence[str]) -> str | None:
    """The option by which QEMU left its directory once its files were open, if any.

    os-posix.c, os_setup_post.
    """
    for option in split_options(argv[1:]):
        if option.name in ("daemonize", "chroot"):
            return option.name
        if option.name == "run-with" and parse_settings(option.value or "").get("chroot"):
            return "run-with chroot"
    return None
