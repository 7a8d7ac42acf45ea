"""Another user of a host tries every file, directory and socket that vmckpt makes there."""

import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.qemu.world import World, image, qemu, world
from vmckpt.lab.guests.labguest import LabGuest

NOBODY = 65534
INTRUDER = Path(__file__).parents[1] / "intruder.py"
# What the kernel shows of a process to its own user and to root alone.
OF_PROCESSES = ("mem", "environ", "maps", "fd", "root", "cwd", "map_files", "pagemap", "stack")
SHARED = (Path("/dev/shm"), Path("/tmp"), Path("/var/tmp"), Path("/run"))


class Intruder:
    """Tries all that it finds for the block; `got` is what it got done, by path."""

    def __init__(self, made: World, process: "subprocess.Popen[str]") -> None:
        self._made, self._process = made, process
        self.tried, self.got = set[str](), dict[str, list[str]]()
        self._before = set(_shared())
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        self._thread.start()
        try:
            yield
        finally:
            self._over.set()
            self._thread.join()

    def _work(self) -> None:
        while not self._over.is_set():
            for path in self._there():
                self._try(str(path))
            time.sleep(0.05)

    def _there(self) -> Iterator[Path]:
        for directory in (self._made.state_dir, *(set(_shared()) - self._before)):
            yield directory
            yield from _below(directory)
        for process in self._made.qemus():
            for name in OF_PROCESSES:
                yield Path(f"/proc/{process.pid}/{name}")

    def _try(self, path: str) -> None:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(f"{path}\n")
        stdin.flush()
        told: dict[str, Any] = json.loads(stdout.readline())
        self.tried.add(path)
        if told["done"]:
            self.got.setdefault(path, []).extend(told["done"])


def _shared() -> list[Path]:
    """What there is in directories that every user may write to."""
    found = []
    for directory in SHARED:
        found += [path for path in directory.iterdir() if "vmckpt" in path.name]
    return found


def _below(directory: Path) -> Iterator[Path]:
    try:
        entries = list(os.scandir(directory))
    except OSError:  # a file, or gone
        return
    for entry in entries:
        yield Path(entry)
        if entry.is_dir(follow_symlinks=False):
            yield from _below(Path(entry))


@contextmanager
def intruder(made: World) -> Iterator[Intruder]:
    with tempfile.TemporaryDirectory(dir="/tmp") as own:
        os.chown(own, NOBODY, NOBODY)
        program = Path(own) / "intruder.py"
        program.write_text(INTRUDER.read_text())
        program.chmod(0o644)
        who = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
        words = [*who, "/usr/bin/python3", "-I", str(program), own]
        process = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/"
        )
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield Intruder(made, process)
        finally:
            process.kill()
            process.communicate()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("version", ["10.0"])
def test_another_user_reads_and_changes_nothing(version: str) -> None:
    guest = LabGuest("guest", 1, image(), memory="160M", disk="32M")
    with world(qemu(version), qemu(version)) as made:
        # Open on purpose: each thing in it has to be closed by itself.
        made.state_dir.chmod(0o755)
        key = made.state_dir / "key"
        location = str(made.state("lab-a") / "sealed")
        sealed = ("--store", location, "--key-file", str(key))
        with intruder(made) as nobody, nobody.at_work():
            key.write_text("of the operator's\n")
            key.chmod(0o600)
            made.run_guest(guest, "lab-a", own_disk=True)
            made.ok("store", "init", location, "--key-file", str(key))
            taken = made.ok("checkpoint", "create", "guest", *sealed)
            made.ok("checkpoint", "create", "guest", "--kind", "file", *sealed)
            made.ok("checkpoint", "restore", taken["id"], "--in-place", *sealed)
            made.ok("schedule", "add", "guest", "--every", "1h", "--keep-last", "2")
            made.ok("schedule", "run-due")
            made.ok("pki", "init")
            for host in ("lab-a", "lab-b"):
                made.ok("pki", "issue", host)
            made.ok("migrate", "guest", "lab-b")
            made.ok("migrate", "guest", "lab-a", "--method", "postcopy")
            made.ok("replicate", "start", "guest", "lab-b")
            time.sleep(1)
            made.ok("replicate", "stop", "guest")
        own = {str(made.state_dir), str(key), str(made.shared / "guest.toml")}
        found = {path: done for path, done in nobody.got.items() if path not in own}
        assert not found, found
        assert nobody.got[str(made.state_dir)]  # it does get what is open
        tried = {Path(path).name for path in nobody.tried}
        for name in ("qmp.sock", "console.sock", "vm.json", "ram", "mem", "migration.json"):
            assert name in tried, name
