"""The playbook makes bare hosts ready: two of the lab, one behind ufw and one behind nftables."""

import json
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.real.machines import machines
from tests.role import package_source
from tests.role.commands import output
from tests.role.operator_side import REPOSITORY, Operator
from vmckpt.lab.state import ssh_config

# One run of the playbook takes a minute on a quiet machine; the first test waits for three.
pytestmark = pytest.mark.timeout(2400)

DEFAULTS = (REPOSITORY / "ansible/roles/vmckpt/defaults/main.yml").read_text()
VARIABLES: dict[str, dict[str, Any]] = {
    "alpha": {
        "vmckpt_libvirt": True,
        "vmckpt_bridge": "br0",
        "vmckpt_bridge_address": "10.50.0.1/24",
        "vmckpt_hugepages": 4,
        "vmckpt_shm_size": "80%",
        "vmckpt_migration_peers": ["10.77.1.0/24"],
        "vmckpt_userfaultfd": "everyone",
        "vmckpt_protected": {"web": {"hosts": ["alpha", "beta"], "options": "--lease /shared"}},
    },
    "beta": {"vmckpt_migration_peers": ["10.77.1.0/24"]},
}
# Stands for QEMU, which the hosts do not have yet.
PROGRAM = Path(sys.executable)
# Tries ports: refused (or answered) is open; what a firewall drops is closed.
KNOCK = """\
import socket, sys
for port in sys.argv[2:]:
    try:
        socket.create_connection((sys.argv[1], int(port)), 3).close()
    except TimeoutError:
        print("closed")
    except ConnectionRefusedError:
        print("open")
    else:
        print("open")
"""
# Lets no one in but by SSH; ends in a drop, behind which an accept would do nothing.
NFTABLES = """\
flush ruleset
table inet filter {
    chain input {
        type filter hook input priority filter; policy drop;
        ct state established,related accept
        iif lo accept
        tcp dport 22 accept
        drop
    }
}
"""


@pytest.fixture(scope="module")
def bare() -> Iterator[Operator]:
    """An operator with two hosts that have Debian, sshd and a firewall."""
    with machines([PROGRAM] * 2, bare=True) as made:
        hosts = dict(zip(("alpha", "beta"), made.lab.hosts, strict=True))
        home = made.state_dir / "operator"
        operator = Operator(home, hosts, ssh_config(made.lab.directory).parent)
        operator.make_keys()
        package_source.download(home / "debs", [*_packages(), "ufw", "nftables"])
        here = re.sub(r"\d+$", "254", operator.address("alpha"))
        with package_source.served(home / "debs", here) as source:
            _fence(operator, source)
            operator.write_inventory(VARIABLES)
            operator.vmckpt("pki", "init")
            yield operator


@pytest.fixture(scope="module")
def ready(bare: Operator) -> Operator:
    """The same hosts after a run in check mode, which changes nothing, and a run."""
    before = [_fingerprint(bare, name) for name in bare.hosts]
    would = bare.play("--check")
    assert [_fingerprint(bare, name) for name in bare.hosts] == before
    did = bare.play()
    assert min(*would.values(), *did.values()) > 10
    return bare


def test_a_second_run_changes_nothing(ready: Operator) -> None:
    assert ready.play() == {"alpha": 0, "beta": 0}
    assert ready.play("--check") == {"alpha": 0, "beta": 0}


def test_vmckpt_finds_the_hosts_ready(ready: Operator) -> None:
    hosts = json.loads(ready.vmckpt("host", "list", "--json"))["hosts"]
    assert {"alpha", "beta"} < {host["name"] for host in hosts}
    certificates = json.loads(ready.vmckpt("pki", "show", "alpha", "beta", "--json"))["hosts"]
    assert [host["state"] for host in certificates] == ["ok", "ok"]
    lacking = {}
    for name in ready.hosts:
        checks = json.loads(ready.vmckpt("host", "check", name, "--json"))["checks"]
        lacking[name] = {check["code"] for check in checks if check["verdict"] != "ok"}
        lacking[name] -= {"kvm", "page-tracking"}  # this machine's processor and kernel
    # A bridge is of no use to a user who is not root; the other host has none, and a QEMU (7.2)
    # that does not open /dev/userfaultfd.
    assert lacking == {"alpha": {"taps"}, "beta": {"bridge", "userfaultfd"}}


