"""A lab with real QEMUs for tests, and the command line as people and programs use it."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes import process as processes
from vmckpt.hosts.processes.process import ProcessId, find_by_argument
from vmckpt.lab import lab as labs
from vmckpt.lab.guests.guest import GuestControl, KvClient
from vmckpt.lab.guests.labguest import LabGuest
from vmckpt.lab.state import Lab
from vmckpt.qemu import commands
from vmckpt.qemu.monitor import session
from vmckpt.vm.inventory import read_vm

COMMAND = [sys.executable, "-m", "vmckpt.cli.entry"]
COMMAND_TIMEOUT_S = 90


def image() -> Path:
    return Path(os.environ["VMCKPT_TEST_IMAGE"])


def qemu(version: str) -> Path:
    return Path(os.environ[f"VMCKPT_TEST_QEMU_{version.replace('.', '_')}"])


def spoilable(version: str, directory: Path) -> Path:
    """A QEMU in `directory` whose monitor obeys what `World.spoil` says (see relay.py)."""
    wrapper, real = directory / "qemu-system-x86_64", qemu(version)
    (directory / "qemu-img").symlink_to(real.parent / "qemu-img")
    rules, relay = directory / "rules.json", Path(__file__).with_name("relay.py")
    words = f"VK_RULES={rules} VK_QEMU={real} exec {sys.executable} -I -S {relay}"
    wrapper.write_text(f'#!/bin/sh\n{words} "$@"\n')
    wrapper.chmod(0o755)
    return wrapper


@dataclass(frozen=True, slots=True)
class Said:
    """How a command on a host ended."""

    code: int
    stdout: str
    stderr: str


def run_here(argv: list[str]) -> Said:
    """Run a command on this machine to its end."""
    done = subprocess.run(
        argv,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        check=False,
    )
    return Said(done.returncode, done.stdout, done.stderr)


@dataclass(frozen=True, slots=True)
class Done:
    """How a command ended; `result` is its one JSON object."""

    code: int
    result: dict[str, Any]
    stderr: str

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.result["error"]
        assert "Traceback" not in self.stderr
        assert error["what"]
        assert error["why"]
        assert error["remedy"]
        return error


@dataclass(frozen=True, slots=True)
class World:
    """A state directory with a lab in it."""

    state_dir: Path
    lab: Lab

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {"VMCKPT_STATE_DIR": str(self.state_dir)}

    def vmckpt(self, *words: str) -> Done:
        """Run a command to its end."""
        done = subprocess.run(
            [*COMMAND, *words, "--json"],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
        assert "Traceback" not in done.stderr, done.stderr
        result = json.loads(done.stdout) if done.stdout else {}
        return Done(done.returncode, result, done.stderr)

    def ok(self, *words: str) -> dict[str, Any]:
        """Run a command that must succeed."""
        done = self.vmckpt(*words)
        assert done.code == 0, f"{words}: {done.stderr}"
        return done.result

    def begin(self, *words: str) -> subprocess.Popen[str]:
        """Start a command and leave it running."""
        return subprocess.Popen(
            [*COMMAND, *words, "--json"],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    @property
    def shared(self) -> Path:
        """A folder that all hosts have, at the same path as here."""
        return self.state_dir

    def here(self, host: str, path: Path) -> Path:
        """What is at `path` on a host, as a path of this machine's."""
        return path

    def state(self, host: str) -> Path:
        """A host's state directory, as a path of this machine's."""
        return self.here(host, self.lab.host(host).state_dir)

    def asked(self, host: str) -> LocalHost:
        """A host, for questions from inside this process."""
        return LocalHost(host, self.state(host), self.lab.host(host).migration_address)

    async def migration_settings(
        self, host: str, name: str
    ) -> tuple[dict[str, bool], dict[str, Any]]:
        """The capabilities and parameters of migration that the VM's QEMU there has."""
        vm = await read_vm(self.asked(host), name)
        assert vm is not None
        async with session(await vm.host.connect(vm.qemu.files.onlooker), name) as monitor:
            capabilities = await commands.query_migrate_capabilities(monitor)
            return capabilities, await commands.query_migrate_parameters(monitor)

    def inside(self, host: str, *argv: str) -> Said:
        """Run a command with a host's own view of files, as its root."""
        return run_here(list(argv))

    def run_guest(
        self, guest: LabGuest, host: str, *, own_disk: bool = False, more: str = ""
    ) -> dict[str, Any]:
        """Run a guest whose disk is in the shared folder or the host's own; `more` of its spec."""
        text = guest.spec() + more
        if own_disk:
            text = text.replace(f'path = "{guest.name}.', f'image = "{guest.name}.')
        spec = self.shared / f"{guest.name}.toml"
        spec.write_text(text)
        return self.ok("vm", "run", str(spec), "--host", host)

    def qemus(self, name: str | None = None) -> list[ProcessId]:
        """QEMU processes of a VM of this world, of all without a name."""
        mark = f"-name\0{name},process=" if name else f"-pidfile\0{self.state_dir}"
        ours = find_by_argument(f"-pidfile\0{self.state_dir}")
        return [process for process in find_by_argument(mark) if process in ours]

    def pids(self, name: str) -> list[int]:
        """The pids of a VM's QEMUs, as their hosts number them."""
        return [process.pid for process in self.qemus(name)]

    def jobs(self) -> list[ProcessId]:
        """Processes on hosts that do a migration for a command here."""
        return []

    def kill(self, command: "subprocess.Popen[str]") -> None:
        """SIGKILL a command, and what does its work elsewhere."""
        kill(command)
        send(signal.SIGKILL, self.jobs())

    @contextmanager
    def spoilt(self, host: str, rule: dict[str, str] | None) -> Iterator[None]:
        """For the block: what the monitors of a `spoilable` QEMU do once; see relay.py."""
        rules = self.shared / "rules.json"
        told = self.lab.host(host).qemu.with_name(rules.name)
        if not told.is_symlink():
            told.symlink_to(rules)
        if rule:
            rules.write_text(json.dumps(rule))
        try:
            yield
        finally:
            rules.unlink(missing_ok=True)

    @contextmanager
    def small(self, host: str, directory: str, size_bytes: int) -> Iterator[None]:
        """For the block: a file system of so many bytes at a directory of a host's state."""
        path = str(self.lab.host(host).state_dir / directory)
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=0700", "small", path]
        mounted = self.inside(host, *mount)
        assert mounted.code == 0, mounted.stderr
        try:
            yield
        finally:
            self.inside(host, "umount", path)

    def files(self, host: str) -> list[str]:
        """What a host has of any VM."""
        root = self.state(host)
        found = [path for part in ("vms", "locks") for path in (root / part).rglob("*")]
        return sorted(str(path.relative_to(root)) for path in found)


