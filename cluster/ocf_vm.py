#!/usr/bin/python3
"""ocf:vmckpt:vm, a resource agent for Pacemaker: a VM that vmckpt runs (docs/operations.md).

Needs Python's standard library and the command vmckpt. Exit statuses are those of OCF 1.1.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn
from xml.sax.saxutils import escape

SUCCESS, GENERIC, ARGUMENTS, UNIMPLEMENTED, INSTALLED, CONFIGURED, NOT_RUNNING = 0, 1, 2, 3, 5, 6, 7
# Exit codes of vmckpt (docs/exit-codes-and-json.md).
NOT_FOUND, BUSY, UNKNOWN = 3, 5, 9
JOB_HELD = "job-held"
OFF = ("stopped", "crashed", "nostate")
# Operations in which a VM is off for moments, and runs again.
BEGINNINGS = ("vm start", "vm reboot", "checkpoint restore")
POLL_S = 1.0
# How long a QEMU, or a libvirtd that is restarted, may leave a question without an answer.
PATIENCE_S = 15.0
# For ending an interrupted operation: it may wait for other hosts.
SETTLE_S = 60.0
# Kept of an action's time for what follows a guest that does not shut down.
FORCE_S = 15.0
DEFAULT_TIMEOUT_S = 120.0

PARAMETERS = {
    "vm": ("The VM's name", True, "", "The name of the VM, as `vmckpt vm list` shows it."),
    "spec": (
        "Spec of the VM", False, "",
        "A spec (TOML) that all nodes can read, with disks that all nodes can reach. If no host "
        "that answers has the VM, as after its node has been fenced, it is created from this spec "
        "and boots anew. Without it the VM cannot be started until its host is back.",
    ),
    "hosts": (
        "Nodes' names as hosts", False, "",
        "The name of each node in vmckpt's inventory, where it differs: NODE=HOST NODE=HOST ...",
    ),
    "options": (
        "Options of migrations", False, "",
        "Options of `vmckpt migrate` for live migrations, e.g. --method hybrid --tls require.",
    ),
    "host": ("This node as a host", False, "local", "The name of a node in its own inventory."),
    "state_dir": ("State directory", False, "", "VMCKPT_STATE_DIR, if it is not root's default."),
}  # fmt: skip
# Timeouts and intervals in seconds.
ADVICE = {
    "start": {"timeout": 180},
    "stop": {"timeout": 180},
    "monitor": {"timeout": 60, "interval": 20, "depth": 0},
    "migrate_to": {"timeout": 3600},
    "migrate_from": {"timeout": 120},
    "meta-data": {"timeout": 5},
    "validate-all": {"timeout": 30},
}


class Seen(NamedTuple):
    """The VM on the hosts asked. `is_all`: they would have said if they had another.

    `has_arrived`: on one of them an interrupted migration of it left something; `is_arriving`: one
    of it to one of them is under way. `silent`: the hosts that do not answer.
    """

    vm: dict[str, Any] | None
    is_all: bool
    has_arrived: bool
    is_arriving: bool
    silent: list[str]


class EndError(Exception):
    """The action ends with this status, and why."""

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status


def setting(name: str) -> str:
    """A parameter of the resource, or its default."""
    return os.environ.get(f"OCF_RESKEY_{name}") or PARAMETERS[name][2]


def meta(name: str) -> str:
    """What Pacemaker says about the action."""
    return os.environ.get(f"OCF_RESKEY_CRM_meta_{name}", "")


def deadline_s() -> float:
    """When the cluster's patience with this action ends."""
    limit = meta("timeout")
    return BEGAN_S + (int(limit) / 1000.0 if limit.isdecimal() else DEFAULT_TIMEOUT_S)


def time_left_s() -> float:
    """The rest of the action's time."""
    return deadline_s() - time.monotonic()