def test_state_and_keys_are_the_users_own(ready: Operator) -> None:
    state = "/var/lib/vmckpt"
    private = [state, f"{state}/pki", f"{state}/.ssh"]
    keys = [f"{state}/pki/server-key.pem", f"{state}/pki/client-key.pem"]
    files = [*keys, f"{state}/.ssh/authorized_keys"]
    for name in ready.hosts:
        found = ready.on(name, "stat", "--format", "%U:%G:%a:%n", *private, *files)
        rights = [f"vmckpt:vmckpt:700:{path}" for path in private]
        assert found.splitlines() == rights + [f"vmckpt:vmckpt:600:{path}" for path in files]
        assert int(ready.on(name, "id", "-u", user="vmckpt")) < 1000
        assert "kvm" in ready.on(name, "id", "-nG", user="vmckpt").split()
        assert ready.on(name, "vmckpt", "--version", user="vmckpt")
    assert "libvirt" in ready.on("alpha", "id", "-nG", user="vmckpt").split()


def test_the_kernel_allows_userfaultfd_and_has_huge_pages(ready: Operator) -> None:
    sysctl = ("sysctl", "--values", "vm.unprivileged_userfaultfd", "vm.nr_hugepages")
    assert ready.on("alpha", *sysctl).split() == ["1", "4"]
    device = ready.on("beta", "stat", "--format", "%U:%G:%a", "/dev/userfaultfd")
    assert device.strip() == "root:vmckpt:660"
    rule = ready.on("beta", "cat", "/etc/udev/rules.d/60-vmckpt-userfaultfd.rules")
    assert rule == 'KERNEL=="userfaultfd", GROUP="vmckpt", MODE="0660"\n'
    mount = ready.on("alpha", "findmnt", "--noheadings", "--output", "OPTIONS", "-t", "hugetlbfs")
    assert "mode=700" in mount


def test_there_is_a_bridge_now_and_at_boot(ready: Operator) -> None:
    show = ("ip", "-json", "-4", "address", "show", "dev", "br0")
    [bridge] = json.loads(ready.on("alpha", *show))
    [address] = bridge["addr_info"]
    assert (address["local"], address["prefixlen"]) == ("10.50.0.1", 24)
    wanted = "/etc/systemd/system/multi-user.target.wants/vmckpt-bridge.service"
    assert ready.on("alpha", "readlink", "--canonicalize-existing", wanted)
    assert ready.on("alpha", "systemd-analyze", "verify", wanted) == ""


def test_a_vm_is_kept_protected_from_the_host_that_was_told_to(ready: Operator) -> None:
    wanted = "/etc/systemd/system/multi-user.target.wants/vmckpt-replicate@web.service"
    assert ready.on("alpha", "readlink", "--canonicalize-existing", wanted)
    assert ready.on("alpha", "systemd-analyze", "verify", wanted) == ""
    told = ready.on("alpha", "cat", "/etc/vmckpt/replicate/web.conf").splitlines()
    assert told[1:] == ["HOSTS=alpha beta", "OPTIONS=--lease /shared"]
    assert ready.on("beta", "ls", "/etc/vmckpt/replicate") == ""


def test_ports_of_migrations_are_open_and_no_others(ready: Operator) -> None:
    first, last = 49152, 49215
    addresses = {name: host.migration_address for name, host in ready.hosts.items()}
    expected = dict.fromkeys((first, last), "open") | dict.fromkeys((first - 1, last + 1), "closed")
    for here, there in (("alpha", "beta"), ("beta", "alpha")):
        ports = [str(port) for port in expected]
        seen = ready.on(here, "python3", "-", addresses[there], *ports, stdin=KNOCK)
        assert seen.split() == list(expected.values())


def test_only_peers_may_come_in_where_peers_are_named(ready: Operator) -> None:
    assert _seen_from_here(ready, 49152) == {"alpha": "closed", "beta": "closed"}


def test_without_peers_the_ports_are_closed(ready: Operator) -> None:
    ready.play("--limit", "beta", "--extra-vars", '{"vmckpt_migration_peers": []}')
    there = ready.address("beta")
    seen = ready.on("alpha", "python3", "-", there, "49152", stdin=KNOCK)
    ready.play("--limit", "beta")
    assert seen.strip() == "closed"


