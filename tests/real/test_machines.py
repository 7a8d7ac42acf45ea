"""Hosts that look like machines do."""

import json
import re
import socket
from pathlib import Path

from tests.qemu.small_lab import PROGRAM
from tests.real.machines import Machines, machines
from tests.waiting import eventually
from vmckpt.lab.real.tree import PLAIN_USER
from vmckpt.lab.state import read

HOSTS = ("lab-a", "lab-b")


def test_each_has_a_name_an_address_and_processes_of_its_own(real_lab: Machines) -> None:
    for number, host in enumerate(HOSTS, start=1):
        said = real_lab.ssh(
            host, "hostname; xargs -0 </proc/1/cmdline; ls /proc | grep -c '^[0-9]'"
        )
        name, first, count = said.stdout.splitlines()
        assert name == host
        assert "vmckpt.lab.real.first" in first
        assert int(count) < 15
        addresses = real_lab.inside(host, "ip", "-brief", "address").stdout
        assert re.search(rf"^mig0\S* +UP +10\.77\.1\.{number}/24 *$", addresses, re.MULTILINE)
        assert re.search(rf"^mgmt0\S* +UP +10\.78\.\d+\.{number}/24 *$", addresses, re.MULTILINE)
    assert socket.gethostname() not in HOSTS, "this machine keeps its name"


def test_the_operator_knows_every_host_key_beforehand_and_they_differ(real_lab: Machines) -> None:
    keys = real_lab.lab.directory / "ssh"
    known = (keys / "known_hosts").read_text().splitlines()
    assert len({line.split()[2] for line in known}) == len(HOSTS)
    assert (keys / "id").stat().st_mode & 0o777 == 0o600
    entry = json.loads((real_lab.state_dir / "hosts/lab-a.json").read_text())
    assert entry["kind"] == "ssh"
    assert entry["address"] == "ssh://lab-a"
    assert entry["ssh_config"] == str(keys / "config")
    assert read(real_lab.state_dir) == real_lab.lab


def test_a_user_without_rights_may_log_in(real_lab: Machines) -> None:
    said = real_lab.ssh(
        "lab-a", "id -un; cat /var/lib/vmckpt/x; virsh -c qemu:///system list", user=PLAIN_USER
    )
    assert said.stdout.split() == [PLAIN_USER]
    assert said.stderr.count("Permission denied") == 2, said.stderr
    assert "Permission denied" in real_lab.ssh("lab-a", "true", user="no-such-user").stderr


def test_libvirtds_know_one_another_by_different_uuids(real_lab: Machines) -> None:
    uuids = set()
    for host in HOSTS:
        found = re.search(r"<uuid>(\S+)</uuid>", real_lab.virsh(host, "capabilities"))
        assert found
        uuids.add(found[1])
    assert len(uuids) == len(HOSTS)
    over_tcp = ["virsh", "--connect", "qemu+tcp://lab-b/system", "hostname"]
    assert real_lab.inside("lab-a", *over_tcp).stdout.strip() == "lab-b"


def test_vmckpt_and_qemu_are_there(real_lab: Machines) -> None:
    said = real_lab.ssh(
        "lab-b", "vmckpt host list --json; qemu-system-x86_64 --version; which qemu-img"
    )
    assert '"state_dir": "/var/lib/vmckpt"' in said.stdout
    assert "version 10.0." in said.stdout
    assert "/usr/bin/qemu-img" in said.stdout


def test_what_is_shared_is_and_what_is_not_is_not(real_lab: Machines) -> None:
    shared, own = real_lab.shared / "disk", Path("/var/lib/vmckpt/disk")
    for path in (shared, own, Path("/dev/shm/disk"), Path("/etc/disk"), Path("/root/disk")):
        assert real_lab.ssh("lab-a", f"echo a >{path}").code == 0
        there = real_lab.ssh("lab-b", f"cat {path}")
        here = path.exists() and path.read_text()
        assert (there.stdout, here) == (("a\n", "a\n") if path == shared else ("", False))
    assert (real_lab.folder("lab-a") / "state/disk").read_text() == "a\n"
    (real_lab.folder("lab-a") / "state/disk").unlink()


def test_hosts_cannot_change_what_they_see_of_this_machine() -> None:
    with machines([PROGRAM]) as made:
        assert "Read-only" in made.ssh("lab-a", f"echo >>{__file__}").stderr
        assert made.ssh("lab-a", "rm /usr/bin/env; rm -r /etc/ssl; ls /usr/bin/env").code != 0
    assert Path("/usr/bin/env").exists()
    assert Path("/etc/ssl").exists()


def test_a_pulled_cable_keeps_the_operator_out_and_nobody_else(real_lab: Machines) -> None:
    try:
        real_lab.operator_link(up=False, host="lab-a")
        greet = "exec 3<>/dev/tcp/lab-a/22 && head -c 4 <&3"
        assert real_lab.ssh("lab-b", greet).stdout == "SSH-"
        assert not answers(real_lab)
    finally:
        real_lab.operator_link(up=True, host="lab-a")
    eventually(lambda: answers(real_lab), 10.0, "lab-a answers again")


def answers(real_lab: Machines) -> bool:
    """Whether lab-a's sshd can be reached from here."""
    address = real_lab.lab.host("lab-a").ssh_address
    try:
        with socket.create_connection((address, 22), timeout=1.0) as client:
            return client.recv(4) == b"SSH-"
    except OSError:
        return False


def test_a_bare_host_has_debian_and_sshd_and_nothing_else(bare_hosts: Machines) -> None:
    said = bare_hosts.ssh(
        "lab-a", "hostname; python3 --version; which vmckpt libvirtd; ls /var/lib/vmckpt"
    )
    assert said.stdout.splitlines()[0] == "lab-a"
    assert "Python 3" in said.stdout
    assert "/" not in said.stdout
    assert not (bare_hosts.state_dir / "hosts/lab-a.json").exists()
    setting = Path("/proc/sys/vm/nr_hugepages")
    before = setting.read_text()
    assert bare_hosts.ssh("lab-a", f"echo 1 >{setting} && cat {setting}").stdout == "1\n"
    assert setting.read_text() == before