def vmckpt(*words: str, within_s: float | None = None) -> tuple[int, dict[str, Any]]:
    """Run a command to its end: its exit code and result. BUSY if it is ended after `within_s`."""
    environment = dict(os.environ)
    environment.setdefault("HOME", "/root")
    if setting("state_dir"):
        environment["VMCKPT_STATE_DIR"] = setting("state_dir")
    try:
        done = subprocess.run(
            ["vmckpt", *words, "--json"],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
            timeout=within_s,
        )
    except subprocess.TimeoutExpired:
        return BUSY, {}
    try:
        result = json.loads(done.stdout)
    except ValueError:
        result = {}
    return done.returncode, result if isinstance(result, dict) else {}


def reason(result: dict[str, Any]) -> str:
    """An error of vmckpt's, in words."""
    error = result.get("error") or {}
    words = (error.get(name) for name in ("what", "why", "remedy"))
    return "; ".join(word for word in words if word) or "vmckpt said nothing"


def require(status: int, *words: str) -> dict[str, Any]:
    """Run a command that must succeed, again while the VM is busy; else the action ends."""
    while True:
        code, result = vmckpt(*words)
        if code == 0:
            return result
        if code != BUSY or time_left_s() < POLL_S:
            raise EndError(status, reason(result))
        time.sleep(POLL_S)


def look(*words: str) -> Seen:
    """The VM, on the hosts that the words name. Another VM that cannot be read does not count."""
    name = setting("vm")
    found = require(GENERIC, "vm", "list", *words)
    vms = [vm for vm in found["vms"] if vm["name"] == name]
    if len(vms) > 1:
        on = ", ".join(f"{vm['host']} ({vm['state']})" for vm in vms)
        remedy = "remove it where it is outdated: vmckpt vm rm VM --host HOST"
        raise EndError(GENERIC, f"{name} is on several hosts: {on}; {remedy}")
    is_all = not any(one["vm"] in (None, name) for one in found["silent"])
    mine = [one["operation"] for one in found["arrivals"] if one["vm"] == name]
    has_arrived, is_arriving = None in mine, any(mine)
    silent = list(found["unanswered"])
    return Seen(vms[0] if vms else None, is_all, has_arrived, is_arriving, silent)


def look_here() -> Seen:
    """The VM on this node, which is asked again for a while if it cannot say."""
    until_s = time.monotonic() + min(PATIENCE_S, time_left_s() / 4)
    while True:
        seen = look("--host", setting("host"))
        if can_say(seen) or time.monotonic() + POLL_S > until_s:
            return seen
        time.sleep(POLL_S)


def can_say(seen: Seen) -> bool:
    """Whether it is known if the VM runs there."""
    if seen.vm is None:
        return seen.is_all
    begins = seen.vm["state"] in OFF and seen.vm.get("operation") in BEGINNINGS
    return not begins and seen.vm["state"] != "unreachable"


def settle() -> bool:
    """End what was interrupted, as by the loss of a node; whether it is known how it ended."""
    within_s = max(1.0, min(SETTLE_S, time_left_s() / 3))
    code, _ = vmckpt("vm", "show", setting("vm"), within_s=within_s)
    return code not in (BUSY, UNKNOWN)


def state_here() -> int:
    """SUCCESS, NOT_RUNNING or GENERIC, as a monitor action reports the VM on this node.

    Only this node is asked: an answer must not depend on others. But a guest that an interrupted
    migration brought here may run although the VM is not at home here yet: that is ended first.
    """
    seen = look_here()
    if seen.vm is None and seen.has_arrived:
        settle()
        seen = look_here()
    if seen.vm is None and not seen.is_all:
        raise EndError(GENERIC, f"{setting('host')} does not answer")
    if seen.vm is None or seen.vm["state"] in OFF:
        return NOT_RUNNING
    # An operation pauses a guest for moments.
    return SUCCESS if seen.vm["state"] == "running" or seen.vm.get("operation") else GENERIC


