"""What the resource agent does when a node, another VM or libvirtd does not say what it expects.

A stop that fails has its node fenced, with all guests there; a monitor that fails restarts its VM.
"""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cluster.ocf_vm import CONFIGURED, GENERIC, INSTALLED, NOT_RUNNING, SUCCESS
from vmckpt.hosts.local import LocalHost
from vmckpt.migrate.outcome.journal import MigrationJournal

pytestmark = pytest.mark.contract
SOURCE = Path(__file__).parents[2] / "cluster/ocf_vm.py"
# Answers to each command in turn; the last one stays.
COMMAND = f"""\
#!{sys.executable}
import json, pathlib, sys
here = pathlib.Path(__file__).parent
with (here / "calls").open("a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
known = json.loads((here / "answers").read_text())
words = sys.argv[1:]
[key] = [key for key in known if words[: len(key.split())] == key.split()]
code, result = known[key][0]
known[key] = known[key][1:] or known[key]
(here / "answers").write_text(json.dumps(known))
print(json.dumps(result))
sys.exit(code)
"""
Answer = tuple[int, dict[str, Any]]
Answers = dict[str, list[Answer]]


def listed(
    *states: str,
    silent: Sequence[str | None] = (),
    arrived: bool = False,
    arriving: bool = False,
    operation: str | None = None,
    unanswered: Sequence[str] = (),
) -> Answer:
    """`vm list`: the VM on node1, node2, ...; `silent`: which VMs, or hosts, are not readable."""
    vms = [{"name": "web", "host": f"node{number}", "state": state, "operation": operation}
           for number, state in enumerate(states, 1) if state]  # fmt: skip
    errors = [{"what": "damaged", "why": "-", "remedy": "-", "vm": vm} for vm in silent]
    held = [None] * arrived + ["migrate to node1"] * arriving
    arrivals = [{"vm": "web", "host": "node1", "operation": one} for one in held]
    return 0, {"vms": vms, "silent": errors, "unanswered": unanswered, "arrivals": arrivals}


def error(code: int, kind: str) -> Answer:
    return code, {"error": {"kind": kind, "what": f"it is {kind}", "why": "-", "remedy": "-"}}


@dataclass
class Node:
    """node1, where `vmckpt` answers by a script."""

    path: Path

    def does(self, action: str, answers: Answers, **more: str) -> int:
        (self.path / "answers").write_text(json.dumps(answers))
        (self.path / "calls").write_text("")
        given = {"vm": "web", "host": "node1", "CRM_meta_timeout": "20000"} | more
        environment = {"PATH": f"{self.path}:{os.environ['PATH']}"} | {
            f"OCF_RESKEY_{name}": value for name, value in given.items()
        }
        done = subprocess.run(
            [sys.executable, str(SOURCE), action], env=environment, capture_output=True,
            text=True, check=False, timeout=60,
        )  # fmt: skip
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode

    @property
    def calls(self) -> list[str]:
        """The commands that were run, without --json."""
        return [
            line.removesuffix(" --json")
            for line in (self.path / "calls").read_text().split("\n")[:-1]
        ]

    def called(self, *words: str) -> list[str]:
        return [call for call in self.calls if call.startswith(" ".join(words))]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    command = tmp_path / "vmckpt"
    command.write_text(COMMAND)
    members = tmp_path / "crm_node"
    members.write_text("#!/bin/sh\nprintf '1 node1 member\\n2 node2 lost\\n'\n")
    for program in (command, members):
        program.chmod(0o755)
        assert shutil.which(program.name, path=str(tmp_path))
    return Node(tmp_path)


def test_a_damaged_record_of_another_vm_fails_no_action(node: Node) -> None:
    """All VMs of the node were reported as failed, could not be stopped, and it was fenced."""
    lists = [listed("running", silent=["db"])]
    assert node.does("monitor", {"vm list": lists}) == SUCCESS
    assert node.does("monitor", {"vm list": [listed(silent=["db"])]}) == NOT_RUNNING
    lists = [listed("running", silent=["db"]), listed("stopped", silent=["db"])]
    assert node.does("stop", {"vm list": lists, "vm stop": [(0, {})]}) == SUCCESS
    # Its own is another matter: it may run.
    assert node.does("monitor", {"vm list": [listed(silent=["web"])]}) == GENERIC


