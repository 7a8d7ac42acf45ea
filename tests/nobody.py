"""vmckpt as a user without rights, wherever its interpreter stands."""

from pathlib import Path

# It may read all, since Python may stand in a home that only root enters, and write nothing.
_NOBODY = (
    "setpriv --reuid=nobody --regid=nogroup --clear-groups "
    "--inh-caps=+dac_read_search --ambient-caps=+dac_read_search"
)


def as_nobody(wrapper: Path, command: Path | str) -> str:
    """Write a program that runs `command` so; its path."""
    wrapper.write_text(f'#!/bin/sh\nexec {_NOBODY} {command} "$@"\n')
    wrapper.chmod(0o755)
    return str(wrapper)
