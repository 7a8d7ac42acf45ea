"""A local user without rights who tries whatever is there: a program, for /usr/bin/python3.

    intruder.py DIRECTORY

Each line that comes is a path. What it gets done with one is told as a line of JSON. DIRECTORY is
its own, where it keeps links. It changes nothing that it could change: the attempt is enough.
"""

import json
import os
import socket
import stat
import sys
from pathlib import Path

OWN = Path(sys.argv[1])


def read(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            os.listdir(fd)
        elif not os.read(fd, 1) and path.is_relative_to("/proc"):
            raise OSError("a process that has ended: its maps open for every user, and are empty")
    finally:
        os.close(fd)


def write(path: Path) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_APPEND))


def connect(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(1)
        sock.connect(str(path))


def create(path: Path) -> None:
    name = path / "intruder"
    os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    name.unlink()


def rename(path: Path) -> None:
    taken = path.with_name(f"{path.name}.taken")
    path.rename(taken)
    taken.rename(path)


def keep(path: Path) -> None:
    # A second name for a file outlives its own, and is read when its mode is ever changed.
    name = OWN / "kept"
    os.link(path, name, follow_symlinks=False)
    name.unlink()


def follow(path: Path) -> None:
    path.readlink()


TRIED = [read, write, connect, create, rename, keep, follow]

print("ready", flush=True)
for line in sys.stdin:
    path = Path(line.rstrip("\n"))
    done = []
    for attempt in TRIED:
        try:
            attempt(path)
            done.append(attempt.__name__)
        except (OSError, ValueError):
            continue
    print(json.dumps({"path": str(path), "done": done}), flush=True)
