"""Fencing agents, run as they are: what proves that a primary is dead, and what does not."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vmckpt.errors import OperationFailedError, TimedOutError
from vmckpt.hosts.processes.process import identify
from vmckpt.lease.rule import Holding
from vmckpt.replicate.fencing.agent import Agent, Target, this_machine
from vmckpt.replicate.wire.messages import Process

BY_KILL = (sys.executable, "-m", "vmckpt.replicate.fencing.by_kill")
BY_IPMI = Path(__file__).parents[2] / "ansible/examples/fence-by-ipmi"
HOLDING = Holding(3, "lab-a/1")


@pytest.fixture
def victim() -> "Iterator[subprocess.Popen[bytes]]":
    child = subprocess.Popen(["sleep", "60"])
    yield child
    child.kill()
    child.wait()


def target(*pids: int, machine: str = "") -> Target:
    processes = []
    for pid in pids:
        process = identify(pid)
        assert process is not None
        processes.append(Process(process.pid, process.start_ticks))
    return Target("web", HOLDING, "lab-a", machine or this_machine(), processes)


def test_a_primary_that_was_killed_is_proved_dead(victim: "subprocess.Popen[bytes]") -> None:
    # It is stopped, as a primary that fell silent may be, and stays a zombie: we do not reap it.
    victim.send_signal(signal.SIGSTOP)
    whom = target(victim.pid)
    proof = asyncio.run(Agent(BY_KILL).fence(whom))
    assert proof.holding == HOLDING
    assert proof.evidence == f"gone: {victim.pid}"
    assert victim.wait() == -signal.SIGKILL
    # Fencing what is dead is fine.
    assert asyncio.run(Agent(BY_KILL).fence(whom)).evidence == f"gone: {victim.pid}"


def test_an_agent_that_cannot_be_told_whom_to_fence_proves_nothing() -> None:
    """What the arbiter's record holds: the standby's service ended for it, in its takeover."""
    whom = Target("web", Holding(3, "lab-a\0/1"), "lab-a", "-", [Process(2, 1)])
    with pytest.raises(OperationFailedError, match="failed to fence"):
        asyncio.run(Agent(BY_KILL).fence(whom))


NAMES_ITSELF = """\
import ctypes, sys, time
ctypes.CDLL(None).prctl(15, bytes.fromhex(sys.argv[1]))
print(flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("name", [b"a\n1 (x) S 1 2", b"\xff) Z 1\x0c", b")\n"])
def test_a_primary_is_proved_dead_whatever_it_is_called(name: bytes) -> None:
    """A guest that has broken out of its QEMU kept its host from being fenced."""
    argv = [sys.executable, "-I", "-S", "-c", NAMES_ITSELF, name.hex()]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"\n"
        try:
            whom = target(child.pid)
            assert asyncio.run(Agent(BY_KILL).check(whom)).endswith(" 1 run")
            assert asyncio.run(Agent(BY_KILL).fence(whom)).evidence == f"gone: {child.pid}"
        finally:
            child.kill()
    assert child.returncode == -signal.SIGKILL


def test_a_check_kills_nobody(victim: "subprocess.Popen[bytes]") -> None:
    said = asyncio.run(Agent(BY_KILL).check(target(victim.pid)))
    assert said == "reached the host; of its processes 1 run"
    assert victim.poll() is None


def test_another_process_that_got_the_pid_is_left_alone(
    victim: "subprocess.Popen[bytes]",
) -> None:
    process = identify(victim.pid)
    assert process is not None
    earlier = Process(process.pid, process.start_ticks - 1)
    whom = Target("web", HOLDING, "lab-a", this_machine(), [earlier])
    asyncio.run(Agent(BY_KILL).fence(whom))
    time.sleep(0.05)
    assert victim.poll() is None


@pytest.mark.parametrize(
    ("transport", "words"),
    [
        (("/nonexistent/ssh", "lab-a"), "does not start"),
        (("false",), "leads to no answer"),
        # A transport whose far side has no /proc, or shows nothing of it.
        (("chroot", "/var/empty-for-fencing"), "leads to no answer"),
        (("echo", "pid:[1]"), "leads to"),
    ],
)
def test_a_transport_that_does_not_show_the_host_proves_nothing(
    transport: tuple[str, ...], words: str, victim: "subprocess.Popen[bytes]"
) -> None:
    with pytest.raises(OperationFailedError, match=words):
        asyncio.run(Agent((*BY_KILL, *transport)).fence(target(victim.pid)))
    assert victim.poll() is None


def test_what_is_no_process_proves_nothing(
    tmp_path: Path, victim: "subprocess.Popen[bytes]"
) -> None:
    """What the transport shows of a process is cut off."""
    transport = tmp_path / "transport"
    transport.write_text('#!/bin/sh\n[ "$1" = cat ] || exec "$@"\n"$@" | cut -c-60\n')
    transport.chmod(0o755)
    with pytest.raises(OperationFailedError, match="is not a process"):
        asyncio.run(Agent((*BY_KILL, str(transport))).fence(target(victim.pid)))
    assert victim.poll() is None


def test_another_host_is_not_taken_for_the_primarys(victim: "subprocess.Popen[bytes]") -> None:
    boot_id, namespace = this_machine().split()
    for machine in (f"{boot_id} pid:[1]", f"{'0' * 36} {namespace}"):
        with pytest.raises(OperationFailedError, match=f"the primary was on {machine[:36]}"):
            asyncio.run(Agent(BY_KILL).fence(target(victim.pid, machine=machine)))
    assert victim.poll() is None


def test_no_processes_are_no_proof() -> None:
    with pytest.raises(OperationFailedError, match="names no processes"):
        asyncio.run(Agent(BY_KILL).fence(target()))


AGENT = """\
#!{python}
import os, subprocess, sys, time
{does}
"""


def agent(folder: Path, does: str, timeout_s: float = 20.0) -> Agent:
    path = folder / "agent"
    path.write_text(AGENT.format(python=sys.executable, does=does))
    path.chmod(0o755)
    return Agent((str(path), "its own"), timeout_s)


def test_an_agent_is_told_whom_to_fence(tmp_path: Path) -> None:
    does = "print(sys.argv[1:], sorted(i for i in os.environ.items() if 'VMCKPT_FENCE' in i[0]))"
    whom = Target("web", HOLDING, "lab-a", "b1 pid:[1]", [Process(7, 99), Process(8, 100)])
    proof = asyncio.run(agent(tmp_path, does).fence(whom))
    assert proof.evidence == str(["its own", "fence"]) + " " + str(
        [
            ("VMCKPT_FENCE_HOLDER", "lab-a/1"),
            ("VMCKPT_FENCE_HOST", "lab-a"),
            ("VMCKPT_FENCE_MACHINE", "b1 pid:[1]"),
            ("VMCKPT_FENCE_PROCESSES", "7:99 8:100"),
            ("VMCKPT_FENCE_TERM", "3"),
            ("VMCKPT_FENCE_TIMEOUT_S", "20"),
            ("VMCKPT_FENCE_VM", "web"),
        ]
    )


@pytest.mark.parametrize(
    ("does", "words"),
    [
        ("print('dead'); sys.exit('no power switch')", "no power switch"),
        ("sys.exit(3)", "it said nothing, with status 3"),
        ("os.kill(os.getpid(), 9)", "it said nothing, with status -9"),
        ("sys.stderr.write('first\\nlast\\n'); sys.exit(1)", "last"),
    ],
)
def test_an_agent_that_fails_proves_nothing(tmp_path: Path, does: str, words: str) -> None:
    with pytest.raises(OperationFailedError, match=words):
        asyncio.run(agent(tmp_path, does).fence(target(os.getpid())))


def test_an_agent_that_is_not_there_proves_nothing() -> None:
    with pytest.raises(OperationFailedError, match="does not start"):
        asyncio.run(Agent(("/nonexistent",)).fence(target(os.getpid())))


def test_an_agent_that_hangs_is_killed_with_what_it_started(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    does = (
        "child = subprocess.Popen(['sleep', '60'])\n"
        f"open({str(pid_file)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)"
    )
    with pytest.raises(TimedOutError, match="did not answer"):
        asyncio.run(agent(tmp_path, does, timeout_s=2.0).fence(target(os.getpid())))
    started = int(pid_file.read_text())
    deadline_s = time.monotonic() + 10
    while identify(started) is not None:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


FLOOD = "while True: os.write({}, b'a' * 65536)"


@pytest.mark.parametrize("stream", [1, 2])
def test_an_agent_that_prints_without_end_proves_nothing(tmp_path: Path, stream: int) -> None:
    flooding = agent(tmp_path, FLOOD.format(stream), timeout_s=60)
    with pytest.raises(OperationFailedError, match="printed more than 64"):
        asyncio.run(flooding.fence(target(os.getpid())))


def test_an_agent_whose_output_another_session_holds_is_given_up_in_time(tmp_path: Path) -> None:
    # As the process that ssh leaves behind with ControlPersist may.
    pid_file = tmp_path / "pid"
    does = (
        "child = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        f"open({str(pid_file)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)"
    )
    began_s = time.monotonic()
    try:
        with pytest.raises(TimedOutError, match="did not answer"):
            asyncio.run(agent(tmp_path, does, timeout_s=2.0).fence(target(os.getpid())))
        assert time.monotonic() - began_s < 20
    finally:
        os.kill(int(pid_file.read_text()), signal.SIGKILL)


def test_a_host_that_prints_without_end_proves_nothing(
    victim: "subprocess.Popen[bytes]", tmp_path: Path
) -> None:
    transport = tmp_path / "transport"
    transport.write_text(AGENT.format(python=sys.executable, does=FLOOD.format(1)))
    transport.chmod(0o755)
    with pytest.raises(OperationFailedError, match="prints without end"):
        asyncio.run(Agent((*BY_KILL, str(transport)), 60).fence(target(victim.pid)))
    assert victim.poll() is None


IPMITOOL = """\
import os, sys
from pathlib import Path
power = Path(os.environ["FAKE_POWER"])
with power.with_name("asked").open("a") as asked:
    print(*sys.argv[1:], file=asked)
if sys.argv[-1] == "off" and power.read_text() == "on":
    power.write_text("off")
print("Chassis Power is", power.read_text().removeprefix("stays "))
"""


def test_the_example_for_power_switches_waits_until_the_power_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    power, tool = tmp_path / "power", tmp_path / "ipmitool"
    tool.write_text(f"#!{sys.executable}\n{IPMITOOL}")
    tool.chmod(0o755)
    power.write_text("on")
    controllers = tmp_path / "controllers.json"
    controllers.write_text('{"lab-a": ["-H", "10.0.0.5"]}')
    monkeypatch.setenv("FAKE_POWER", str(power))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    made = Agent((str(shutil.which(str(BY_IPMI))), str(controllers)), 20.0)
    whom = Target("web", HOLDING, "lab-a", "-", [])
    assert asyncio.run(made.check(whom)) == "Chassis Power is on"
    assert power.read_text() == "on"
    proof = asyncio.run(made.fence(whom))
    assert proof.evidence == "the controller of lab-a says that its power is off"
    assert (tmp_path / "asked").read_text().splitlines()[-1] == (
        "-I lanplus -H 10.0.0.5 chassis power status"
    )
    unknown = Target("web", HOLDING, "lab-b", "-", [])
    with pytest.raises(OperationFailedError, match="has no controller for lab-b"):
        asyncio.run(made.fence(unknown))
    power.write_text("stays on")
    slow = Agent(made.argv, 1.0)
    with pytest.raises(OperationFailedError):
        asyncio.run(slow.fence(whom))
