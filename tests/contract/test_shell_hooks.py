"""The hooks for AMD GPUs and for commands of one's own, run as they are; and how they are had."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.commands import COMMAND, vmckpt
from vmckpt.devices.bundle import Vendor, hook_file

HOOKS = Path(__file__).parents[2] / "vmckpt/devices/hooks"
ALL = ("preflight", "quiesce", "lock", "checkpoint", "release", "reattach", "restore", "resume")


def ask(hook: str, phase: str, **environment: str) -> dict[str, Any]:
    done = subprocess.run(
        ["sh", str(HOOKS / hook), phase],
        env=os.environ | environment,
        input='{"format": 1, "device": "gpu0"}',
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    assert (done.returncode == 0) is answer["ok"], done
    return answer


def program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_generic_runs_a_program_for_each_phase(tmp_path: Path) -> None:
    directory, log = tmp_path / "hook.d", tmp_path / "log"
    for phase in ("lock", "reattach", "restore", "resume"):
        program(directory / phase, f"cat >> {log}; echo {phase} >> {log}")
    told = {"VMCKPT_HOOK_DIR": str(directory)}
    assert all(ask("generic", phase, **told)["ok"] for phase in ALL)
    one = '{"format": 1, "device": "gpu0"}\n'
    back = f"{one}reattach\n{one}restore\n{one}resume\n"
    assert log.read_text() == f"{one}lock\n{back}"
    log.unlink()
    assert ask("generic", "abort", **told)["ok"]
    assert log.read_text() == back
    program(directory / "abort", f"echo mine >> {log}")
    assert ask("generic", "abort", **told)["ok"]
    assert log.read_text() == back + "mine\n"


def test_generic_says_what_the_program_said(tmp_path: Path) -> None:
    directory = tmp_path / "hook.d"
    program(directory / "lock", r"""printf 'a "quoted" \\ word\nand more\n' >&2; exit 3""")
    answer = ask("generic", "lock", VMCKPT_HOOK_DIR=str(directory))
    assert answer["why"] == f'{directory}/lock ended with 3: a "quoted" \\ word and more'
    assert not ask("generic", "preflight", VMCKPT_HOOK_DIR=str(tmp_path / "none"))["ok"]
    assert not ask("generic", "dance", VMCKPT_HOOK_DIR=str(directory))["ok"]


@pytest.fixture
def amd(tmp_path: Path) -> dict[str, str]:
    """A guest with the services train, which runs, and idle, which does not."""
    log, modules = tmp_path / "log", tmp_path / "module"
    (modules / "amdgpu").mkdir(parents=True)
    (tmp_path / "proc/7/fd").mkdir(parents=True)
    (tmp_path / "services").write_text("train\nidle\n")
    said = f'echo "$@" >> {log}'
    program(
        tmp_path / "bin/systemctl", f'[ "$1" = is-active ] && [ "$3" = idle ] && exit 3\n{said}'
    )
    unload = f'[ "$1" = -r ] && rmdir {modules}/amdgpu || mkdir {modules}/amdgpu'
    program(tmp_path / "bin/modprobe", unload)
    return {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "VMCKPT_HOOK_PROC": str(tmp_path / "proc"),
        "VMCKPT_HOOK_MODULES": str(modules),
        "VMCKPT_HOOK_SERVICES": str(tmp_path / "services"),
        "VMCKPT_HOOK_RUN": str(tmp_path),
    }


def test_amd_stops_services_and_starts_those_that_ran(tmp_path: Path, amd: dict[str, str]) -> None:
    for phase in ALL:
        assert ask("amd", phase, **amd)["ok"], phase
        assert (tmp_path / "module/amdgpu").exists() is (phase != "release")
    log = (tmp_path / "log").read_text().splitlines()
    assert log == ["is-active --quiet train", "stop train", "start train"]


def test_amd_reads_a_list_whose_last_line_does_not_end(tmp_path: Path, amd: dict[str, str]) -> None:
    """That service was not stopped, and was said to be of no service in the list."""
    (tmp_path / "services").write_text("idle\ntrain")
    for phase in ("quiesce", "lock"):
        assert ask("amd", phase, **amd)["ok"], phase
    assert "stop train" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("last", range(5))
def test_amd_comes_back_from_wherever_it_is(tmp_path: Path, amd: dict[str, str], last: int) -> None:
    for phase in (*ALL[: last + 1], "abort", "abort"):
        assert ask("amd", phase, **amd)["ok"], phase
    starts = (tmp_path / "log").read_text().count("start train") if last else 0
    assert starts == (1 if last else 0)
    assert (tmp_path / "module/amdgpu").exists()


def test_amd_does_not_take_the_gpu_from_others(tmp_path: Path, amd: dict[str, str]) -> None:
    (tmp_path / "proc/7/fd/3").symlink_to("/dev/kfd")
    assert ask("amd", "quiesce", **amd)["ok"]
    answer = ask("amd", "checkpoint", **amd)
    assert not answer["ok"]
    assert "processes 7 have the GPU open" in answer["why"]


def test_hooks_are_had_from_vmckpt(tmp_path: Path) -> None:
    for vendor in Vendor:
        words = [*COMMAND, "device", "hook", vendor]
        environment = os.environ | {"VMCKPT_STATE_DIR": str(tmp_path)}
        done = subprocess.run(words, env=environment, capture_output=True, check=True)
        assert done.stdout == hook_file(vendor)


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    for words in (["list", "nobody"], ["recover", "nobody"], ["cards", "nowhere"]):
        done = vmckpt(tmp_path, "device", *words)
        assert done.returncode == 3, done.stderr
