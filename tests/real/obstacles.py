"""What tests put in a migration's way: other keys, other files, full disks."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.qemu.world import fill
from tests.real.machines import Machines

HOSTS = ("lab-a", "lab-b")


@contextmanager
def replaced(path: Path, text: str) -> Iterator[None]:
    """Another text in a file for the block."""
    before = path.read_text()
    path.write_text(text)
    try:
        yield
    finally:
        path.write_text(before)


def known_hosts(made: Machines) -> tuple[Path, list[str]]:
    path = made.lab.directory / "ssh/known_hosts"
    return path, path.read_text().splitlines()


@contextmanager
def another_key(made: Machines, host: str) -> Iterator[None]:
    """For the block one host's key is not the known one, but another host's."""
    path, lines = known_hosts(made)
    keys = [line.split(maxsplit=1) for line in lines]
    swapped = [f"{keys[0][0]} {keys[1][1]}", f"{keys[1][0]} {keys[0][1]}"]
    lines[HOSTS.index(host)] = swapped[HOSTS.index(host)]
    with replaced(path, "\n".join(lines) + "\n"):
        yield


@contextmanager
def full(directory: Path) -> Iterator[None]:
    """No room on a file system for the block, whatever is given back meanwhile."""
    filler, over = directory / "filler", threading.Event()

    def fill_up() -> None:
        with filler.open("ab", buffering=0) as file:
            while not over.wait(0.002):
                with suppress(OSError):
                    file.write(bytes(4096))

    fill(filler)
    filling = threading.Thread(target=fill_up)
    filling.start()
    try:
        yield
    finally:
        over.set()
        filling.join()
        filler.unlink()
