"""Migrations between two hosts over SSH: they do the work, whatever becomes of the operator."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.proxy import Proxy
from tests.qemu.world import COMMAND, COMMAND_TIMEOUT_S, Done, image, kill, qemu
from tests.sshd import Sshd, sshd
from tests.waiting import eventually
from vmckpt.hosts.processes import process
from vmckpt.hosts.processes.process import ProcessId, find_by_argument
from vmckpt.lab.guests.labguest import LabGuest
from vmckpt.migrate.outcome.journal import STEPS
from vmckpt.vm.paths import QEMU_PREFIX, VmDir

STALL_S = 20.0
# Long enough to be met in the middle of sending memory.
SLOW = ["--tls", "psk", "--bandwidth", "20MB"]
# Not done before whatever is to end it has ended it.
ENDLESS = ["--tls", "psk", "--bandwidth", "2MB"]


@dataclass(frozen=True, slots=True)
class SshWorld:
    """Hosts a and b, with state directories of their own, and an operator who has SSH alone."""

    directory: Path
    server: Sshd
    proxy: Proxy

    @property
    def operator(self) -> Path:
        return self.directory / "op"

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {"VMCKPT_STATE_DIR": str(self.operator)}

    def begin(self, *words: str) -> subprocess.Popen[str]:
        argv = [*COMMAND, *words, "--json"]
        pipe = subprocess.PIPE
        return subprocess.Popen(argv, env=self.environment, stdout=pipe, stderr=pipe, text=True)

    @staticmethod
    def done(running: subprocess.Popen[str]) -> Done:
        stdout, stderr = running.communicate(timeout=COMMAND_TIMEOUT_S)
        assert "Traceback" not in stderr, stderr
        return Done(running.returncode, json.loads(stdout) if stdout else {}, stderr)

    def vmckpt(self, *words: str) -> Done:
        return self.done(self.begin(*words))

    def ok(self, *words: str) -> dict[str, Any]:
        done = self.vmckpt(*words)
        assert done.code == 0, f"{words}: {done.stderr}"
        return done.result

    def processes(self, mark: str) -> list[ProcessId]:
        return [one for one in find_by_argument(mark) if self._is_ours(one)]

    def _is_ours(self, which: ProcessId) -> bool:
        try:
            text = Path(f"/proc/{which.pid}/environ").read_bytes()
            text += Path(f"/proc/{which.pid}/cmdline").read_bytes()
        except OSError:
            return False
        return str(self.directory).encode() in text

    def qemus(self) -> list[ProcessId]:
        return self.processes("-pidfile")

    def jobs(self) -> list[ProcessId]:
        return [one for one in self.processes("\0job\0") if one not in self.processes("xargs")]

    def run(self) -> str:
        """The run that is under way."""
        [request] = [path for path in self.directory.glob("[ab]/jobs/migrate/*/order.json")
                     if not path.with_name("outcome.json").exists()]  # fmt: skip
        return request.parent.name

    def links(self) -> list[str]:
        """What listeners have left on the hosts."""
        return [str(path) for path in self.directory.glob("[ab]/jobs/migrate/*/link*")]


@dataclass(frozen=True, slots=True)
class Way:
    """Where the guest is, and where it is to go."""

    made: SshWorld
    source: str
    target: str

    def begin(self, *more: str) -> subprocess.Popen[str]:
        return self.made.begin("migrate", "mover", self.target, *(more or SLOW))

    def step(self) -> str | None:
        path = self.made.directory / self.source / "vms/mover/migration.json"
        try:
            return str(json.loads(path.read_text())["step"])
        except (FileNotFoundError, ValueError):
            return None

    def until(self, step: str) -> None:
        """The journal has come to `step`, or past it."""
        eventually(lambda: (found := self.step()) and STEPS.index(found) >= STEPS.index(step),
                   60, f"step {step}")  # fmt: skip

    def ends_at(self, host: str) -> None:
        """The guest runs there and nowhere else, and nothing else is left."""
        shown = self.made.ok("vm", "show", "mover")
        found = (shown["host"], shown["state"], shown["migration_cut_off"])
        assert found == (host, "running", False)
        assert len(self.made.qemus()) == 1
        eventually(lambda: not self.made.processes("\0link\0"), 20, "the listener ends")
        assert self.made.links() == []


@contextmanager
def ssh_world() -> Iterator[SshWorld]:
    directory = Path(tempfile.mkdtemp(prefix="vk-", dir="/tmp"))
    try:
        with sshd(directory / "sshd") as server:
            proxy = Proxy(server.port)
            try:
                yield _set_up(SshWorld(directory, server, proxy))
            finally:
                proxy.close()
    finally:
        for mark in ("\0job\0", "\0link\0", "-pidfile"):
            for left in find_by_argument(mark):
                if SshWorld(directory, server, proxy)._is_ours(left):
                    process.kill(left)
        for qemu_dir in directory.glob("[ab]/vms/*/qemu-*"):
            files = VmDir(qemu_dir.parent).qemu(qemu_dir.name.removeprefix(QEMU_PREFIX))
            shutil.rmtree(files.memory(Path("/dev/shm")), ignore_errors=True)
        shutil.rmtree(directory)


def _set_up(made: SshWorld) -> SshWorld:
    made.server.known_hosts.write_text(made.server.host_line.replace(
        f"[127.0.0.1]:{made.server.port}", "both"))  # fmt: skip
    with made.server.config.open("a") as config:
        config.write("  HostKeyAlias both\n")
    for name in "ab":
        made.ok(
            "host", "add", name, f"ssh://root@127.0.0.1:{made.proxy.port}",
            "--ssh-config", str(made.server.config), "--vmckpt", str(made.server.vmckpt),
            "--state-dir", str(made.directory / name), "--qemu", str(qemu("10.0")),
            "--migration-ports", "49300-49399",
        )  # fmt: skip
    guest = LabGuest("mover", 1, image(), disk=None)
    spec = made.directory / "mover.toml"
    spec.write_text(guest.spec().replace('network = "bridge"', 'network = "user"'))
    made.ok("vm", "run", str(spec), "--host", "a")
    return made


@pytest.fixture(scope="module")
def shared() -> Iterator[SshWorld]:
    with ssh_world() as made:
        yield made


@pytest.fixture
def way(shared: SshWorld) -> Way:
    """From wherever the last test has left the guest."""
    home = shared.ok("vm", "show", "mover")["host"]
    return Way(shared, home, "b" if home == "a" else "a")


def test_a_vm_moves_and_its_record_is_the_operators(way: Way) -> None:
    made = way.made
    moved = made.ok("migrate", "mover", way.target, "--tls", "psk")
    found = (moved["outcome"], moved["source"], moved["target"])
    assert found == ("completed", way.source, way.target)
    assert moved["encryption"] == "psk"
    assert Path(moved["run_record"]).parent == made.operator / "runs"
    shown = made.ok("runs", "show", moved["run"])
    assert shown["result"]["outcome"] == "completed"
    assert shown["samples"]
    way.ends_at(way.target)


def test_the_operators_connection_breaks_and_the_command_comes_back(way: Way) -> None:
    made = way.made
    running = way.begin()
    way.until("transfer")
    before = set(made.server.sessions())
    made.proxy.cut()
    eventually(lambda: set(made.server.sessions()) - before, 20, "the command connects again")
    attached = made.begin("runs", "attach", made.run())
    done, again = made.done(running), made.done(attached)
    assert (done.code, again.code) == (0, 0), done.stderr + again.stderr
    # Both show all of it from the beginning.
    for stderr in (done.stderr, again.stderr):
        assert "starting QEMU on the destination" in stderr
        assert "releasing the source" in stderr
    assert done.result == again.result
    way.ends_at(way.target)


@pytest.mark.long  # tests/real/test_operator.py pulls a real cable every time
@pytest.mark.parametrize("step", STEPS[1:])
def test_the_operators_connection_is_silent_for_20_s(way: Way, step: str) -> None:
    made = way.made
    running = way.begin(*SLOW, *(["--method", "postcopy"] if step == "drain" else []))
    way.until(step)
    made.proxy.stall()
    time.sleep(STALL_S)
    # The hosts have not waited.
    assert way.step() is None
    made.proxy.flow()
    done = made.done(running)
    assert done.code == 0, done.stderr
    assert done.result["outcome"] == "completed"
    assert made.ok("runs", "attach", done.result["run"]) == done.result
    way.ends_at(way.target)


def test_the_operators_command_is_killed_and_another_shows_the_end(way: Way) -> None:
    made = way.made
    running = way.begin()
    way.until("transfer")
    kill(running)
    run = made.run()
    assert made.ok("runs", "list")["runs"][-1]["outcome"] == "running"
    attached = made.ok("runs", "attach", run)
    assert attached["outcome"] == "completed"
    assert made.ok("runs", "list")["runs"][-1]["outcome"] == "completed"
    way.ends_at(way.target)


def test_ctrl_c_cancels_the_job(way: Way) -> None:
    running = way.begin(*ENDLESS)
    way.until("transfer")
    running.send_signal(signal.SIGINT)
    done = way.made.done(running)
    assert done.code == 130, done.stderr
    assert done.error["kind"] == "cancelled"
    way.ends_at(way.source)


def test_a_killed_job_is_undone_by_its_hosts(way: Way) -> None:
    running = way.begin(*ENDLESS)
    way.until("transfer")
    [job] = way.made.jobs()
    assert process.kill(job)
    done = way.made.done(running)
    assert done.code == 7, done.stderr
    assert "undone" in done.error["what"]
    assert "was killed at step 'transfer'" in done.error["why"]
    way.ends_at(way.source)


def cut_off(way: Way, *more: str) -> None:
    """A migration whose job and dead-man's switch are killed in the midst of it."""
    running = way.begin(*ENDLESS, *more)
    way.until("transfer")
    for left in (*way.made.processes("--recover"), *way.made.jobs()):
        assert process.kill(left)
    done = way.made.done(running)
    assert done.code == 9, done.stderr
    assert "dead-man's switch" in done.error["why"]
    # Its listener would wait ten minutes for a recovery by the source.
    for listener in way.made.processes("\0link\0"):
        process.kill(listener)
    for path in way.made.links():
        Path(path).unlink()


