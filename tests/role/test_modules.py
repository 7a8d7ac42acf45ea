"""The Ansible modules, run by Ansible on a lab's guest: what they change, and what they say."""

import json
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.qemu.world import World, image, qemu, run_here, world
from vmckpt.lab.guests.labguest import LabGuest

# A guard and Ansible each take a while.
pytestmark = pytest.mark.timeout(400)

FOLDER = Path(__file__).parents[2] / "ansible"
NAME = "guest"


@pytest.fixture(scope="module")
def made() -> Iterator[World]:
    with world(qemu("10.0"), qemu("10.0")) as one:
        one.run_guest(LabGuest(NAME, 1, image(), memory="128M", disk=None), "lab-a")
        command = one.shared / "vmckpt"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m vmckpt.cli.entry "$@"\n')
        command.chmod(0o755)
        yield one


def asked(made: World, module: str, *options: str, **args: Any) -> tuple[str, dict[str, Any]]:
    """Run a module as `ansible` does: SUCCESS, CHANGED or FAILED!, and its result."""
    common = {"state_dir": str(made.state_dir), "command": str(made.shared / "vmckpt")}
    words = ["ansible", "-i", "localhost,", "-c", "local", "localhost", "-o", "-m", module]
    words += ["-a", json.dumps({**args, **common}), *options]
    config = f"ANSIBLE_CONFIG={FOLDER / 'ansible.cfg'}"
    done = run_here(["env", config, "ANSIBLE_NOCOLOR=1", f"PATH={os.environ['PATH']}", *words])
    assert " => " in done.stdout, done.stdout + done.stderr
    head, _, result = done.stdout.partition(" => ")
    return head.split("|")[1].strip(), json.loads(result)


def where(made: World) -> str:
    host: str = made.ok("vm", "show", NAME)["host"]
    return host


def test_a_vm_is_had_on_a_host(made: World) -> None:
    said, result = asked(made, "vmckpt_migrate", "--check", vm=NAME, host="lab-b", method="stop")
    assert (said, where(made)) == ("CHANGED", "lab-a")
    assert "checks" in result["result"]
    said, result = asked(made, "vmckpt_migrate", vm=NAME, host="lab-b", max_downtime="500ms")
    assert (said, where(made)) == ("CHANGED", "lab-b")
    assert (result["source"], result["result"]["outcome"]) == ("lab-a", "completed")
    assert asked(made, "vmckpt_migrate", vm=NAME, host="lab-b")[0] == "SUCCESS"
    said, result = asked(made, "vmckpt_migrate", vm=NAME, host="nowhere")
    assert (said, result["kind"]) == ("FAILED!", "not-found")
    said, result = asked(made, "vmckpt_migrate", "--check", vm="gone", host="lab-a")
    assert (said, "there is no VM 'gone'" in result["msg"]) == ("FAILED!", True)
    made.ok("vm", "stop", NAME, "--force")
    assert asked(made, "vmckpt_migrate", vm=NAME, host="lab-a", method="precopy")[0] == "CHANGED"
    assert where(made) == "lab-a"
    made.ok("vm", "start", NAME)


def checkpoints(made: World) -> list[str]:
    return [one["facts"]["name"] for one in made.ok("checkpoint", "list", NAME)["checkpoints"]]


def test_a_checkpoint_is_there_once_and_then_no_more(made: World) -> None:
    args = {"vm": NAME, "name": "before", "tags": {"release": "2.4"}}
    assert asked(made, "vmckpt_checkpoint", "--check", **args)[0] == "CHANGED"
    assert checkpoints(made) == []
    said, result = asked(made, "vmckpt_checkpoint", **args)
    assert (said, checkpoints(made)) == ("CHANGED", ["before"])
    said, again = asked(made, "vmckpt_checkpoint", **args)
    assert (said, again["checkpoints"][0]["facts"]["tags"]) == ("SUCCESS", {"release": "2.4"})
    assert asked(made, "vmckpt_checkpoint", replace=True, **args)[0] == "CHANGED"
    assert checkpoints(made) == ["before"]
    gone = {"vm": NAME, "name": "before", "state": "absent"}
    assert asked(made, "vmckpt_checkpoint", "--check", **gone)[0] == "CHANGED"
    assert checkpoints(made) == ["before"]
    assert asked(made, "vmckpt_checkpoint", **gone)[0] == "CHANGED"
    assert checkpoints(made) == []
    assert asked(made, "vmckpt_checkpoint", **gone)[0] == "SUCCESS"
    said, result = asked(made, "vmckpt_checkpoint", vm=NAME, state="absent")
    assert (said, "name" in result["msg"]) == ("FAILED!", True)
    said, result = asked(made, "vmckpt_checkpoint", vm=NAME, store="/nowhere/store")
    assert said == "FAILED!"
    assert result["kind"]


def test_a_guarded_command_runs_or_is_rolled_back(made: World, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    args = {"vm": NAME, "proof": "read", "argv": ["touch", str(ran)]}
    assert asked(made, "vmckpt_guard", "--check", **args)[0] == "CHANGED"
    assert not ran.exists()
    said, result = asked(made, "vmckpt_guard", **args)
    assert (said, ran.exists()) == ("CHANGED", True), result
    args["argv"] = shlex.split("sh -c 'exit 3'")
    said, result = asked(made, "vmckpt_guard", **args)
    assert (said, result["rc"], result["rolled_back"], result["open"]) == (
        "FAILED!",
        7,
        True,
        False,
    )
    assert made.ok("vm", "show", NAME)["state"] == "running"
    said, result = asked(made, "vmckpt_guard", **args, check=["tcp:nonsense"])
    assert (said, result["rc"], result["rolled_back"]) == ("FAILED!", 2, False)