def start() -> int:
    """Start it here, wherever it is at home while it is off."""
    name, here = setting("vm"), setting("host")
    if state_here() == SUCCESS:
        return SUCCESS
    seen = look()
    if seen.vm is None and seen.has_arrived:
        settle()
        seen = look()
    vm = seen.vm
    if vm is None:
        create(seen)
    elif vm["host"] == here:
        require(GENERIC, "vm", "start", name)
    elif vm["state"] not in OFF:
        raise EndError(GENERIC, f"{name} runs on {vm['host']}: it is not started twice")
    else:
        require(GENERIC, "migrate", name, here, "--offline")
        require(GENERIC, "vm", "start", name)
    return wait_until(lambda: state_here() == SUCCESS, "it does not run after its start")


def create(seen: Seen) -> None:
    """Have it here although no host that answers has it."""
    if setting("spec"):
        # The cluster has fenced the node that does not answer, or the VM does not run there.
        if strangers := sorted(set(seen.silent) - fenced_by_cluster()):
            why = (
                f"{', '.join(strangers)} does not answer, and is no node: {setting('vm')} may run "
            )
            raise EndError(GENERIC, f"{why}there, since the cluster cannot have fenced it")
        words = () if seen.is_all else ("--silent-hosts-are-off",)
        require(GENERIC, "vm", "run", setting("spec"), "--host", setting("host"), *words)
    elif seen.is_all:
        raise EndError(INSTALLED, f"there is no VM '{setting('vm')}' on any host")
    else:
        why = f"a host that may have '{setting('vm')}' does not answer, and spec is not set"
        raise EndError(GENERIC, why)