def test_a_libvirtd_that_is_restarted_is_asked_again(node: Node) -> None:
    lists = [listed(silent=[None]), listed()]
    assert node.does("monitor", {"vm list": lists}) == NOT_RUNNING
    # The VM is found without it.
    assert node.does("monitor", {"vm list": [listed("running", silent=[None])]}) == SUCCESS
    assert len(node.calls) == 1


def test_a_qemu_that_is_slow_once_is_asked_again(node: Node) -> None:
    """Its guest was ended like by a power cut."""
    assert node.does("monitor", {"vm list": [listed("unreachable"), listed("running")]}) == SUCCESS
    assert node.does("monitor", {"vm list": [listed("unreachable")]}) == GENERIC


def test_a_vm_that_is_rebooted_is_not_off(node: Node) -> None:
    """The cluster stopped it, and started it once more."""
    lists = [listed("stopped", operation="vm reboot"), listed("running")]
    assert node.does("monitor", {"vm list": lists}) == SUCCESS
    lists = [listed("stopped", operation="migrate to node2")]
    assert node.does("monitor", {"vm list": lists}) == NOT_RUNNING
    assert len(node.calls) == 1


def test_a_vm_with_an_outdated_home_elsewhere_is_stopped_here(node: Node) -> None:
    """A fenced node is back. No command took the VM by its name alone: the stop failed."""
    answers: Answers = {
        "vm list": [listed("running"), listed("stopped")],
        "vm stop web --timeout": [error(9, "unknown")],
        "vm stop web --host": [(0, {})],
    }
    assert node.does("stop", answers) == SUCCESS
    [_, stop] = node.called("vm stop")
    assert stop.startswith("vm stop web --host node1 --timeout ")


def test_it_is_ended_here_if_it_does_not_shut_down(node: Node) -> None:
    answers: Answers = {
        "vm list": [listed("running"), listed("running"), listed("stopped")],
        "vm stop web --timeout": [error(8, "timed-out")],
        "vm stop web --host node1 --force": [(0, {})],
    }
    assert node.does("stop", answers) == SUCCESS


@pytest.mark.parametrize(("silent", "words"), [([], ""), ([None], " --silent-hosts-are-off")])
def test_after_its_node_is_fenced_it_is_created(
    node: Node, tmp_path: Path, silent: list[None], words: str
) -> None:
    """The node that was fenced does not answer, and `vm run` refused because of that."""
    spec = tmp_path / "web.toml"
    spec.write_text("")
    answers: Answers = {
        "vm list": [
            listed(),
            listed(silent=silent, unanswered=["h2"] if silent else []),
            listed("running"),
        ],
        "vm run": [(0, {})],
    }
    given = {"spec": str(spec), "hosts": "node2=h2"}
    assert node.does("start", answers, **given) == SUCCESS
    assert node.called("vm run") == [f"vm run {spec} --host node1{words}"]


def test_a_silent_host_that_is_no_node_may_run_it(node: Node, tmp_path: Path) -> None:
    """The operator had moved it there; the cluster fences only its nodes. It ran twice."""
    spec = tmp_path / "web.toml"
    spec.write_text("")
    answers: Answers = {"vm list": [listed(), listed(silent=[None], unanswered=["backup"])]}
    assert node.does("start", answers, spec=str(spec)) == GENERIC
    assert node.called("vm run") == []


def test_it_is_not_called_stopped_while_a_migration_brings_it_here(node: Node) -> None:
    """Its source has lost power; the lock of the migration is held here for a while."""
    answers: Answers = {
        "vm list": [
            listed(arriving=True), listed(arriving=True), listed(arrived=True), listed("running"),
            listed("stopped"),
        ],
        "vm show": [(0, {})],
        "vm stop": [(0, {})],
    }  # fmt: skip
    assert node.does("stop", answers) == SUCCESS
    assert len(node.called("vm stop")) == 1
    answers = {"vm list": [listed(arriving=True)]}
    assert node.does("stop", answers, CRM_meta_timeout="3000") == GENERIC


