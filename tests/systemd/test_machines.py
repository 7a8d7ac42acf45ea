"""Hosts that systemd runs: what their VMs do when one shuts down or loses power, and boots again.

See machines.py for the machines.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.systemd.machines import COMMAND_S, GUEST, Machine, build, two
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(1200)
SPEC = """\
name = "{name}"
memory = "128M"
autostart = {autostart}

[boot]
kernel = "{image}/vmlinuz"
initrd = "{image}/initrd"
cmdline = "console=ttyS0 quiet panic=-1 cryptomgr.notests vk.mem=rate=100K,set=4M,content=random"
"""
TICK = re.compile(r"VK tick=(\d+) mem_errors=(\d+)")
SHUTDOWN_S = 300
READ_METRICS = "python3 -c 'import urllib.request as r;\
print(r.urlopen(\"http://127.0.0.1:9177/metrics\").read().decode())'"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("built")
    build(directory)
    return directory


def test_a_host_that_shuts_down(tmp_path: Path, built: Path) -> None:
    """A protected VM is handed over; with the drain's unit, all VMs move away and come back."""
    with two(tmp_path, built) as (a, b):
        _start(a, "login", autostart=False)
        _start(a, "booted", autostart=True)
        lease = _etcd(b)
        a.run(f"vmckpt replicate start login b --lease {lease}")
        _handed_over(a, b)
        _drained(a, b)


def test_units_that_outlast_a_power_cut(tmp_path: Path, built: Path) -> None:
    """They keep a VM protected wherever it continues, and take checkpoints of one that is back."""
    with two(tmp_path, built) as (a, b):
        _start(a, "kept", autostart=False)
        _start(a, "booted", autostart=True)
        words = f'HOSTS="a local"\nOPTIONS="--lease {_etcd(b)}"'
        b.run(f"mkdir -p /etc/vmckpt/replicate; echo '{words}' >/etc/vmckpt/replicate/kept.conf")
        b.run("vmckpt schedule add booted --every 10s --keep-last 2")
        b.run("systemctl enable --now vmckpt-replicate@kept vmckpt-scheduler vmckpt-metrics")
        _kept(b, primary="a", standby="local")
        _checkpointed(b, "booted")
        a.off()
        eventually(lambda: _state(b, "kept") == "running", COMMAND_S, "the standby has taken over")
        _works(b, "kept")
        a.boot()
        _kept(b, primary="local", standby="a")
        _checkpointed(b, "booted")


def _start(a: Machine, name: str, *, autostart: bool) -> None:
    """A login starts it, or systemd."""
    text = SPEC.format(name=name, autostart=str(autostart).lower(), image=GUEST)
    a.run(f"cat >/root/{name}.toml <<'EOF'\n{text}EOF\n")
    if autostart:
        a.run(f"vmckpt vm define /root/{name}.toml")
        a.run("systemctl enable --now vmckpt-autostart")
    else:
        a.run(f"vmckpt vm run /root/{name}.toml")
    eventually(lambda: _ticks(a, name), COMMAND_S, lambda: _why_not(a, name))


def _why_not(machine: Machine, name: str) -> str:
    """What there is to see of a VM that does not work."""
    logs = f"/var/lib/vmckpt/vms/{name}/qemu-*/console.log"
    words = f"vmckpt vm list; top -bn1 | head -12; tail -n 20 {logs}; journalctl --no-pager -n 40"
    return f"{name} works:\n{machine.run(words)}"


def _etcd(machine: Machine) -> str:
    """Start an arbiter on it; where leases are kept then."""
    url = f"http://{machine.address}:2379"
    urls = f"--listen-client-urls {url} --advertise-client-urls {url}"
    machine.run(f"systemd-run --unit=etcd etcd --data-dir /var/lib/etcd {urls}")
    machine.run("until ss -ltn | grep -q :2379; do sleep 1; done")
    return f"etcd:{url}"