def fenced_by_cluster() -> set[str]:
    """The hosts that are nodes of the cluster, by whatever state: it fences no others."""
    try:
        done = subprocess.run(
            ["crm_node", "-l"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
            check=False,
        )  # fmt: skip
    except OSError:
        return set()
    # Each line: an id, the node's name, and its state.
    return {
        host_of(words[1]) for line in done.stdout.splitlines() if len(words := line.split()) > 1
    }


def await_arrival() -> bool:
    """Wait until no migration brings it here, and end one that was cut off; whether one was."""
    seen, was_there = look_here(), False
    while seen.is_arriving:
        if time_left_s() < POLL_S:
            raise EndError(GENERIC, f"a migration of {setting('vm')} to here is under way")
        time.sleep(POLL_S)
        seen, was_there = look_here(), True
    if seen.has_arrived and not settle():
        why = f"{setting('vm')} may run here: its migration to here was interrupted"
        raise EndError(GENERIC, why)
    return was_there or seen.has_arrived


def stop() -> int:
    """Shut it down; end it if it does not shut down in time. It must not run here afterwards."""
    if state_here() == NOT_RUNNING and (not await_arrival() or state_here() == NOT_RUNNING):
        return SUCCESS
    name, here = setting("vm"), ("--host", setting("host"))
    limit = ("--timeout", f"{max(1.0, time_left_s() / 2 - FORCE_S / 2):.0f}s")
    code, result = vmckpt("vm", "stop", name, *limit)
    if code == UNKNOWN:  # a node that was fenced is back, with its outdated home of the VM
        code, result = vmckpt("vm", "stop", name, *here, *limit)
    if code not in (0, NOT_FOUND) and state_here() != NOT_RUNNING:
        log(f"it is ended like by a power cut: {reason(result)}")
        require(GENERIC, "vm", "stop", name, *here, "--force")
    return wait_until(lambda: state_here() == NOT_RUNNING, "it still runs after it was stopped")


def migrate_to() -> int:
    """Move it, running, to the node that the cluster names."""
    target = meta("migrate_target")
    if not target:
        raise EndError(ARGUMENTS, "the cluster names no target")
    if state_here() == NOT_RUNNING:
        return NOT_RUNNING
    words = ("migrate", setting("vm"), host_of(target), *setting("options").split())
    while True:
        code, result = vmckpt(*words)
        if code == 0:
            return SUCCESS
        if (result.get("error") or {}).get("kind") == JOB_HELD and state_here() == NOT_RUNNING:
            log(reason(result))  # it has moved, and runs
            return SUCCESS
        if code != BUSY or time_left_s() < POLL_S:
            raise EndError(GENERIC, reason(result))
        time.sleep(POLL_S)


def migrate_from() -> int:
    """It has been moved here, and runs."""
    return wait_until(lambda: state_here() == SUCCESS, "it does not run here after its migration")


def validate_all() -> int:
    """Whether the parameters make sense on this node."""
    require_vm()
    host_of("")
    if setting("spec") and not os.access(setting("spec"), os.R_OK):
        raise EndError(INSTALLED, f"{setting('spec')} cannot be read")
    return SUCCESS


def require_vm() -> None:
    """What every action needs. What others need besides must not keep a VM from being stopped."""
    if shutil.which("vmckpt") is None:
        raise EndError(INSTALLED, "vmckpt is not installed")
    if not setting("vm"):
        raise EndError(CONFIGURED, "the parameter vm is missing")
    if re.search(r"[\s/]", setting("vm")) or setting("vm").startswith("-"):
        raise EndError(CONFIGURED, f"'{setting('vm')}' is not a name of a VM")


def host_of(node: str) -> str:
    """A node's name as a host."""
    pairs = [pair.partition("=") for pair in setting("hosts").split()]
    if not all(sign for _, sign, _ in pairs):
        raise EndError(CONFIGURED, f"hosts is '{setting('hosts')}', not NODE=HOST NODE=HOST ...")
    return {name: host for name, _, host in pairs}.get(node, node)


def wait_until(holds: Callable[[], bool], why_not: str) -> int:
    """SUCCESS once it holds; the action ends when its time is nearly over."""
    while not holds():
        if time_left_s() < POLL_S:
            raise EndError(GENERIC, why_not)
        time.sleep(POLL_S)
    return SUCCESS


def meta_data() -> int:
    """Describe the agent."""
    print("\n".join(_description()))
    return SUCCESS


def _description() -> list[str]:
    lines = [
        '<?xml version="1.0"?>',
        '<!DOCTYPE resource-agent SYSTEM "ra-api-1.dtd">',
        '<resource-agent name="vm" version="1.0">',
        "<version>1.0</version>",
        '<longdesc lang="en">A virtual machine that vmckpt runs. It is started, stopped and '
        "migrated live; vmckpt and its inventory have to be set up on all nodes.</longdesc>",
        '<shortdesc lang="en">Manages a virtual machine of vmckpt</shortdesc>',
        "<parameters>",
    ]
    for name, (short, is_required, default, text) in PARAMETERS.items():
        content = f' default="{default}"' if default else ""
        lines += [
            f'<parameter name="{name}" unique="{int(name == "vm")}" required="{int(is_required)}">',
            f'<longdesc lang="en">{escape(text)}</longdesc>',
            f'<shortdesc lang="en">{escape(short)}</shortdesc>',
            f'<content type="string"{content}/>',
            "</parameter>",
        ]
    lines += ["</parameters>", "<actions>"]
    for name, advice in ADVICE.items():
        words = " ".join(
            f'{key}="{value}{"" if key == "depth" else "s"}"' for key, value in advice.items()
        )
        lines.append(f'<action name="{name}" {words}/>')
    return [*lines, "</actions>", "</resource-agent>"]


def log(text: str) -> None:
    """For the cluster's log."""
    print(f"vmckpt {setting('vm')}: {text}", file=sys.stderr)


ACTIONS = {
    "start": start,
    "stop": stop,
    "monitor": state_here,
    "migrate_to": migrate_to,
    "migrate_from": migrate_from,
}
BEGAN_S = time.monotonic()


def main() -> NoReturn:
    """Do the action that the first argument names."""
    action = sys.argv[1] if len(sys.argv) == 2 else ""
    if action == "meta-data":
        sys.exit(meta_data())
    if action != "validate-all" and action not in ACTIONS:
        print(f"usage: {sys.argv[0]} {'|'.join(ADVICE)}", file=sys.stderr)
        sys.exit(UNIMPLEMENTED)
    try:
        require_vm()
        status = validate_all() if action == "validate-all" else ACTIONS[action]()
    except EndError as exc:
        log(f"{action}: {exc}")
        status = exc.status
    sys.exit(status)


if __name__ == "__main__":
    main()
