"""The nvidia hook against a tree of files and a played driver.

No GPU is here: what CUDA and the driver do is played, as programs and as a libcuda that is compiled
here and calls back. What the real ones do is not shown by this.
"""

import ast
import ctypes
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vmckpt.devices.bundle import Vendor, hook_file
from vmckpt.devices.hooks.nvidia import carried, main, system, tool
from vmckpt.devices.hooks.nvidia.carried import read_state
from vmckpt.devices.hooks.nvidia.system import HookError

SOURCES = sorted(Path(main.__file__).parent.glob("*.py"))
OLD = "GPU-00000000-0000-0000-0000-00000000000a"
NEW = "GPU-00000000-0000-0000-0000-00000000000b"
OUT = ("preflight", "quiesce", "lock", "checkpoint", "release")
BACK = ("reattach", "restore", "resume")
CUDA = ("nvidia0", "nvidiactl", "nvidia-uvm")
STATES = ("running", "locked", "checkpointed", "failed")
STEPS = {
    "lock": ("running", "locked"),
    "checkpoint": ("locked", "checkpointed"),
    "restore": ("checkpointed", "locked"),
    "unlock": ("locked", "running"),
}
LIBRARY = r"""
#include <stdio.h>
static int (*player)(const char *action, int pid, const char *map);
void set_player(int (*to)(const char *, int, const char *)) { player = to; }
int cuInit(unsigned flags) { return player("init", (int)flags, ""); }
int cuCheckpointProcessGetState(int pid, int *state)
{
    *state = player("state", pid, "");
    return *state < 0;
}
int cuCheckpointProcessLock(int pid, const unsigned *args)
{
    return args[0] == 30000 ? player("lock", pid, "") : 1;
}
int cuCheckpointProcessCheckpoint(int pid, const unsigned long *args)
{
    return args[7] ? 1 : player("checkpoint", pid, "");
}
int cuCheckpointProcessUnlock(int pid, const unsigned long *args)
{
    return args[7] ? 1 : player("unlock", pid, "");
}
struct restore { unsigned char (*pairs)[2][16]; unsigned count; char reserved[52]; };
static char *uuid(char *text, const unsigned char *bytes)
{
    text += sprintf(text, "GPU-");
    for (int i = 0; i < 16; i++)
        text += sprintf(text, "%s%02x", i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "", bytes[i]);
    return text;
}
int cuCheckpointProcessRestore(int pid, struct restore *args)
{
    char map[400] = "", *end = map;
    for (unsigned i = 0; i < args->count; i++) {
        end += sprintf(end, i ? "," : "");
        end = uuid(end, args->pairs[i][0]);
        *end++ = '=';
        end = uuid(end, args->pairs[i][1]);
    }
    return sizeof *args == 64 ? player("restore", pid, map) : 1;
}
"""
PLAYER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p)