def _handed_over(a: Machine, b: Machine) -> None:
    """Without the drain: the standby has it before the host is off; the other VM starts at boot."""
    took_s = a.goes_down("systemctl reboot", SHUTDOWN_S)
    print(f"  rebooted in {took_s:.0f} s", flush=True)
    eventually(lambda: _state(b, "login") == "running", COMMAND_S, "the standby has taken it over")
    _works(b, "login")
    a.boot()
    eventually(lambda: _state(a, "booted") == "running", COMMAND_S, "systemd starts it again")
    _works(a, "booted")
    a.run("vmckpt migrate login local")
    _works(a, "login")


def _drained(a: Machine, b: Machine) -> None:
    """With it: both run on at the other host, and are back soon after the boot."""
    a.run("echo LIMIT=60m >/etc/vmckpt/drain.conf; systemctl enable --now vmckpt-drain")
    took_s = a.goes_down("systemctl reboot", SHUTDOWN_S)
    print(f"  drained and rebooted in {took_s:.0f} s", flush=True)
    moved = {name: _state(b, name) for name in ("login", "booted")}
    if set(moved.values()) != {"running"}:
        a.boot()
        said = a.run("journalctl --no-pager -b -1 -u 'vmckpt-*' -n 200; vmckpt vm list")
        raise AssertionError(f"{moved}\n{said}\n{b.run('vmckpt vm list')}")
    for name in moved:
        _works(b, name)
    a.boot()
    for name in ("login", "booted"):
        eventually(lambda vm=name: _state(a, vm) == "running", COMMAND_S, f"{name} is back")
        _works(a, name)
        assert _state(b, name) is None
    said = a.run("systemctl is-failed vmckpt-drain vmckpt-undrain vmckpt-autostart || true")
    assert "failed" not in said.split(), a.run("journalctl --no-pager --unit 'vmckpt-*'")


def _kept(b: Machine, *, primary: str, standby: str) -> None:
    """The units on `b` have protected it so, and count its epochs."""

    def sides() -> list[tuple[str, str]]:
        found = json.loads(b.run("vmckpt replicate status kept --json || true"))
        return [(side["host"], side["state"]) for side in found.get("sides", ())]

    both = [(primary, "protected"), (standby, "following")]
    eventually(lambda: sides() == both, COMMAND_S, lambda: f"{sides()}: {_said(b)}")
    metric = f'vmckpt_replication_epochs_total{{host="{primary}",vm="kept"}}'
    eventually(lambda: metric in b.run(READ_METRICS), COMMAND_S, lambda: b.run(READ_METRICS))


def _checkpointed(b: Machine, name: str) -> None:
    """Its schedule takes another one."""

    def ids() -> set[str]:
        return {one["id"] for one in b.json(f"checkpoint list {name}")["checkpoints"]}

    before = ids()
    eventually(lambda: ids() - before, COMMAND_S, lambda: _said(b))


def _said(machine: Machine) -> str:
    return machine.run("journalctl --no-pager -u 'vmckpt-*' -n 80")


def _state(machine: Machine, name: str) -> str | None:
    """Of the VM in its own list."""
    vms: list[dict[str, Any]] = machine.json("vm list --host local")["vms"]
    return next((str(vm["state"]) for vm in vms if vm["name"] == name), None)


def _ticks(machine: Machine, name: str) -> list[tuple[str, str]]:
    """What it says of itself on its console there: the tick's number, and errors found so far."""
    logs = f"/var/lib/vmckpt/vms/{name}/qemu-*/console.log"
    return TICK.findall(machine.run(f"tail -qn 20 $(ls -t {logs} | head -n 1) || true"))


def _works(machine: Machine, name: str) -> None:
    """It goes on there, and has found nothing wrong with its memory."""
    last = _ticks(machine, name)[-1:]
    eventually(lambda: _ticks(machine, name)[-1:] != last, COMMAND_S, f"{name} goes on")
    assert {errors for _, errors in _ticks(machine, name)} == {"0"}
