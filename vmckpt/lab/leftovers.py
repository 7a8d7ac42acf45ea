"""Guest RAM files that killed QEMUs of a lab leave outside of the lab's directory."""

import contextlib
import shutil
from pathlib import Path

from vmckpt.errors import UsageError
from vmckpt.lab.state import HOST_PREFIX
from vmckpt.vm.paths import QemuDir, vm_dir, vms_dir
from vmckpt.vm.spec.spec import parse_spec

_USUAL_RAM_DIR = Path("/dev/shm")


def remove_ram_files(directory: Path) -> int:
    """Remove the RAM files of all QEMUs that ran in the lab in `directory`; return their number.

    The QEMUs have ended. For an unreadable spec the usual RAM directory is assumed.
    """
    count = 0
    for host in directory.glob(f"{HOST_PREFIX}*"):
        for run in vms_dir(host).glob("*/qemu-*"):
            files = QemuDir(run, run.parent.name, run.name.removeprefix("qemu-"))
            for ram_dir in {_USUAL_RAM_DIR, *_named_ram_dirs(directory, files.vm_name)}:
                for one in (files, files._replace(is_loose=True)):
                    with contextlib.suppress(FileNotFoundError, PermissionError):
                        one.ram(ram_dir).unlink()
                        count += 1
                shutil.rmtree(files.memory(ram_dir), ignore_errors=True)
    return count


def _named_ram_dirs(directory: Path, vm_name: str) -> set[Path]:
    """The directory where the VM's spec, on whichever host it is, puts its RAM."""
    found = set()
    for host in directory.glob(f"{HOST_PREFIX}*"):
        spec = vm_dir(host, vm_name).spec
        with contextlib.suppress(OSError, UsageError):
            found.add(parse_spec(spec.read_text(), str(spec), spec.parent).ram_dir)
    return found