class Guest:
    """A guest's files and what its programs and libcuda do."""

    def __init__(self, root: Path, library: Path | None) -> None:
        self.root = root
        self.cards: list[list[str]] = [[OLD, "NVIDIA H200", "Enabled", "[N/A]", "100"]]
        self.version = "580.65.06"
        self.jobs: dict[int, str] = {}
        self.fails: set[str] = set()
        self.calls: list[tuple[str, ...]] = []
        self.maps: list[str] = []
        for name in ("run", "proc", "sys/module/nvidia", "sys/module/nvidia_uvm"):
            (root / name).mkdir(parents=True)
        (root / "proc/meminfo").write_text("MemAvailable: 1048576 kB\n")
        self._player = PLAYER(self._cuda)
        if library:
            ctypes.CDLL(str(library)).set_player(self._player)

    def process(self, pid: int, comm: str, *devices: str, maps: str = "") -> None:
        """A process; one with a GPU open is a CUDA job."""
        entry = self.root / "proc" / str(pid)
        (entry / "fd").mkdir(parents=True)
        self._opens(pid, *devices)
        (entry / "comm").write_text(comm + "\n")
        (entry / "stat").write_text(f"{pid} ({comm}) S {' '.join(['0'] * 18)} 4711 0 0\n")
        (entry / "maps").write_text(maps)
        (entry / "cmdline").write_bytes(b"/bin/true\0again\0")
        (entry / "environ").write_bytes(b"A=b\0")
        (entry / "cgroup").write_text("0::/system.slice/train.service\n")
        (entry / "status").write_text("Name: x\nUid:\t0 0 0 0\nGid:\t0 0 0 0\n")
        if "nvidia0" in devices:
            self.jobs[pid] = "running"

    def _opens(self, pid: int, *devices: str) -> None:
        for number, name in enumerate(devices):
            (self.root / f"proc/{pid}/fd/{number}").symlink_to(f"/dev/{name}")

    def hook(self, phase: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
        """What the hook answers."""
        code = main.main(["hook", phase])
        answer: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert (code == 0) is answer["ok"], answer
        return answer

    def run(self, name: str, *words: str, check: bool = True) -> str:
        """A program's output, as the hook's own `run` has it."""
        self.calls.append((name, *words))
        played = getattr(self, "_" + name.replace("-", "_"))(*words)
        return str(played or "")

    def _fail(self, why: str) -> None:
        raise HookError(why)

    def _nvidia_smi(self, *words: str) -> str:
        if not (self.root / "sys/module/nvidia").exists():
            self._fail("nvidia-smi failed: no driver")
        if words[0] == "-pm":
            for card in self.cards:
                card[2] = "Enabled" if words[1] == "1" else "Disabled"
            return ""
        if words[0].startswith("--query-gpu="):
            return "\n".join(
                f"{uuid}, {name}, {self.version}, {persistence}, {mig}, {used}"
                for uuid, name, persistence, mig, used in self.cards
            )
        return "\n".join(str(pid) for pid, state in self.jobs.items() if state == "running")

    def _cuda_checkpoint(self, *words: str) -> str:
        if words[0] == "--get-state":
            return self.jobs.get(int(words[2]), "failed") + "\n"
        options = dict(zip(words[::2], words[1::2], strict=True))
        action, pid = options["--action"], int(options["--pid"])
        if self._act(action, pid, options.get("--device-map", "")):
            self._fail(f"cuda-checkpoint failed: cannot {action}")
        return ""

    def _cuda(self, action: bytes, pid: int, given: bytes) -> int:
        if action == b"init":
            return 0
        if action == b"state":
            return STATES.index(self.jobs.get(pid, "failed"))
        return self._act(action.decode(), pid, given.decode())

    def _act(self, action: str, pid: int, given: str) -> int:
        before, after = STEPS[action]
        if self.jobs.get(pid) != before or action in self.fails:
            return 1
        self.jobs[pid] = after
        if action == "checkpoint" and "keeps-open" not in self.fails:
            for link in (self.root / f"proc/{pid}/fd").iterdir():
                link.unlink()
        if action == "restore":
            self.maps.append(given)
            self._opens(pid, *CUDA)
        return 0

    def _modprobe(self, *words: str) -> None:
        if f"modprobe {words[-1]}" in self.fails:
            self._fail(f"modprobe failed: {words[-1]}")
        if words[0] == "-r":
            (self.root / "sys/module" / words[1]).rmdir()
        else:
            (self.root / "sys/module" / words[0]).mkdir()

    def _systemctl(self, *words: str) -> None:
        """Heard, and noted with the calls."""

    @property
    def drivers(self) -> list[str]:
        return sorted(path.name for path in (self.root / "sys/module").iterdir())

    def other_card(self, name: str = "NVIDIA H200") -> None:
        """Where the guest is now there is another one."""
        self.cards = [[NEW, name, "Disabled", "[N/A]", "0"]]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("cuda")
    (directory / "cuda.c").write_text(LIBRARY)
    made = directory / "libcuda.so.1"
    words = ["gcc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(made), "cuda.c"]
    subprocess.run(words, cwd=directory, check=True)
    return made


def made(tmp_path: Path, patch: pytest.MonkeyPatch, library: Path | None) -> Guest:
    root, programs = tmp_path / "guest", tmp_path / "bin"
    root.mkdir()
    programs.mkdir()
    if library is None:  # whether it is there is looked for; it is not run
        (programs / "cuda-checkpoint").write_text("")
        (programs / "cuda-checkpoint").chmod(0o755)
    patch.setenv("PATH", str(programs))
    patch.setattr("sys.stdin", io.StringIO())
    patch.setattr(tool, "LIBCUDA", str(library))
    guest = Guest(root, library)
    patch.setattr(system, "run", guest.run)
    patch.setattr(system, "STATE", root / "run/vmckpt-nvidia")
    patch.setattr(system, "PROC", root / "proc")
    patch.setattr(system, "MODULES", root / "sys/module")
    return guest


class Told:
    """A guest, and the hook in it as vmckpt hears it."""

    def __init__(self, guest: Guest, capsys: pytest.CaptureFixture[str]) -> None:
        self.guest, self._capsys = guest, capsys

    def hook(self, phase: str) -> dict[str, Any]:
        return self.guest.hook(phase, self._capsys)

    def all(self, *phases: str) -> None:
        for phase in phases:
            answer = self.hook(phase)
            assert answer["ok"], (phase, answer)


@pytest.fixture(params=["cuda-checkpoint", "libcuda"])
def guest(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Told:
    found = request.getfixturevalue("library") if request.param == "libcuda" else None
    return Told(made(tmp_path, monkeypatch, found), capsys)


@pytest.fixture
def plain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Told:
    return Told(made(tmp_path, monkeypatch, None), capsys)


def test_there_and_back_onto_another_card(guest: Told) -> None:
    there = guest.guest
    there.process(100, "python3", *CUDA)
    there.process(101, "train", *CUDA)
    there.process(102, "sh")
    guest.all(*OUT)
    assert there.jobs == {100: "checkpointed", 101: "checkpointed"}
    assert there.drivers == []
    there.other_card()
    guest.all(*BACK)
    assert there.jobs == {100: "running", 101: "running"}
    assert there.drivers == ["nvidia", "nvidia_uvm"]
    assert there.maps == [f"{OLD}={NEW}"] * 2
    # Persistence is as it was, and nothing is remembered.
    assert there.cards[0][2] == "Enabled"
    assert [path.name for path in (there.root / "run/vmckpt-nvidia").iterdir()] == ["lock"]


def test_every_phase_may_be_run_twice(guest: Told) -> None:
    guest.guest.process(100, "python3", *CUDA)
    for phase in (*OUT, *BACK):
        guest.all(phase, phase)
    assert guest.guest.jobs == {100: "running"}
    assert guest.guest.maps == [""]


@pytest.mark.parametrize("last", range(len(OUT)))
def test_abort_from_wherever_it_is(plain: Told, last: int) -> None:
    plain.guest.process(100, "python3", *CUDA)
    plain.all(*OUT[: last + 1], "abort", "abort")
    assert plain.guest.jobs == {100: "running"}
    assert plain.guest.drivers == ["nvidia", "nvidia_uvm"]


def test_a_job_that_begins_late_is_locked_too(plain: Told) -> None:
    plain.guest.process(100, "python3", *CUDA)
    plain.all("preflight", "quiesce")
    plain.guest.process(101, "late", *CUDA)
    plain.all("lock", "checkpoint")
    assert plain.guest.jobs == {100: "checkpointed", 101: "checkpointed"}


@pytest.mark.parametrize(
    ("comm", "devices", "maps", "why"),
    [
        ("nvidia-cuda-mps", CUDA, "", "MPS"),
        ("odd", ("nvidia-uvm",), "", "only nvidia-uvm open"),
        ("Xorg", ("nvidia0", "nvidiactl"), "", "draws with the GPU"),
        ("python3", CUDA, "7f00-7f01 rw-s 0 00:01 9 /dev/shm/cuda.shm.0.64.1\n", "CUDA IPC"),
    ],
)
def test_what_cannot_be_carried_is_refused(
    plain: Told, comm: str, devices: tuple[str, ...], maps: str, why: str
) -> None:
    plain.guest.process(100, comm, *devices, maps=maps)
    for phase in ("preflight", "quiesce"):
        answer = plain.hook(phase)
        assert not answer["ok"]
        assert why in answer["why"]
        assert answer["remedy"]


@pytest.mark.parametrize(
    ("version", "cards", "why"),
    [
        ("570.10", [[OLD, "H200", "Enabled", "[N/A]", "1"]], "cannot restore onto another card"),
        ("580.1", [[OLD, "H200", "Enabled", "Enabled", "1"]], "MIG is on"),
        ("580.1", [[OLD, "H200", "Enabled", "[N/A]", "80000"]], "MiB of the guest"),
        ("580.1", [], "shows no GPU"),
    ],
)
def test_what_the_driver_has_to_be(
    plain: Told, version: str, cards: list[list[str]], why: str
) -> None:
    plain.guest.version, plain.guest.cards = version, cards
    answer = plain.hook("preflight")
    assert not answer["ok"]
    assert why in answer["why"]


def test_nothing_is_unloaded_under_a_user(plain: Told) -> None:
    plain.guest.process(100, "python3", *CUDA)
    plain.all("preflight", "quiesce", "lock", "checkpoint")
    plain.guest.process(103, "nvtop", "nvidiactl")
    answer = plain.hook("release")
    assert not answer["ok"]
    assert "103 (nvtop: nvidiactl)" in answer["why"]
    assert plain.guest.drivers == ["nvidia", "nvidia_uvm"]


def test_a_release_that_was_cut_off_remembers_what_it_had_unloaded(plain: Told) -> None:
    plain.guest.process(100, "python3", *CUDA)
    plain.all("preflight", "quiesce", "lock", "checkpoint")
    plain.guest.fails.add("modprobe nvidia")
    assert not plain.hook("release")["ok"]
    assert plain.guest.drivers == ["nvidia"]
    plain.guest.fails.clear()
    plain.all("release")
    assert plain.guest.drivers == []
    plain.all(*BACK)
    assert plain.guest.drivers == ["nvidia", "nvidia_uvm"]


def test_a_checkpoint_is_verified(plain: Told) -> None:
    plain.guest.process(100, "python3", *CUDA)
    plain.all("preflight", "quiesce", "lock")
    plain.guest.fails.add("keeps-open")
    answer = plain.hook("checkpoint")
    assert not answer["ok"]
    assert "still has nvidia-uvm, nvidia0, nvidiactl open" in answer["why"]


def test_a_restore_that_fails_kills_and_restarts_the_job_and_says_so(guest: Told) -> None:
    victim = subprocess.Popen(["/bin/sleep", "600"])
    try:
        guest.guest.process(victim.pid, "python3", *CUDA)
        guest.all(*OUT)
        guest.guest.other_card()
        guest.guest.fails.add("restore")
        guest.all("reattach")
        answer = guest.hook("restore")
        assert answer["ok"]
        (restarted,) = answer["restarted"]
        assert restarted.startswith(f"/bin/true again (process {victim.pid}): ")
        assert victim.wait(timeout=10) == -9
        assert ("systemctl", "restart", "train.service") in guest.guest.calls
    finally:
        victim.kill()
        victim.wait()


def test_a_job_begins_anew_as_its_own_user_whatever_it_is_called(plain: Told) -> None:
    """Any user's job of that name began again as root."""
    plain.guest.process(100, "\rUid:\t0\rGid:\t0", *CUDA)
    status = b"Name:\t\rUid:\t0\rGid:\t0\nState:\tR\nUid:\t7 7 7 7\nGid:\t8 8 8 8\n"
    (plain.guest.root / "proc/100/status").write_bytes(status)
    plain.all("preflight", "quiesce")
    (job,) = read_state()["jobs"]
    assert (job["uid"], job["gid"], job["groups"]) == (7, 8, [])


def test_a_job_begins_anew_with_its_own_groups(
    plain: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had those of root's process that started it."""
    plain.guest.process(100, "python3", *CUDA)
    status = b"Name:\tx\nUid:\t7 7 7 7\nGid:\t8 8 8 8\nFDSize:\t64\nGroups:\t8 44 \nNStgid:\t1\n"
    (plain.guest.root / "proc/100/status").write_bytes(status)
    # A service of a user's own, named like one of the guest's.
    cgroup = "0::/user.slice/user-7.slice/user@7.service/app.slice/sshd.service\n"
    (plain.guest.root / "proc/100/cgroup").write_text(cgroup)
    plain.all("preflight", "quiesce")
    (job,) = read_state()["jobs"]
    begun = list[dict[str, Any]]()
    monkeypatch.setattr(subprocess, "Popen", lambda _, **given: begun.append(given))
    monkeypatch.setattr(os, "kill", lambda *_: None)
    carried.begin_anew(job)
    assert [(one["user"], one["group"], one["extra_groups"]) for one in begun] == [(7, 8, [8, 44])]
    del job["groups"]  # as an earlier version wrote it
    carried.begin_anew(job)
    assert begun[1]["extra_groups"] == []


def test_a_job_is_carried_whatever_it_and_its_files_are_called(plain: Told) -> None:
    plain.guest.process(100, "python3", *CUDA)
    plain.guest.process(101, "editor")
    (plain.guest.root / "proc/100/comm").write_bytes(b"train\xff\n")
    (plain.guest.root / "proc/101/maps").write_bytes(b"7f00-7f01 r--p 0 08:01 5 /home/\xff\n")
    plain.all("preflight", "quiesce")
    assert [job["pid"] for job in read_state()["jobs"]] == [100]


def test_another_kind_of_card_is_refused(plain: Told) -> None:
    plain.guest.process(100, "python3", *CUDA)
    plain.all(*OUT, "reattach")
    plain.guest.other_card("NVIDIA A100")
    answer = plain.hook("restore")
    assert not answer["ok"]
    assert "there is no NVIDIA H200" in answer["why"]
    assert plain.guest.jobs == {100: "checkpointed"}


def test_an_unknown_phase(plain: Told) -> None:
    assert "unknown phase" in plain.hook("dance")["why"]


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """The hook as it is put into guests."""
    file = tmp_path / "nvidia"
    file.write_bytes(hook_file(Vendor.NVIDIA))
    file.chmod(0o755)
    return file


def test_it_runs_by_itself_with_the_standard_library_alone(packed: Path, tmp_path: Path) -> None:
    """A whole phase of the packed hook, with a driver that is a script."""
    for name in ("run", "sys/module/nvidia", "bin", "proc/100/fd"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 1048576 kB\n")
    for name, says in (
        ("nvidia-smi", f"{OLD}, NVIDIA H200, 580.65.06, Enabled, [N/A], 100"),
        ("cuda-checkpoint", "running"),
    ):
        script = tmp_path / "bin" / name
        script.write_text(f"#!/bin/sh\necho '{says}'\n")
        script.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(packed), "preflight"],
        env={"VMCKPT_HOOK_ROOT": str(tmp_path), "PATH": str(tmp_path / "bin")},
        input='{"format": 1}',
        capture_output=True,
        text=True,
        check=False,
    )
    assert json.loads(done.stdout) == {
        "ok": True,
        "device_bytes": 100 << 20,
        "notes": ["0 CUDA jobs"],
    }, done.stderr
    assert (tmp_path / "run/vmckpt-nvidia/lock").exists()


def test_it_begins_by_its_first_line_and_is_the_same_each_time(packed: Path) -> None:
    assert packed.read_bytes() == hook_file(Vendor.NVIDIA)
    done = subprocess.run(
        [packed, "dance"], input="{}", capture_output=True, text=True, check=False
    )
    assert (done.returncode, json.loads(done.stdout)["ok"]) == (1, False)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.name))
def test_python_3_9_reads_it(source: Path) -> None:
    text = source.read_text()
    ast.parse(text, feature_version=(3, 9))
    if "def " in text:  # its annotations are not evaluated: 3.9 does not know `X | None`
        assert "from __future__ import annotations\n" in text


@pytest.mark.parametrize("vendor", [Vendor.AMD, Vendor.GENERIC])
def test_the_other_hooks_are_scripts(vendor: Vendor) -> None:
    assert hook_file(vendor).startswith(b"#!/bin/sh\n")