def test_keys_of_operators_are_restricted(ready: Operator) -> None:
    lines = ready.on("beta", "cat", "/var/lib/vmckpt/.ssh/authorized_keys").splitlines()
    assert [line.split()[0] for line in lines] == ["restrict"] * len(lines)
    assert lines


def test_a_vm_moves_from_one_to_the_other_encrypted(ready: Operator) -> None:
    spec = ready.home / "web.toml"
    spec.write_text('name = "web"\nmemory = "32M"\n')
    ready.vmckpt("vm", "run", str(spec), "--host", "alpha")
    moved = json.loads(ready.vmckpt("migrate", "web", "beta", "--tls", "require", "--json"))
    assert (moved["outcome"], moved["encryption"]) == ("completed", "x509")
    [vm] = json.loads(ready.vmckpt("vm", "list", "--json"))["vms"]
    assert (vm["name"], vm["host"], vm["state"]) == ("web", "beta", "running")
    assert "vmckpt" in ready.on("beta", "ps", "-C", "vmckpt-web", "-o", "user=")
    ready.vmckpt("vm", "stop", "web", "--force")
    ready.vmckpt("vm", "rm", "web")


def test_what_changes_is_brought_over_and_the_old_range_closed(ready: Operator) -> None:
    wheels = ready.home / "wheels"
    shutil.copytree(REPOSITORY / "dist/wheels", wheels)
    (wheels / "vmckpt.sha256").write_text("another build")
    link = ("readlink", "/usr/local/bin/vmckpt")
    before = {name: ready.on(name, *link) for name in ready.hosts}
    variables = {
        "vmckpt_wheels": str(wheels),
        "vmckpt_migration_ports": [50000, 50009],
        "vmckpt_migration_peers": ["10.77.1.0/24", "2001:db8::/64"],
    }
    ready.play("--extra-vars", json.dumps(variables))
    addresses = {name: host.migration_address for name, host in ready.hosts.items()}
    for here, there in (("alpha", "beta"), ("beta", "alpha")):
        seen = ready.on(here, "python3", "-", addresses[there], "49152", "50009", stdin=KNOCK)
        assert seen.split() == ["closed", "open"]
        assert ready.on(here, *link) != before[here]
        assert ready.on(here, "vmckpt", "--version", user="vmckpt")
    assert _seen_from_here(ready, 50009) == {"alpha": "closed", "beta": "closed"}
    assert ready.play("--extra-vars", json.dumps(variables)) == {"alpha": 0, "beta": 0}


def _seen_from_here(operator: Operator, port: int) -> dict[str, str]:
    """Whether a port is open or closed for the operator's machine, by host."""
    return {
        name: output([sys.executable, "-", operator.address(name), str(port)], stdin=KNOCK).strip()
        for name in operator.hosts
    }


def _packages() -> list[str]:
    """What the role installs, by its defaults."""
    return re.findall(r"^  - (\S+)$", DEFAULTS, re.MULTILINE)


def _fence(operator: Operator, source: str) -> None:
    for name in operator.hosts:
        operator.on(name, "rm", "-rf", "/etc/apt/sources.list.d")
        operator.on(name, "tee", "/etc/apt/sources.list", stdin=source)
        operator.on(name, "apt-get", "-qq", "update")
    install = ("DEBIAN_FRONTEND=noninteractive", "apt-get", "-qq", "install", "--yes")
    operator.on("alpha", *install, "ufw")
    operator.on("alpha", "ufw", "allow", "22/tcp")
    operator.on("alpha", "ufw", "--force", "enable")
    # There before the user whose it is to be, as after an earlier attempt.
    operator.on("beta", "mkdir", "-p", "/var/lib/vmckpt/.ssh")
    operator.on("beta", *install, "nftables")
    operator.on("beta", "tee", "/etc/nftables.conf", stdin=NFTABLES)
    operator.on("beta", "nft", "--file", "/etc/nftables.conf")


def _fingerprint(operator: Operator, name: str) -> str:
    """Every file where the role makes some, with its size and time."""
    places = ("/etc", "/opt", "/usr/bin", "/usr/local", "/var/lib/systemd")
    files = operator.on(name, "find", *places, "-printf", r"'%p %s %T@\n'")
    return operator.on(name, "ls", "/var/lib") + files
