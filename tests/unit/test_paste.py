"""Lines that an operator pastes: what the shell makes of them."""

import asyncio
import grp
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from vmckpt.hosts.inventory.paste import Paste, in_double_quotes
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.pki.identity import pki_dir
from vmckpt.hosts.ssh.address import Address
from vmckpt.hosts.ssh.entry import SshEntry
from vmckpt.preflight import destination_host
from vmckpt.preflight.host import remedies

CONFIG = Path("/home/the operator/config")
ADDRESS = Address("192.0.2.7", "joe", 2222, CONFIG)
ELSEWHERE = SshEntry("a", Path("/var/lib/vmckpt"), "192.0.2.7", address=ADDRESS)
HERE = LocalHost("local", Path("/s"), "127.0.0.1")
LOGIN = ["ssh", "-F", str(CONFIG), "-p", "2222", "joe@192.0.2.7"]


@pytest.mark.parametrize("command", ["ip link", "echo 'a b' >/x && true", 'id "$(whoami)"'])
def test_a_command_reaches_the_hosts_shell_as_it_is(command: str) -> None:
    assert Paste(HERE, root=True).as_root(command) == command
    assert shlex.split(Paste(ELSEWHERE, root=True).as_root(command)) == [*LOGIN, command]
    part = LocalHost("a", Path("/s"), "::1", enter=("nsenter", "--net=/run/a net"))
    words = ["nsenter", "--net=/run/a net", "sh", "-c", command]
    assert shlex.split(Paste(part, root=True).there(command)) == words


def test_who_is_not_root_asks_sudo_for_the_whole_of_it() -> None:
    asked = Paste(HERE, root=False)
    assert asked.there("du /x") == "du /x"
    assert asked.as_root("apt-get install -y chrony") == "sudo apt-get install -y chrony"
    both = "apt-get update && reboot"
    assert shlex.split(asked.as_root(both)) == ["sudo", "sh", "-c", both]
    *login, there = shlex.split(Paste(ELSEWHERE, root=False).as_root(both))
    assert login == ["ssh", "-t", *LOGIN[1:]]  # sudo asks for a password there
    assert shlex.split(there) == ["sudo", "sh", "-c", both]


def test_nothing_of_a_command_is_read_by_the_shell_before() -> None:
    command = """echo "$(id -u)" `date` \\\\ 'a "b"'"""
    said = subprocess.run(["sh", "-c", f"printf %s {in_double_quotes(command)}"],
                          capture_output=True, text=True, check=True, timeout=30)  # fmt: skip
    assert said.stdout == command


def test_a_login_that_the_configuration_completes_has_no_more_than_the_name() -> None:
    entry = SshEntry("a", Path("/s"), "::1", address=Address("db-1"))
    assert shlex.split(Paste(entry, root=True).there("true")) == ["ssh", "db-1", "true"]


def test_an_address_of_the_hosts_own_is_proposed_and_the_others_named() -> None:
    shown = (
        "1: lo    inet 127.0.0.1/8 scope host lo\\       valid_lft forever\n"
        "2: eth0    inet 192.0.2.8/24 brd 192.0.2.255 scope global eth0\\  valid_lft forever\n"
        "2: eth0    inet6 fe80::1/64 scope link \\       valid_lft forever\n"
        "3: mig0    inet 198.51.100.8/24 scope global mig0\\  valid_lft forever\n"
    )
    paste = Paste(ELSEWHERE, root=True)
    line = remedies.address(shown, paste)
    assert line == "vmckpt host set a --migration-addr 192.0.2.8  # or 198.51.100.8"
    assert remedies.address("", paste).startswith("# ")


def test_a_groups_userfaultfd_is_said_to_udev(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every boot; no other user gets it."""
    rule, device = tmp_path / "rules", tmp_path / "device"
    device.touch(0o600)
    monkeypatch.setattr(remedies, "UDEV_RULE", str(rule))
    monkeypatch.setattr(destination_host, "USERFAULTFD_DEVICE", device)
    line = asyncio.run(remedies.userfaultfd(HERE, Paste(HERE, root=True)))
    subprocess.run(["sh", "-c", line], check=True, timeout=30)
    group = grp.getgrgid(os.getegid()).gr_name
    assert rule.read_text() == f'KERNEL=="userfaultfd", GROUP="{group}", MODE="0660"\n'
    assert device.stat().st_mode & 0o777 == 0o660


def test_settings_of_libvirts_take_the_place_of_what_was_there(tmp_path: Path) -> None:
    host = LocalHost("a", Path('/s/"$x"'), "::1")
    paste = Paste(ELSEWHERE, root=True)
    assert remedies.libvirt_encrypts(host, paste, pki_dir(host)) == "vmckpt pki issue a"
    line = remedies.libvirt_encrypts(host, paste, Path("/etc/pki/qemu"))
    issue, _, there = line.partition(" && ")
    assert issue == "vmckpt pki issue a"
    *login, command = shlex.split(there)
    assert login == LOGIN
    written, _, restart = command.rpartition(" && ")
    assert restart == "systemctl restart libvirtd"
    conf = tmp_path / "qemu.conf"
    conf.write_text('migrate_tls_x509_verify=0\n# migrate_tls_x509_verify = 0\nuser = "root"\n')
    for _ in range(2):  # however often
        here = written.replace("/etc/libvirt/qemu.conf", str(conf))
        subprocess.run(["bash", "-c", here], check=True, timeout=30)
        assert conf.read_text().splitlines() == [
            "# migrate_tls_x509_verify = 0",
            'user = "root"',
            'migrate_tls_x509_cert_dir = "/s/"$x"/pki"',
            "migrate_tls_x509_verify = 1",
        ]


def test_a_user_of_qemus_gets_certificates_that_it_can_read(tmp_path: Path) -> None:
    host = LocalHost("a", Path('/s/"$x"'), "::1")
    line = remedies.libvirt_encrypts(host, Paste(ELSEWHERE, root=True), pki_dir(host), 64055)
    command = shlex.split(line.partition(" && ")[2])[-1]
    made, copied, *rest = command.split(" && ")
    assert made == "install -d /etc/pki/qemu"
    assert shlex.split(copied) == [
        "install", "-o", "64055", "-m", "600", '/s/"$x"/pki/*.pem', "/etc/pki/qemu"
    ]  # fmt: skip
    # Only the state directory is quoted: a shell has to find the files.
    assert copied.endswith("/pki'/*.pem /etc/pki/qemu")
    assert 'migrate_tls_x509_cert_dir = \\"/etc/pki/qemu\\"' in rest[1]


def test_ports_are_added_and_there_are_no_more_than_65535() -> None:
    few = LocalHost("a", Path("/s"), "::1", migration_ports=(65530, 65531))
    line = remedies.ports(few, Paste(few, root=True))
    assert line == "vmckpt host set a --migration-ports 65530-65535"
