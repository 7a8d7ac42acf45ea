"""The resource agent ocf:vmckpt:vm on real guests: ocf-tester, and every action and its status."""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.ocf_vm import (
    ARGUMENTS,
    CONFIGURED,
    GENERIC,
    INSTALLED,
    NOT_RUNNING,
    SUCCESS,
    UNIMPLEMENTED,
)
from tests.qemu.world import World, image, qemu, run_here, world
from vmckpt.lab.guests.labguest import LabGuest

SOURCE = Path(__file__).parents[2] / "cluster/ocf_vm.py"
NAME = "guest"
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def made() -> Iterator[World]:
    with world(qemu("10.0"), qemu("10.0")) as one:
        one.run_guest(LabGuest(NAME, 1, image(), memory="128M", disk=None), "lab-a")
        yield one


@pytest.fixture(scope="module")
def agent() -> Iterator[Path]:
    """The agent as it is installed: for everybody to read; with a vmckpt in PATH."""
    with tempfile.TemporaryDirectory(prefix="vk-ocf-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        installed = Path(shutil.copy(SOURCE, folder / "vm"))
        installed.chmod(0o755)
        command = folder / "vmckpt"
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m vmckpt.cli.entry "$@"\n')
        command.chmod(0o755)
        yield installed


class Node:
    """A node of a cluster: runs actions of the agent."""

    def __init__(self, made: World, agent: Path, host: str) -> None:
        self.agent, self.host = agent, host
        self.environment = {
            **os.environ,
            "PATH": f"{agent.parent}:{os.environ['PATH']}",
            "OCF_RESKEY_vm": NAME,
            "OCF_RESKEY_host": host,
            "OCF_RESKEY_state_dir": str(made.state_dir),
            "OCF_RESKEY_CRM_meta_timeout": "40000",
        }

    def does(self, action: str, **more: str) -> int:
        return self.said(action, **more)[0]

    def said(self, action: str, **more: str) -> tuple[int, str]:
        given = {f"OCF_RESKEY_{name}": value for name, value in more.items()}
        done = subprocess.run(
            [str(self.agent), action], env=self.environment | given, capture_output=True,
            text=True, check=False, timeout=90,
        )  # fmt: skip
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, done.stderr


@pytest.fixture(scope="module")
def nodes(made: World, agent: Path) -> tuple[Node, Node]:
    return Node(made, agent, "lab-a"), Node(made, agent, "lab-b")


def test_ocf_tester_accepts_it(made: World, agent: Path) -> None:
    package = Path(os.environ["VMCKPT_TEST_OCF_TESTER"]).parents[2]
    # Of a resource agent's description the DTD says no more than `test_its_description` does, and
    # the tester has no checker of its own for it.
    text = (package / "usr/sbin/ocf-tester").read_text()
    text = re.sub(r"^DATADIR=.*$", f"DATADIR={package}/usr/share", text, flags=re.MULTILINE)
    text = re.sub(r"^METADATA_LINT=.*$", "METADATA_LINT='cat'", text, flags=re.MULTILINE)
    tester = agent.parent / "ocf-tester"
    tester.write_text(text)
    node = Node(made, agent, "lab-a")
    done = subprocess.run(
        ["sh", str(tester), "-n", NAME, "-o", f"vm={NAME}", "-o", "host=lab-a",
         "-o", f"state_dir={made.state_dir}", str(agent)],
        env=node.environment | {"OCF_ROOT": str(package / "usr/lib/ocf")},
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{agent} passed all tests" in done.stdout
    assert node.does("start") == SUCCESS


def test_it_is_started_watched_and_stopped(nodes: tuple[Node, Node], made: World) -> None:
    one, other = nodes
    assert [node.does("monitor") for node in nodes] == [SUCCESS, NOT_RUNNING]
    # A VM that runs is not started twice, and not stopped by who does not have it.
    code, said = other.said("start")
    assert (code, "it is not started twice" in said) == (GENERIC, True)
    assert other.does("stop") == SUCCESS
    assert one.does("monitor") == SUCCESS
    assert one.does("stop") == SUCCESS
    assert one.does("monitor") == NOT_RUNNING
    # It is off at home: it is moved, then started.
    assert other.does("start") == SUCCESS
    assert [node.does("monitor") for node in nodes] == [NOT_RUNNING, SUCCESS]
    assert made.ok("vm", "show", NAME)["host"] == "lab-b"


def test_it_moves_while_it_runs(nodes: tuple[Node, Node], made: World) -> None:
    one, other = nodes
    assert other.does("start") == SUCCESS
    assert other.does("migrate_to") == ARGUMENTS
    assert other.does("migrate_to", CRM_meta_migrate_target="nowhere") == GENERIC
    assert other.does("monitor") == SUCCESS
    assert one.does("migrate_to", CRM_meta_migrate_target="node-2") == NOT_RUNNING
    options = {"hosts": "node-1=lab-a node-2=lab-b", "options": "--method stop"}
    assert other.does("migrate_to", CRM_meta_migrate_target="node-1", **options) == SUCCESS
    assert one.does("migrate_from", CRM_meta_migrate_source="node-2") == SUCCESS
    assert other.does("stop") == SUCCESS  # as the cluster does after a move
    assert one.does("monitor") == SUCCESS
    assert len(made.qemus(NAME)) == 1
    assert other.does("migrate_from", CRM_meta_timeout="2000") == GENERIC


@pytest.mark.long
def test_a_guest_that_died_is_started_again(nodes: tuple[Node, Node], made: World) -> None:
    one, _ = nodes
    assert one.does("start") == SUCCESS
    (which,) = made.qemus(NAME)
    os.kill(which.pid, signal.SIGSTOP)
    try:
        assert one.does("monitor") == GENERIC
    finally:
        os.kill(which.pid, signal.SIGKILL)
    assert one.does("monitor") == NOT_RUNNING
    assert one.does("stop") == SUCCESS
    assert one.does("start") == SUCCESS


@pytest.mark.long
def test_a_guest_that_does_not_shut_down_is_ended(nodes: tuple[Node, Node], made: World) -> None:
    one, _ = nodes
    assert one.does("start") == SUCCESS
    # Right after its start nothing in it hears the button.
    made.ok("vm", "stop", NAME, "--force")
    made.ok("vm", "start", NAME)
    code, said = one.said("stop", CRM_meta_timeout="17000")
    assert code == SUCCESS
    assert "it is ended like by a power cut" in said
    assert one.does("monitor") == NOT_RUNNING


def test_after_its_node_is_gone_it_boots_from_its_spec(
    nodes: tuple[Node, Node], made: World, tmp_path: Path
) -> None:
    one, other = nodes
    assert one.does("start") == SUCCESS
    spec = tmp_path / "guest.toml"
    spec.write_text(LabGuest(NAME, 1, image(), memory="128M", disk=None).spec())
    # lab-a loses power: its QEMUs are dead, and it does not answer.
    for which in made.qemus(NAME):
        os.kill(which.pid, signal.SIGKILL)
    home, gone = made.asked("lab-a").state_dir, tmp_path / "gone"
    (home / "vms").rename(gone)
    try:
        assert other.does("start") == INSTALLED
        assert other.does("start", spec=str(spec)) == SUCCESS
        assert other.does("monitor") == SUCCESS
    finally:
        shutil.rmtree(home / "vms", ignore_errors=True)
        gone.rename(home / "vms")
    # It is back, with an outdated home of the VM, which is off.
    assert [node.does("monitor") for node in nodes] == [NOT_RUNNING, SUCCESS]
    assert one.does("stop") == SUCCESS
    code, said = one.said("start")
    assert code == GENERIC
    assert "vmckpt vm rm VM --host HOST" in said
    assert made.vmckpt("vm", "rm", NAME, "--host", "lab-b").code == 4  # that one runs
    assert made.vmckpt("vm", "rm", NAME, "--host", "lab-a", "--disks").code == 2
    # Its own is stopped all the same: otherwise the cluster would fence its node.
    assert other.does("stop") == SUCCESS
    assert other.does("monitor") == NOT_RUNNING
    made.ok("vm", "rm", NAME, "--host", "lab-a")
    assert other.does("start") == SUCCESS
    assert other.does("migrate_to", CRM_meta_migrate_target="lab-a") == SUCCESS
    assert one.does("migrate_from") == SUCCESS


@pytest.mark.parametrize(
    ("more", "code"),
    [
        ({}, SUCCESS),
        ({"vm": ""}, CONFIGURED),
        ({"vm": "--all"}, CONFIGURED),
        ({"hosts": "node-1"}, CONFIGURED),
        ({"spec": "/nowhere/web.toml"}, INSTALLED),
    ],
)
def test_parameters_are_checked(nodes: tuple[Node, Node], more: dict[str, str], code: int) -> None:
    assert nodes[0].does("validate-all", **more) == code


def test_without_vmckpt_it_says_that_it_is_not_installed(agent: Path) -> None:
    words = ["env", "-i", "PATH=/usr/bin:/bin", "OCF_RESKEY_vm=x", sys.executable, str(agent)]
    assert run_here([*words, "monitor"]).code == INSTALLED


def test_what_it_does_not_do(nodes: tuple[Node, Node]) -> None:
    assert nodes[0].does("promote") == UNIMPLEMENTED
    assert nodes[0].does("") == UNIMPLEMENTED