@contextmanager
def world(*qemus: Path) -> Iterator[World]:
    """A lab whose i-th host has the i-th QEMU; nothing stays of it, or of VMs on this machine."""
    state_dir = Path(tempfile.mkdtemp(prefix="vk-", dir="/tmp"))
    try:
        made = World(state_dir, asyncio.run(labs.up(state_dir, hosts=len(qemus), qemus=qemus)))
        yield made
    finally:
        try:
            show_evidence(state_dir, "lab/*/vms/*/qemu-*/*.log")
        finally:
            asyncio.run(labs.down(state_dir))
            # A failed test's VMs on this machine itself, which is no host of the lab.
            for left in find_by_argument(f"{state_dir}/vms/"):
                processes.kill(left)
            shutil.rmtree(state_dir)


@asynccontextmanager
async def loaded(world: World, guest: LabGuest) -> AsyncIterator[GuestControl]:
    """The guest computes, writes and answers for the block; then it must have lost nothing."""
    control = await guest.control(world.lab)
    client = await guest.key_value(world.lab)
    await control.load_memory("rate=20M set=64M pattern=uniform content=random")
    await control.load_disk("rate=2M size=32M")
    asking = asyncio.ensure_future(_keep_asking(client))
    try:
        yield control
        asking.cancel()
        answers = await asking
        assert answers > 0
        memory, disk = await control.verify_memory(), await control.verify_disk()
        assert memory.sound, memory
        assert disk.sound, disk
        assert disk.records > 0
    finally:
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.wait({asking})
        await client.close()
        await control.close()


async def _keep_asking(client: KvClient) -> int:
    """Answers checked over one connection until cancelled; raises when one is lost or wrong."""
    answers, key = 0, f"count{time.monotonic_ns()}"
    with suppress(asyncio.CancelledError):
        while True:
            asking = asyncio.ensure_future(client.incr(key))
            try:
                count = await asyncio.shield(asking)
            except asyncio.CancelledError:
                count = await asking
                answers += 1
                assert count == answers
                raise
            answers += 1
            assert count == answers
            await asyncio.sleep(0.01)
    return answers


async def reach(
    made: World, step: str, command: "subprocess.Popen[str]", home: str, name: str
) -> None:
    """Return when a migration from `home` has begun `step`, or has ended."""
    directory = made.state(home) / "vms" / name
    file, mark = directory / "migration.json", f'"step": "{step}"'
    if step == "switchover":
        # It is too short for the journal: the source stops its guest for it.
        (file,), mark = directory.glob("qemu-*/stderr.log"), "vm_state_notify running 0"
    marks = read(file).count(mark)
    while command.poll() is None and read(file).count(mark) == marks:  # noqa: ASYNC110
        await asyncio.sleep(0.0005)


def read(path: Path) -> str:
    """What a file holds; nothing when there is none."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def fill(path: Path) -> None:
    """Write until there is no room."""
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(1 << 20)):
            pass


def send(number: signal.Signals, processes: Iterable[ProcessId]) -> None:
    """Send a signal to processes; those that have ended by themselves get none."""
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process.pid, number)


def kill(process: subprocess.Popen[str]) -> None:
    """SIGKILL and collect it."""
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=10)


def show_evidence(state_dir: Path, *patterns: str) -> None:
    """What guests and QEMUs said last, printed: pytest shows it when the test failed."""
    for log in sorted(log for pattern in patterns for log in state_dir.glob(pattern)):
        print(f"--- {log.relative_to(state_dir)}")
        print("\n".join(log.read_text(errors="replace").splitlines()[-40:]))
