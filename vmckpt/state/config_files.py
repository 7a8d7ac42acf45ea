"""Configuration of the operator: its files, and the names of its variables.

`cli/tree/defaults.py` reads them; anything may ask whether there are any.
"""

import os
from collections.abc import Sequence
from pathlib import Path

SYSTEM_FILE = Path("/etc/vmckpt/config.toml")


def files() -> list[Path]:
    """Configuration files, whether they are there or not: a later one replaces an earlier one."""
    found = [SYSTEM_FILE]
    if given := os.environ.get("XDG_CONFIG_HOME"):
        found.append(Path(given) / "vmckpt/config.toml")
    elif home := os.environ.get("HOME"):
        found.append(Path(home) / ".config/vmckpt/config.toml")
    return found


def are_there(word: str) -> bool:
    """Whether the command `word` may have defaults."""
    prefix = variable((word, ""))
    return any(map(os.path.exists, files())) or any(name.startswith(prefix) for name in os.environ)


def variable(words: Sequence[str]) -> str:
    """The variable with the default of an option: the command's words, and the option's name."""
    return "_".join(("VMCKPT", *words)).upper().replace("-", "_")
