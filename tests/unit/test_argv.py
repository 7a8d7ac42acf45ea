"""QEMU's command line: the same on both ends but for what belongs to the process."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from vmckpt.vm.adopted.copies.isolation import isolated
from vmckpt.vm.argv import default_mac, qemu_argv
from vmckpt.vm.paths import QemuDir, VmDir
from vmckpt.vm.record import Platform
from vmckpt.vm.spec.spec import parse_spec

FULL = """\
name = "web"
memory = "1GiB"
vcpus = 2
guest_agent = true
ram_dir = "/ram"

[boot]
kernel = "/boot/vmlinuz"
initrd = "/boot/initrd"
cmdline = "console=ttyS0 a=b,c"

[firmware]
code = "/fw/code.fd"
vars = "/fw/vars.fd"

[[disks]]
path = "/images/root,1.qcow2"

[[disks]]
path = "/images/data.raw"
format = "raw"
read_only = true
cache = "writeback"

[[nics]]

[[nics]]
network = "user"
mac = "52:54:00:00:00:01"

[[devices]]
driver = "virtio-rng-pci"
addr = "0x10"
"""
SPEC = parse_spec(FULL, "web.toml", Path("/"))
TCG = Platform("pc-q35-10.0", "tcg", "qemu64")


def files(state: str = "/state", qemu_id: str = "0123abcd") -> QemuDir:
    return VmDir(Path(state) / "vms/web").qemu(qemu_id)


def argv(where: QemuDir, *, incoming: bool = False) -> list[str]:
    return qemu_argv(SPEC, TCG, where, "/usr/bin/qemu", incoming=incoming)


GOLDEN = r"""/usr/bin/qemu
-name web,process=vmckpt-web
-nodefaults
-no-user-config
-display none
-vga none
-accel tcg,thread=multi
-machine pc-q35-10.0,memory-backend=ram0
-cpu qemu64
-smp 2
-m 1024M
-object {"qom-type":"memory-backend-file","id":"ram0","size":1073741824,"mem-path":"/ram/vmckpt-web-0123abcd/ram","share":true}
-chardev socket,id=console,path=/state/vms/web/qemu-0123abcd/console.sock,server=on,wait=off,logfile=/state/vms/web/qemu-0123abcd/console.log,logappend=on
-serial chardev:console
-kernel /boot/vmlinuz
-append console=ttyS0 a=b,c
-initrd /boot/initrd
-blockdev {"driver":"raw","node-name":"pflash0","read-only":true,"file":{"driver":"file","filename":"/fw/code.fd"}}
-machine pflash0=pflash0
-blockdev {"driver":"raw","node-name":"pflash1","read-only":false,"file":{"driver":"file","filename":"/fw/vars.fd"}}
-machine pflash1=pflash1
-blockdev {"driver":"file","node-name":"disk0-file","filename":"/images/root,1.qcow2","cache":{"direct":true},"discard":"unmap"}
-blockdev {"driver":"qcow2","node-name":"disk0","file":"disk0-file","read-only":false,"discard":"unmap"}
-device {"driver":"virtio-blk-pci","id":"disk0-dev","drive":"disk0","addr":"0x3","ioeventfd":false}
-blockdev {"driver":"file","node-name":"disk1-file","filename":"/images/data.raw","cache":{"direct":false},"discard":"unmap"}
-blockdev {"driver":"raw","node-name":"disk1","file":"disk1-file","read-only":true,"discard":"unmap"}
-device {"driver":"virtio-blk-pci","id":"disk1-dev","drive":"disk1","addr":"0x4","ioeventfd":false}
-netdev {"type":"tap","id":"net0","ifname":"vk0123abcd0","script":"no","downscript":"no","vhost":false}
-device {"driver":"virtio-net-pci","id":"nic0","netdev":"net0","mac":"52:54:00:6e:02:e5","addr":"0x5","romfile":"","ioeventfd":false}
-netdev {"type":"user","id":"net1"}
-device {"driver":"virtio-net-pci","id":"nic1","netdev":"net1","mac":"52:54:00:00:00:01","addr":"0x6","romfile":"","ioeventfd":false}
-device {"driver":"virtio-serial-pci","id":"serial0","addr":"0x7","ioeventfd":false}
-chardev socket,id=agent,path=/state/vms/web/qemu-0123abcd/agent.sock,server=on,wait=off
-device {"driver":"virtserialport","chardev":"agent","name":"org.qemu.guest_agent.0"}
-device {"driver":"virtio-rng-pci","addr":"0x10"}
-pidfile /state/vms/web/qemu-0123abcd/pid
-msg timestamp=on
-chardev socket,id=operator,path=/state/vms/web/qemu-0123abcd/qmp.sock,server=on,wait=off
-mon chardev=operator,mode=control
-chardev socket,id=onlooker,path=/state/vms/web/qemu-0123abcd/watch.sock,server=on,wait=off
-mon chardev=onlooker,mode=control
-chardev socket,id=rescue,path=/state/vms/web/qemu-0123abcd/rescue.sock,server=on,wait=off
-mon chardev=rescue,mode=control
-trace vm_state_notify
-sandbox on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny
-S"""  # noqa: E501


def lines(arguments: list[str]) -> list[str]:
    """Each option with its value on one line."""
    joined: list[str] = []
    for argument in arguments:
        if joined and joined[-1].startswith("-") and not argument.startswith("-"):
            joined[-1] += f" {argument}"
        else:
            joined.append(argument)
    return joined


def test_a_full_spec_gives_this_command_line() -> None:
    assert lines(argv(files())) == GOLDEN.splitlines()


def test_a_spec_that_says_so_gets_no_sandbox() -> None:
    spec = parse_spec(FULL.replace('name = "web"', 'name = "web"\nsandbox = false'), "t", Path("/"))
    given = qemu_argv(spec, TCG, files(), "/usr/bin/qemu", incoming=False)
    at = argv(files()).index("-sandbox")
    assert argv(files())[:at] + argv(files())[at + 2 :] == given


def test_a_target_waits_for_its_migration_and_differs_in_nothing_else() -> None:
    assert argv(files(), incoming=True) == [*argv(files()), "-incoming", "defer"]


def test_both_ends_differ_only_in_what_belongs_to_the_process() -> None:
    source, target = argv(files()), argv(files("/other", "fedcba98"))
    assert [
        argument.replace("/other", "/state").replace("fedcba98", "0123abcd") for argument in target
    ] == source


def test_a_vm_never_runs_by_itself() -> None:
    for incoming in (False, True):
        assert "-S" in argv(files(), incoming=incoming)


def test_the_mark_is_found_in_the_command_line_as_proc_shows_it() -> None:
    shown = "\0".join(argv(files())) + "\0"
    assert files().mark in shown
    assert files(qemu_id="ffffffff").mark not in shown


def test_kvm_gets_no_tcg_option() -> None:
    arguments = qemu_argv(SPEC, Platform("q35", "kvm", "host"), files(), "qemu", incoming=False)
    assert arguments[arguments.index("-accel") + 1] == "kvm"


def test_commas_in_a_path_are_doubled_where_qemu_splits_at_them() -> None:
    where = files("/a,b")
    arguments = argv(where)
    sockets = [a for a in arguments if a.startswith("socket,")]
    assert len(sockets) == 5
    assert all("path=/a,,b/vms/web/" in socket for socket in sockets)
    assert any("logfile=/a,,b/" in socket for socket in sockets)
    assert arguments[arguments.index("-pidfile") + 1].startswith("/a,b/")
    objects = [json.loads(a) for a in arguments if a.startswith("{")]
    assert any(o.get("filename") == "/images/root,1.qcow2" for o in objects)


def test_every_device_has_a_place_of_its_own() -> None:
    places = [
        device["addr"]
        for device in (json.loads(a) for a in argv(files()) if a.startswith("{"))
        if "addr" in device
    ]
    assert len(set(places)) == len(places) == 6


def test_macs_are_local_unicast_stable_and_apart() -> None:
    nics = [(f"vm{number}", nic) for number in range(100) for nic in range(4)]
    macs = [default_mac(*nic) for nic in nics]
    assert macs[0] == "52:54:00:" + hashlib.sha256(b"vm0/0").digest()[:3].hex(":")
    assert len(set(macs)) == len(macs)
    for mac in macs:
        octets = bytes.fromhex(mac.replace(":", ""))
        assert len(octets) == 6
        assert octets[0] & 0b11 == 0b10


def netdevs(words: list[str]) -> list[Any]:
    return [json.loads(words[n + 1]) for n, word in enumerate(words) if word == "-netdev"]


def test_an_isolated_nic_is_the_same_device_and_connected_to_nothing() -> None:
    nics = tuple(nic._replace(isolated=True) for nic in SPEC.nics)
    cut = qemu_argv(SPEC._replace(nics=nics), TCG, files(), "/usr/bin/qemu", incoming=False)
    assert [one["type"] for one in netdevs(argv(files()))] == ["tap", "user"]
    assert netdevs(cut)[0] == netdevs(argv(files()))[0]  # it is put on no bridge
    # QEMU saves a section of a user-mode network: one that has no NIC takes it.
    assert netdevs(cut)[1] == {"type": "user", "id": "net1-off", "restrict": True}
    assert netdevs(cut)[2] == {"type": "hubport", "id": "net1", "hubid": 1}
    assert [word for word in cut if "virtio-net" in word] == [
        word for word in argv(files()) if "virtio-net" in word
    ]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (["-netdev", "user,id=n0,hostfwd=tcp::22-:22"], ["-netdev", "type=hubport,hubid=1,id=n0"]),
        (["-nic", "user,model=e1000,mac=52:54:00:00:00:02"],
         ["-nic", "type=hubport,hubid=1,model=e1000,mac=52:54:00:00:00:02"]),
        (["-nic", "model=virtio"], ["-nic", "type=hubport,hubid=1,model=virtio"]),
        (["-net", "nic,model=e1000", "-net", "user"], ["-net", "type=nic,model=e1000"]),
        (['-netdev', '{"type":"socket","id":"s","connect":"127.0.0.1:9"}'],
         ["-netdev", "type=hubport,hubid=1,id=s"]),
        (["-netdev", "stream,id=s", "-netdev", "dgram,id=t"],
         ["-netdev", "type=hubport,hubid=1,id=s", "-netdev", "type=hubport,hubid=2,id=t"]),
        (["--netdev", "vde,id=v", "-m", "64M"],
         ["--netdev", "type=hubport,hubid=1,id=v", "-m", "64M"]),
        (["-netdev", "tap,id=t,ifname=<vmckpt:tap0>"],
         ["-netdev", "type=tap,id=t,ifname=<vmckpt:tap0>"]),
    ],
)  # fmt: skip
def test_an_adopted_vms_networks_are_cut_off_of_every_kind(
    before: list[str], after: list[str]
) -> None:
    found = isolated(before)
    users = [word for word in before if word.startswith(("user", "model"))]
    off = [word for word in found if "restrict" in word]
    assert len(off) == len(users)
    assert [word for n, word in enumerate(found) if not {*found[n : n + 2]} & {*off}] == after


@pytest.mark.parametrize("read_only", [True, False])
def test_a_forks_memory_is_its_own_and_what_it_shares_is_not_opened_to_be_written(
    *, read_only: bool
) -> None:
    words = qemu_argv(
        SPEC, TCG, files(), "/usr/bin/qemu", incoming=True, private_ram=True,
        ram_is_read_only=read_only,
    )  # fmt: skip
    ram = json.loads(words[words.index("-object") + 1])
    assert ram["share"] is False
    assert (ram.get("readonly"), ram.get("rom")) == ((True, "off") if read_only else (None, None))
