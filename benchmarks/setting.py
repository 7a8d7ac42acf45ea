"""Where benchmarks run: a lab of their own, the guest in it, and the description of the machine.

`VMCKPT_TEST_IMAGE` names the guest image's directory, `VMCKPT_TEST_QEMU_10_0` the QEMU;
`make bench` sets both.
"""

import asyncio
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vmckpt.hosts.host import Host
from vmckpt.hosts.inventory.inventory import find_host
from vmckpt.hosts.local import LocalHost
from vmckpt.lab import lab as labs
from vmckpt.lab.network import CLIENT_ADDRESS

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results"
VMCKPT = Path(sys.executable).parent / "vmckpt"
PYTHON = Path(sys.executable)
_COMMAND_TIMEOUT_S = 120.0
_QUIET_LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class Process:
    """A process from its start to its end, on this machine's clocks."""

    stdout: str
    began_ns: int
    ended_ns: int
    began_unix_s: float

    @property
    def wall_s(self) -> float:
        """How long it took."""
        return (self.ended_ns - self.began_ns) / 1e9

    @property
    def ended_unix_s(self) -> float:
        """When it had ended."""
        return self.began_unix_s + self.wall_s


def image() -> Path:
    """The guest image's directory."""
    return _from_environment("VMCKPT_TEST_IMAGE")


def qemu() -> Path:
    """The QEMU that benchmarks run on."""
    return _from_environment("VMCKPT_TEST_QEMU_10_0")


def _from_environment(name: str) -> Path:
    value = os.environ.get(name)
    if not value:
        raise SystemExit(f"{name} is not set: run benchmarks by `make bench BENCH=...`")
    return Path(value)


@asynccontextmanager
async def lab(hosts: int = 2) -> AsyncIterator[tuple[LocalHost, ...]]:
    """A lab in a state directory of its own for the block; nothing of either is left after it.

    Commands started in the block use it too: VMCKPT_STATE_DIR names it.
    """
    state = Path(tempfile.mkdtemp(prefix="vkb-", dir="/tmp"))
    before = os.environ.get("VMCKPT_STATE_DIR")
    os.environ["VMCKPT_STATE_DIR"] = str(state)
    try:
        made = await labs.up(state, hosts=hosts, qemus=[qemu()])
        found = (find_host(host.name) for host in made.hosts)
        yield tuple(host for host in found if isinstance(host, LocalHost))
    finally:
        await labs.down(state)
        shutil.rmtree(state)
        if before is None:
            del os.environ["VMCKPT_STATE_DIR"]
        else:
            os.environ["VMCKPT_STATE_DIR"] = before


def guest_spec(name: str, number: int, *, memory: str, load: str = "") -> str:
    """A spec (TOML) of the test guest: `number` is its id and the end of its address.

    It beats to the lab's observer. `load` is more of the guest's kernel command line, such as
    `vk.mem=rate=20M,set=256M`.
    """
    cmdline = (
        f"console=ttyS0 quiet panic=-1 cryptomgr.notests vk.ip=10.77.0.{number}/24 vk.id={number} "
        f"vk.heartbeat={CLIENT_ADDRESS}:{labs.HEARTBEAT_PORT} {load}"
    ).strip()
    return f"""\
name = "{name}"
memory = "{memory}"
heartbeat_id = {number}
[boot]
kernel = "{image() / "vmlinuz"}"
initrd = "{image() / "initrd"}"
cmdline = "{cmdline}"
[[nics]]
network = "bridge"
"""


async def run(*argv: str | Path) -> Process:
    """Run a process to its end, timed. One that fails ends the benchmark, its words shown.

    Python may cache bytecode, as it does in an installation, whatever this process's environment
    says: else every command is compiled again each time.
    """
    began_unix_s, began_ns = time.time(), time.monotonic_ns()
    child = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=REPOSITORY,
        env={k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"},
    )
    try:
        async with asyncio.timeout(_COMMAND_TIMEOUT_S):
            stdout, stderr = await child.communicate()
    except BaseException:
        if child.returncode is None:
            child.kill()
            await child.wait()
        raise
    ended_ns = time.monotonic_ns()
    if child.returncode:
        words = f"{stdout.decode()}{stderr.decode()}"
        raise SystemExit(f"{argv} exited with {child.returncode}: {words}")
    return Process(stdout.decode(), began_ns, ended_ns, began_unix_s)


async def heard(host: Host, guest: int, since_ns: int, until_ns: int) -> dict[str, Any]:
    """What the lab's observer heard of a guest between two instants (see vmckpt.lab.heartbeats)."""
    reader, writer = await asyncio.open_unix_connection(str(host.heartbeats))
    request = {"id": guest, "since_ns": since_ns, "until_ns": until_ns}
    writer.write(json.dumps(request).encode() + b"\n")
    reply: dict[str, Any] = json.loads(await reader.readline())
    writer.close()
    return reply


async def await_beats(host: Host, guest: int, timeout_s: float = 60.0) -> None:
    """Return when the guest has booted: its heartbeats arrive at more than half their rate."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        now_ns = time.monotonic_ns()
        if (await heard(host, guest, now_ns - 10**9, now_ns))["received"] > 500:
            return
        await asyncio.sleep(0.1)
    raise SystemExit(f"guest {guest} does not beat within {timeout_s:g} s")


async def busy_percent(during_s: float, but: Sequence[int] = ()) -> float:
    """How much of the machine's processors is in use, looked at for `during_s`.

    What the processes `but` use does not count.
    """
    before = (*_processor_ticks(), processor_s(but))
    await asyncio.sleep(during_s)
    after = (*_processor_ticks(), processor_s(but))
    idle, total, own_s = (now - then for now, then in zip(after, before, strict=True))
    own = own_s * os.sysconf("SC_CLK_TCK")
    return max(100.0 * (1.0 - (idle + own) / total), 0.0)


async def await_quiet(below_percent: float, patience_s: float, but: Sequence[int] = ()) -> float:
    """Return when less of the machine is in use, or patience has ended; how much is, in percent.

    What else runs here disturbs a measurement: it is waited for, and its share goes on record.
    The processes `but` belong to what is measured.
    """
    deadline_s = time.monotonic() + patience_s
    while (busy := await busy_percent(_QUIET_LOOK_S, but)) > below_percent:
        if time.monotonic() > deadline_s:
            break
    return busy


def processor_s(pids: Sequence[int]) -> float:
    """Processor time that these processes have had."""
    stats = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids)
    return sum(int(words[11]) + int(words[12]) for words in stats) / os.sysconf("SC_CLK_TCK")


def _processor_ticks() -> tuple[int, int]:
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)


def machine() -> dict[str, Any]:
    """The machine and the versions a result holds for."""
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    memory_kib = int(Path("/proc/meminfo").read_text().split()[1])
    return {
        "processor": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "memory_bytes": memory_kib * 1024,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "qemu": _first_line([str(qemu()), "--version"]),
        "qemu.qmp": importlib.metadata.version("qemu.qmp"),
        "vmckpt": importlib.metadata.version("vmckpt"),
        "commit": _first_line(["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty"]),
    }


def _first_line(argv: list[str]) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return (done.stdout.splitlines() or ["unknown"])[0]


def write_result(name: str, content: Mapping[str, Any]) -> Path:
    """Write results/NAME.json; returns its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"benchmark": name, **content}, indent=1) + "\n")
    return path