def test_a_job_killed_with_its_switch_is_undone_by_the_operator(way: Way) -> None:
    cut_off(way)
    recovered = way.made.ok("migrate", "--recover", "mover")
    assert (recovered["step"], recovered["host"]) == ("transfer", way.source)
    way.ends_at(way.source)


@contextmanager
def unreachable(made: SshWorld, host: str) -> Iterator[None]:
    """Nothing answers where the inventory has the host."""
    path = made.operator / f"hosts/{host}.json"
    entry = path.read_text()
    assert str(made.proxy.port) in entry
    path.write_text(entry.replace(str(made.proxy.port), "1"))
    try:
        yield
    finally:
        path.write_text(entry)


@pytest.mark.parametrize("method", ["precopy", "stop"])
def test_a_target_that_is_down_keeps_nobody_from_the_vm(way: Way, method: str) -> None:
    made = way.made
    # One that is paused dirties nothing: at such a speed it takes minutes all the same.
    cut_off(way, "--method", method, "--bandwidth", "200KB")
    with unreachable(made, way.target):
        assert made.ok("migrate", "--recover", "mover")["host"] == way.source
        shown = made.ok("vm", "show", "mover")
        found = (shown["host"], shown["state"], shown["migration_cut_off"])
        assert found == (way.source, "running", False)
        assert (made.directory / way.target / "vms/mover/migration.json").exists()
    way.ends_at(way.source)
    assert [*made.directory.glob("[ab]/left/*")] == []
    assert not (made.directory / way.target / "vms/mover").exists()


def test_a_target_that_cannot_listen_is_told(way: Way) -> None:
    path = way.made.operator / f"hosts/{way.target}.json"
    entry = path.read_text()
    path.write_text(json.dumps(json.loads(entry) | {"migration_address": "192.0.2.1"}))
    try:
        done = way.made.vmckpt("migrate", "mover", way.target, "--tls", "psk")
        assert done.code == 7
        assert f"{way.target} does not listen at 192.0.2.1" in done.error["what"]
    finally:
        path.write_text(entry)
    way.ends_at(way.source)


def test_a_refusal_of_the_job_is_the_commands(way: Way) -> None:
    done = way.made.vmckpt("migrate", "mover", way.target, "--tls", "require")
    assert done.code == 4
    assert f"vmckpt pki issue {way.source} {way.target}" in done.error["remedy"]
    way.ends_at(way.source)