def test_it_is_not_called_stopped_while_it_is_not_known_how_its_migration_ended(
    node: Node,
) -> None:
    answers: Answers = {"vm list": [listed(arrived=True)], "vm show": [error(9, "unknown")]}
    assert node.does("stop", answers) == GENERIC


def test_a_guest_that_arrived_as_its_source_died_is_stopped(node: Node) -> None:
    """It ran here, not at home yet: its stop was reported as done, and it was started elsewhere."""
    answers: Answers = {
        "vm list": [listed(arrived=True), listed("running"), listed("stopped")],
        "vm show": [(0, {})],
        "vm stop": [(0, {})],
    }
    assert node.does("stop", answers) == SUCCESS
    assert [call.split()[1] for call in node.calls] == ["list", "show", "list", "stop", "list"]
    # One that only waits for the source is not running, and its node need not be fenced for it.
    answers = {"vm list": [listed(arrived=True)], "vm show": [error(6, "unreachable")]}
    assert node.does("stop", answers) == SUCCESS


def test_a_job_that_is_held_is_no_reason_to_restart_its_guest(node: Node) -> None:
    answers: Answers = {
        "vm list": [listed("running"), listed("", "running")],
        "migrate": [error(1, "job-held")],
    }
    more = {"CRM_meta_migrate_target": "node2"}
    assert node.does("migrate_to", {**answers, "vm list": [listed("running")]}, **more) == GENERIC
    answers["vm list"] = [listed("running"), listed()]
    assert node.does("migrate_to", answers, **more) == SUCCESS


def test_parameters_of_other_actions_keep_no_vm_from_being_stopped(node: Node) -> None:
    """The shared storage with the spec is away: the monitor failed, the stop too."""
    more = {"spec": "/nowhere/web.toml", "hosts": "node-1"}
    lists = [listed("running"), listed("stopped")]
    assert node.does("monitor", {"vm list": [listed("running")]}, **more) == SUCCESS
    assert node.does("stop", {"vm list": lists, "vm stop": [(0, {})]}, **more) == SUCCESS
    assert node.does("validate-all", {}, spec=more["spec"]) == INSTALLED
    assert node.does("validate-all", {}, hosts=more["hosts"]) == CONFIGURED
    moving = {"CRM_meta_migrate_target": "node-2", "hosts": "node-1"}
    assert node.does("migrate_to", {"vm list": [listed("running")]}, **moving) == CONFIGURED


def test_it_reads_what_vmckpt_says(node: Node, tmp_path: Path) -> None:
    """The lists above are scripted; these are real ones, of a machine without QEMUs."""
    command = node.path / "vmckpt"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m vmckpt.cli.entry "$@"\n')
    state, damaged = tmp_path / "state", tmp_path / "state/vms/db"
    damaged.mkdir(parents=True, mode=0o700)
    for name in ("spec.toml", "vm.json"):
        (damaged / name).write_text("")
    journal = MigrationJournal(
        "r1", "web", "gone", "local", "qa", "qb", "/nowhere", was_running=True, step="verify"
    )
    asyncio.run(journal.write((LocalHost("local", state, "127.0.0.1"),)))
    more = {"host": "local", "state_dir": str(state)}
    found = {vm: node.does("monitor", {}, vm=vm, **more) for vm in ("db", "web", "other")}
    assert found == {"db": GENERIC, "web": NOT_RUNNING, "other": NOT_RUNNING}
    environment = os.environ | {"VMCKPT_STATE_DIR": str(state)}
    done = subprocess.run(
        [str(command), "vm", "list", "--json"], env=environment, capture_output=True, check=True
    )
    said = json.loads(done.stdout)
    assert [one["vm"] for one in said["silent"]] == ["db"]
    assert said["arrivals"] == [{"host": "local", "vm": "web", "operation": None}]
