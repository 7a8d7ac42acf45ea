"""The guard as a command line; `guard.py` itself imports nothing of vmckpt's."""

import sys
from collections.abc import Sequence
from pathlib import Path

from vmckpt.epoch import guard
from vmckpt.vm.start import Qemu


def guard_command(qemu: Qemu, holds: Sequence[str] = ()) -> list[str]:
    """The command line of the guard of a QEMU; nothing else has it.

    `holds` are objects that hold the guest's output for who takes epochs, and go with him.
    """
    program, rescue = str(Path(guard.__file__)), str(qemu.files.rescue)
    return [sys.executable, "-I", "-S", program, rescue, str(qemu.process.pid), *holds]
