"""A QEMU and the guest's image where every user can reach them: the cache is below /root."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.qemu.world import image, qemu


@contextmanager
def reachable(version: str) -> Iterator[tuple[Path, Path]]:
    """A QEMU of that version and the image, for the block; copies that take no room."""
    with tempfile.TemporaryDirectory(prefix="vk-tools-", dir="/tmp") as made:
        directory = Path(made)
        directory.chmod(0o711)
        program = qemu(version)
        root = program.parents[1]
        shutil.copytree(root, directory / "qemu", symlinks=True, copy_function=_copied)
        for script in (directory / "qemu" / "bin").iterdir():
            text = script.read_text().replace(str(root), str(directory / "qemu"))
            script.unlink()  # it is the cache's own otherwise
            script.write_text(text)
            script.chmod(0o755)
        shutil.copytree(image(), directory / "image", copy_function=_copied)
        yield directory / "qemu" / "bin" / program.name, directory / "image"


def _copied(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # on another file system
        shutil.copy2(source, target, follow_symlinks=False)
