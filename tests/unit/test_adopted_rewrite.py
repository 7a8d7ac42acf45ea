"""Command lines of running QEMUs, rewritten for a target: by hand, and as Proxmox writes them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vmckpt.errors import RefusedError
from vmckpt.qemu.inside import GuestDrive, MemoryModule
from vmckpt.qemu.replies import QemuVersion
from vmckpt.vm.adopted.adopt import is_same_machine
from vmckpt.vm.adopted.copies.isolation import isolated
from vmckpt.vm.adopted.facts import AdoptedFacts
from vmckpt.vm.adopted.holes import ram_names
from vmckpt.vm.adopted.rewrite import Rewritten, rewrite
from vmckpt.vm.adopted.spec_text import spec_text
from vmckpt.vm.argv import qemu_argv
from vmckpt.vm.paths import QemuDir
from vmckpt.vm.record import Platform
from vmckpt.vm.spec.spec import Adopted, Placement, parse_spec
from vmckpt.vm.spec.spec_text import written as spec_written

MIB = 1 << 20
TCG = Platform("pc-i440fx-10.0", "tcg", "qemu64")


def drive(file: str, device: str = "", **more: Any) -> GuestDrive:
    found = GuestDrive(device, "", "#block144", "qcow2", file, read_only=False, direct=False)
    return found._replace(**more)


def facts(line: str, *drives: GuestDrive, **more: Any) -> AdoptedFacts:
    """Facts on a QEMU that was started so: nothing was plugged or unplugged since."""
    argv = ("/usr/bin/qemu-system-x86_64", *line.split())
    found = AdoptedFacts(
        argv=argv,
        cwd=Path("/home/me"),
        platform=TCG,
        ram_id="pc.ram",
        memory_bytes=512 * MIB,
        back_ends={"pc.ram": 512 * MIB},
        version=QemuVersion(10, 0, 2),
        vcpus=1,
        drives=drives,
        devices={},
        late={},
        slots={},
        modules={},
        networks={},
        labels=frozenset({"serial0", "parallel0"}),
        directories=frozenset(),
        huge_pages=frozenset(),
        images_dir=Path("/state/images"),
    )
    return found._replace(**more)


def written(made: Rewritten) -> list[str]:
    """An option and its value to a line."""
    text = " ".join(made.arguments)
    return [f"-{part}".strip() for part in text[1:].split(" -")]


RAM = '{"qom-type":"memory-backend-file","id":"pc.ram","size":536870912,"mem-path":"<vmckpt:ram>","share":true}'  # noqa: E501


def test_a_line_as_people_type_it() -> None:
    line = (
        "-enable-kvm -m 512 -hda disk.img -cdrom /iso/debian.iso -boot d -vnc :1 -net nic "
        "-net user,hostfwd=tcp::2222-:22 -pidfile x.pid -qmp unix:q,server,nowait"
    )
    kvm = replace(TCG, accel="kvm")
    drives = (
        drive("disk.img", "ide0-hd0", driver="raw"),
        drive("/iso/debian.iso", "ide1-cd0", driver="raw", read_only=True),
    )
    made = rewrite("web", facts(line, *drives, platform=kvm))
    assert written(made) == [
        "-m 512",
        "-drive file=<vmckpt:disk0>,index=0,media=disk,node-name=vmckpt-disk0,format=raw",
        "-drive file=<vmckpt:disk1>,index=2,media=cdrom,node-name=vmckpt-disk1,format=raw",
        "-boot order=d",
        "-net type=nic",
        "-net type=user,hostfwd=tcp::2222-:22",
        "-chardev backend=socket,id=vmckpt-serial1,path=<vmckpt:dir>/console.sock,server=on,"
        "wait=off,logfile=<vmckpt:dir>/console.log,logappend=on",
        "-serial chardev:vmckpt-serial1",
        f"-object {RAM}",
        "-machine type=pc-i440fx-10.0,memory-backend=pc.ram",
        "-accel accel=kvm",
        "-cpu qemu64",
        "-display none",
    ]
    assert [disk.path for disk in made.disks] == [
        Path("/home/me/disk.img"), Path("/iso/debian.iso"),
    ]  # fmt: skip
    assert (made.nics, made.forwards) == (("user",), (2222,))
    assert any("-vnc :1" in note for note in made.notes)


def test_the_network_that_nobody_asked_for_is_written_out() -> None:
    default = {"#net129": "user,net=10.0.2.0,restrict=off", "e1000e.0": "nic,model=e1000e"}
    made = rewrite("web", facts("-m 512", networks=default))
    assert made.nics == ("user",)
    assert [line for line in written(made) if "net" in line] == ["-net type=nic", "-net type=user"]
    cut = isolated(made.arguments)
    assert "type=user" not in cut
    assert "type=nic" in cut
    for line in ("-m 512 -nodefaults", "-m 512 -nic none", "-m 512 -net none"):
        assert rewrite("web", facts(line, networks=default)).nics == ()


PROXMOX = """
-name web,debug-threads=on -no-shutdown
-chardev socket,id=qmp,path=/var/run/qemu-server/100.qmp,server=on,wait=off
-mon chardev=qmp,mode=control
-chardev socket,id=qmp-event,path=/var/run/qmeventd.sock,reconnect-ms=5000
-mon chardev=qmp-event,mode=control
-pidfile /var/run/qemu-server/100.pid -daemonize -smbios type=1,uuid=0c7d
-smp 4,sockets=1,cores=4,maxcpus=4 -nodefaults -boot menu=on,strict=on,reboot-timeout=1000
-vnc unix:/var/run/qemu-server/100.vnc,password=on -cpu kvm64,+sep -m 512
-object iothread,id=iothread-virtioscsi0
-device pci-bridge,id=pci.3,chassis_nr=3,bus=pci.0,addr=0x5
-device usb-tablet,id=tablet,bus=uhci.0,port=1 -device VGA,id=vga,bus=pci.0,addr=0x2
-chardev socket,path=/var/run/qemu-server/100.qga,server=on,wait=off,id=qga0
-device virtio-serial,id=qga0,bus=pci.0,addr=0x8
-device virtserialport,chardev=qga0,name=org.qemu.guest_agent.0
-device virtio-scsi-pci,id=virtioscsi0,bus=pci.3,addr=0x1,iothread=iothread-virtioscsi0
-drive file=/dev/pve/vm-100-disk-0,if=none,id=drive-scsi0,format=raw,cache=none
-device scsi-hd,bus=virtioscsi0.0,scsi-id=0,drive=drive-scsi0,id=scsi0,bootindex=100
-netdev type=tap,id=net0,ifname=tap100i0,script=/x/bridge,downscript=/x/down,vhost=on
-device virtio-net-pci,mac=BC:24:11:00:00:01,netdev=net0,bus=pci.0,addr=0x12,id=net0
-rtc driftfix=slew,base=localtime -machine hpet=off,type=pc
"""


def test_a_line_as_proxmox_writes_it() -> None:
    names = ("pci.3", "tablet", "vga", "qga0", "virtioscsi0", "scsi0", "net0")
    disk = drive("/dev/pve/vm-100-disk-0", "drive-scsi0", owner="scsi0", driver="raw")
    known = dict.fromkeys(names, "x")
    made = rewrite("web", facts(PROXMOX, disk, devices=known, labels=frozenset()))
    assert written(made) == [
        "-no-shutdown",
        "-smbios type=1,uuid=0c7d",
        "-smp 4,sockets=1,cores=4,maxcpus=4",
        "-nodefaults",
        "-boot menu=on,strict=on,reboot-timeout=1000",
        "-cpu kvm64,+sep",
        "-m 512",
        "-object qom-type=iothread,id=iothread-virtioscsi0",
        "-device driver=pci-bridge,id=pci.3,chassis_nr=3,bus=pci.0,addr=0x5",
        "-device driver=usb-tablet,id=tablet,bus=uhci.0,port=1",
        "-device driver=VGA,id=vga,bus=pci.0,addr=0x2",
        "-chardev backend=socket,id=qga0,path=<vmckpt:dir>/agent.sock,server=on,wait=off",
        "-device driver=virtio-serial,id=qga0,bus=pci.0,addr=0x8",
        "-device driver=virtserialport,chardev=qga0,name=org.qemu.guest_agent.0",
        "-device driver=virtio-scsi-pci,id=virtioscsi0,bus=pci.3,addr=0x1,"
        "iothread=iothread-virtioscsi0",
        "-drive file=<vmckpt:disk0>,if=none,id=drive-scsi0,format=raw,cache=none,"
        "node-name=vmckpt-disk0",
        "-device driver=scsi-hd,bus=virtioscsi0.0,scsi-id=0,drive=drive-scsi0,id=scsi0,"
        "bootindex=100",
        "-netdev type=tap,id=net0,ifname=<vmckpt:tap0>,script=no,downscript=no,vhost=off",
        "-device driver=virtio-net-pci,mac=BC:24:11:00:00:01,netdev=net0,bus=pci.0,addr=0x12,"
        "id=net0",
        "-rtc driftfix=slew,base=localtime",
        f"-object {RAM}",
        "-machine type=pc-i440fx-10.0,hpet=off,memory-backend=pc.ram",
        "-accel accel=tcg",
        "-display none",
    ]
    assert made.guest_agent
    assert made.nics == ("bridge",)


JSON_STYLE = """
-nodefaults -machine q35,memory-backend=mem -m 512 -cpu qemu64
-object {"qom-type":"memory-backend-memfd","id":"mem","size":536870912,"share":true}
-blockdev {"driver":"file","filename":"/img/a,b.qcow2","node-name":"f","auto-read-only":true}
-blockdev {"node-name":"top","driver":"qcow2","file":"f"}
-device {"driver":"virtio-blk-pci","bus":"pcie.0","drive":"top","id":"v0"}
-netdev {"type":"tap","fds":"30:31","vhost":true,"vhostfds":"32:33","id":"n0"}
-device {"driver":"virtio-net-pci","netdev":"n0","id":"n0","mac":"52:54:00:00:00:01"}
-chardev pty,id=c0 -device {"driver":"isa-serial","chardev":"c0","id":"s0"}
-audiodev {"id":"a1","driver":"spice"}
"""


def test_json_as_libvirt_writes_it() -> None:
    disk = drive("/img/a,b.qcow2", owner="v0", node="top")
    known = dict.fromkeys(("v0", "n0", "s0"), "x")
    slots = {"v0": "3.0", "n0": "4.0"}
    memory = {"mem": 512 * MIB}
    made = rewrite("web", facts(JSON_STYLE, disk, devices=known, slots=slots, back_ends=memory))
    lines = written(made)
    assert (
        '-blockdev {"driver":"file","filename":"<vmckpt:disk0>","node-name":"f",'
        '"auto-read-only":true}'
    ) in lines
    # Where a device is must not depend on what else there is.
    assert (
        '-device {"driver":"virtio-blk-pci","bus":"pcie.0","drive":"top","id":"v0","addr":"3.0"}'
    ) in lines
    assert (
        '-netdev {"type":"tap","id":"n0","queues":2,"ifname":"<vmckpt:tap0>","script":"no",'
        '"downscript":"no","vhost":false}'
    ) in lines
    assert "-audiodev driver=none,id=a1" in lines
    assert "-machine type=pc-i440fx-10.0,memory-backend=mem" in lines
    assert f"-object {RAM.replace('pc.ram', 'mem')}" in lines
    (found,) = made.disks
    assert (found.node, found.node_now, found.format) == ("top", "top", "qcow2")


def test_it_is_a_spec_from_which_every_qemu_gets_its_own_names() -> None:
    known = dict.fromkeys(("v0", "n0", "s0"), "x")
    seen = facts(JSON_STYLE, drive("/img/a,b.qcow2", owner="v0", node="top"), devices=known)
    spec = parse_spec(spec_text("web", seen, rewrite("web", seen)), "spec", Path("/"))
    assert (spec.memory_bytes, spec.disks[0].node, spec.nics[0].network) == (
        512 * MIB, "top", "bridge",
    )  # fmt: skip
    files = QemuDir(Path('/st,a"te/vms/web/qemu-12345678'), "web", "12345678")
    argv = qemu_argv(spec, TCG, files, "qemu", incoming=True)
    text = "\n".join(argv)
    assert '"filename":"/img/a,b.qcow2"' in text
    assert '"ifname":"vk123456780"' in text
    assert 'path=/st,,a"te/vms/web/qemu-12345678/console.sock' in text
    assert "<vmckpt:" not in text
    assert argv[-2:] == ["-incoming", "defer"]


def test_an_image_of_the_hosts_own_stays_its_own() -> None:
    line = "-drive file=/state/images/a.qcow2,if=virtio"
    made = rewrite("web", facts(line, drive("/state/images/a.qcow2", "virtio0")))
    assert [disk.path for disk in made.disks] == [Path("images/a.qcow2")]


@pytest.mark.parametrize("more", ["", ",format=qcow2"])
def test_an_image_that_is_named_as_a_part_of_its_drive_has_a_node(more: str) -> None:
    line = f"-drive if=virtio,file.driver=file,file.filename=/img/a.qcow2{more}"
    made = rewrite("web", facts(line, drive("/img/a.qcow2", "virtio0")))
    assert [disk.node for disk in made.disks] == ["vmckpt-disk0"]
    (found,) = [text for text in written(made) if text.startswith("-drive")]
    assert "file.filename=<vmckpt:disk0>" in found
    assert "node-name=vmckpt-disk0" in found
    assert found.count("format=qcow2") == 1


def test_what_was_plugged_later_comes_along_and_what_was_unplugged_does_not() -> None:
    line = (
        "-drive file=/a.qcow2,if=none,id=a -device virtio-blk-pci,drive=a,id=gone "
        "-drive file=/b.qcow2,if=none,id=b -device virtio-blk-pci,drive=b,id=stays "
        "-netdev user,id=u0"
    )
    disks = (
        drive("/b.qcow2", "b", owner="stays"),
        drive("/late.qcow2", owner="late", node="hot", direct=True),
    )
    late = {
        "late": {"driver": "virtio-blk-pci", "id": "late", "bus": "rp0", "drive": "hot"},
        "nic": {"driver": "e1000e", "id": "nic", "bus": "rp1", "netdev": "t1"},
    }
    known = {"stays": "virtio-blk-pci", "late": "virtio-blk-pci", "nic": "e1000e"}
    seen = facts(line, *disks, devices=known, late=late, networks={"t1": "tap,ifname=x"})
    made = rewrite("web", seen)
    lines = written(made)
    assert not any("/a.qcow2" in one or "id=gone" in one for one in lines)
    assert [disk.path for disk in made.disks] == [Path("/b.qcow2"), Path("/late.qcow2")]
    assert (
        '-blockdev {"driver":"qcow2","node-name":"vmckpt-disk1","read-only":false,"file":'
        '{"driver":"file","filename":"<vmckpt:disk1>","cache":{"direct":true}}}'
    ) in lines
    assert (
        '-device {"driver":"virtio-blk-pci","id":"late","bus":"rp0","drive":"vmckpt-disk1"}'
    ) in lines
    assert "-netdev type=tap,id=t1,ifname=<vmckpt:tap1>,script=no,downscript=no,vhost=off" in lines
    assert made.nics == ("user", "bridge")
    assert [note for note in made.notes if "unplugged" in note]


def test_a_file_of_memory_is_never_shared_by_two_qemus() -> None:
    line = (
        "-machine q35,memory-backend=m -m 512 "
        "-object memory-backend-file,id=m,size=512M,mem-path=/dev/hugepages/vm,share=on"
    )
    made = rewrite("web", facts(line))
    backend = "-object qom-type=memory-backend-file,id=m,size=512M,mem-path={},share=on"
    assert backend.format("/dev/hugepages") in written(made)
    one = facts(line.replace("/vm,", ","), directories=frozenset({"/dev/hugepages"}))
    assert backend.format("/dev/hugepages") in written(rewrite("web", one))


NUMA = (
    "-m 512M,slots=2,maxmem=2G -object memory-backend-ram,id=n0,size=128M "
    '-object {"qom-type":"memory-backend-memfd","id":"n1","size":134217728,"share":true} '
    "-numa node,memdev=n0,cpus=0 -numa node,memdev=n1 "
    "-object memory-backend-file,id=d0,size=256M,mem-path=/dev/shm/d0,share=on "
    "-device pc-dimm,memdev=d0,id=dimm0"
)
SIZES = {"n0": 128 * MIB, "n1": 128 * MIB, "d0": 256 * MIB}
DIMM, PLACED = {"dimm0": "pc-dimm"}, {"dimm0": MemoryModule(1 << 32, 1)}


def of_memory(line: str = NUMA, **more: Any) -> Rewritten:
    found = facts(line, devices=DIMM, back_ends=SIZES, modules=PLACED)
    return rewrite("web", found._replace(**more))


def test_blocks_of_memory_are_parts_of_one_file() -> None:
    """The first back end that QEMU makes has to make the file as large as it becomes."""
    lines = written(of_memory())
    objects = [json.loads(line.split()[1]) for line in lines if line.startswith("-object")]
    assert [(one["id"], one["size"], one.get("offset", 0)) for one in objects] == [
        ("n0", 128 * MIB, 384 * MIB), ("n1", 128 * MIB, 256 * MIB), ("d0", 256 * MIB, 0),
    ]  # fmt: skip
    assert {one["mem-path"] for one in objects} == {"<vmckpt:ram>"}
    assert all(one["share"] for one in objects)
    assert "-numa node,memdev=n0,cpus=0" in lines
    assert "-device driver=pc-dimm,memdev=d0,id=dimm0,addr=4294967296,slot=1" in lines
    assert "-machine type=pc-i440fx-10.0" in lines
    assert ram_names(of_memory().arguments) == ("d0", "n1", "n0")


def test_a_module_is_besides_the_memory_of_m() -> None:
    line = "-m 256M,slots=2,maxmem=2G -object memory-backend-ram,id=d0,size=256M "
    line += "-device pc-dimm,memdev=d0,id=dimm0"
    made = of_memory(line, back_ends={"d0": 256 * MIB, "pc.ram": 256 * MIB})
    assert ram_names(made.arguments) == ("pc.ram", "d0")
    assert "-machine type=pc-i440fx-10.0,memory-backend=pc.ram" in written(made)


@pytest.mark.parametrize(
    ("old", "new", "more"),
    [
        ("memory-backend-ram,id=n0", "memory-backend-ram,host-nodes=0,policy=bind,id=n0", {}),
        ('"share":true', '"share":true,"hugetlb":true', {}),
        ("/dev/shm/d0", "/dev/hugepages", {}),
        ("/dev/shm/d0", "/mnt/pmem,pmem=on", {}),
        ("/dev/shm/d0,share=on", "/dev/shm/d0,share=off,readonly=on", {}),
        ("/dev/shm/d0", "d0", {}),
        ("pc-dimm", "nvdimm", {"memory_bytes": 256 * MIB}),
        ("-numa node,memdev=n1", "-numa node,memdev=n1", {"version": QemuVersion(8, 0, 9)}),
    ],
)
def test_what_no_file_of_vmckpts_can_replace_stays_as_it_is(
    old: str, new: str, more: dict[str, Any]
) -> None:
    """Half of its memory in such a file would be half of a checkpoint."""
    assert old in NUMA
    made = of_memory(NUMA.replace(old, new), **more)
    assert ram_names(made.arguments) == ()
    assert not any("<vmckpt:ram>" in word for word in made.arguments)


HUGE = "/dev/hugepages"
IN_HUGE: dict[str, Any] = {
    "huge_pages": frozenset({HUGE, f"{HUGE}/m"}),
    "directories": frozenset({HUGE}),
    "back_ends": {"d0": 256 * MIB, "pc.ram": 256 * MIB},
}
MODULE = "-object memory-backend-{},id=d0,size=256M -device pc-dimm,memdev=d0,id=dimm0"


@pytest.mark.parametrize(
    "line",
    [
        f"-m 256M,slots=2,maxmem=2G -mem-path {HUGE} -mem-prealloc "
        + MODULE.format(f"file,mem-path={HUGE},prealloc=on"),
        f"-m 256M,slots=2,maxmem=2G -mem-path {HUGE}/m " + MODULE.format(f"file,mem-path={HUGE}/m"),
    ],
)
def test_what_is_all_in_huge_pages_stays_in_huge_pages(line: str) -> None:
    made = of_memory(line, **IN_HUGE)
    assert made.ram_dir == Path(HUGE)
    assert ram_names(made.arguments) == ("pc.ram", "d0")
    assert not {"-mem-path", "-mem-prealloc"} & {*made.arguments}
    assert not any("prealloc" in word for word in made.arguments)
    seen = facts(line)
    assert parse_spec(spec_text("web", seen, made), "spec", Path("/")).ram_dir == Path(HUGE)


@pytest.mark.parametrize(
    "line",
    [
        f"-m 256M,slots=2,maxmem=2G -mem-path {HUGE} " + MODULE.format("ram"),
        "-m 256M,slots=2,maxmem=2G " + MODULE.format(f"file,mem-path={HUGE}"),
        "-m 256M,slots=2,maxmem=2G -mem-path /elsewhere " + MODULE.format("ram"),
    ],
)
def test_memory_of_two_kinds_stays_where_it_is(line: str) -> None:
    """One file has one kind of pages."""
    made = of_memory(line, **IN_HUGE)
    assert (ram_names(made.arguments), made.ram_dir) == ((), Path("/dev/shm"))
    assert ("-mem-path" in made.arguments) == ("-mem-path" in line)


def test_what_leaves_its_directory_alone_keeps_relative_paths() -> None:
    made = rewrite("web", facts("-run-with async-teardown=on -kernel vmlinuz"))
    assert "-kernel /home/me/vmlinuz" in written(made)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("-device vfio-pci,host=01:00.0", "passed through"),
        ("-device usb-host,vendorid=1", "USB device of the host"),
        ("-netdev vhost-user,id=n,chardev=c", "type 'vhost-user'"),
        ("-chardev socket,id=c,path=/run/x -device virtserialport,chardev=c", "a program outside"),
        ("-serial tcp:10.0.0.1:4555", "a program outside"),
        ("-serial /dev/ttyS0", "a port of the host"),
        ("-virtfs local,path=/x,mount_tag=x", "-virtfs"),
        ("-snapshot -hda /x.img", "-snapshot"),
        ("-daemonize -kernel vmlinuz", "-daemonize has changed"),
        ("-chroot /srv -kernel vmlinuz", "-chroot has changed"),
        ("--run-with chroot=/srv -kernel vmlinuz", "-run-with chroot has changed"),
        ("-drive file=json:{},if=virtio", "'json:' images"),
        ("-drive file=/dev/fdset/3,if=virtio", "open descriptor"),
        ("-drive file=fat:rw:/dir", "'fat:' images"),
        ("-hda /x.qcow2", "no longer uses it"),
        ("-object sev-guest,id=s", "this type of object"),
        ("-nic user,smb=/srv", "smb="),
        ("-append <vmckpt:dir>", "vmckpt's own mark"),
        ('-machine {"type":"q35"}', "in JSON"),
        ("-set chardev.c.path=/run/c.sock", "not of a device of the guest's"),
        ("-set netdev.n.hostfwd=tcp::2222-:22", "not of a device of the guest's"),
        ("-set drive.d.file=/x.qcow2", "not of a device of the guest's"),
        ("-set device.n.romfile=/x.rom", "names a file"),
        ("-device scsi-hd,drive=base", "no longer uses 'base'"),
        ("-device virtio-blk-pci,drive=d,share-rw=on", "may write to its disk, too"),
        ('-device {"driver":"scsi-hd","drive":"d","share-rw":true}', "may write to its disk, too"),
    ],
)
def test_what_cannot_be_carried_is_refused_by_name(line: str, words: str) -> None:
    with pytest.raises(RefusedError) as refused:
        rewrite("web", facts(line))
    assert words in refused.value.why
    assert refused.value.remedy


def test_settings_of_the_guests_devices_are_kept() -> None:
    for given in ("device.n.mac=52:54:00:00:00:01", "drive.d.cache=none"):
        assert f"-set {given}" in written(rewrite("web", facts(f"-set {given}")))


def test_every_refusal_is_told_at_once() -> None:
    with pytest.raises(RefusedError) as refused:
        rewrite("web", facts("-device vfio-pci,host=1 -device usb-host -snapshot"))
    assert refused.value.why.count(";") == 2


def test_an_option_that_nobody_knows_is_refused() -> None:
    with pytest.raises(RefusedError, match="-id"):
        rewrite("web", facts("-id 100"))


def test_a_snapshot_on_top_of_an_image_is_not_overlooked() -> None:
    line = "-drive file=/base.qcow2,if=virtio"
    with pytest.raises(RefusedError) as refused:
        rewrite("web", facts(line, drive("/overlay.qcow2", "virtio0")))
    assert "/overlay.qcow2" in refused.value.why


def test_a_device_plugged_later_with_a_back_end_that_nobody_knows_is_refused() -> None:
    late: dict[str, dict[str, Any]] = {
        "p": {"driver": "virtserialport", "id": "p", "bus": "b", "chardev": "c"},
        "d": {"driver": "virtio-blk-pci", "id": "d", "bus": "b", "drive": "n"},
        "e": {"driver": "scsi-cd", "id": "e", "bus": "b", "drive": "m"},
        "c": {"driver": "qemu64-x86_64-cpu", "id": "c"},
        "v": {"driver": "vfio-pci", "id": "v", "bus": "b"},
        "n": {"driver": "e1000e", "id": "n", "bus": "b", "netdev": "n9"},
        "s": {"driver": "scsi-hd", "id": "s", "bus": "b", "drive": "k", "share-rw": True},
    }
    drives = drive("json:{}", owner="d"), drive("/k.raw", owner="s")
    seen = facts("-m 512", *drives, late=late, networks={"n9": "vhost-user"})
    with pytest.raises(RefusedError) as refused:
        rewrite("web", seen)
    for words in ("'p'", "'d'", "'e'", "'c'", "'v'", "'n9'", "'s' (scsi-hd): plugged later: other"):
        assert words in refused.value.why


def test_ports_get_names_of_their_own() -> None:
    line = (
        "-serial pty -serial file:/log -parallel pty -parallel vc -debugcon stdio -nic model=e1000"
    )
    lines = written(rewrite("web", facts(line)))
    named = [word.partition("id=")[2].partition(",")[0] for word in lines if "id=" in word]
    assert named[:5] == [
        "vmckpt-serial1", "vmckpt-serial2", "vmckpt-parallel1", "vmckpt-parallel2",
        "vmckpt-debugcon1",
    ]  # fmt: skip
    assert "-nic model=e1000" in lines
    assert len({word for word in lines if "path=" in word}) == 5


def test_what_its_owner_adds_to_its_spec_is_no_change_of_an_adopted_machine() -> None:
    """Its checkpoints and migrations were refused: it had changed, "on other images"."""
    found = facts("-m 512")
    now = parse_spec(spec_text("web", found, rewrite("web", found)), "-", Path("/"))
    added = now._replace(
        overcommit=True, autostart=True, ram_dir=Path("/ram"), placement=Placement(apart=("db",))
    )
    before = parse_spec(spec_written(added), "-", Path("/"))
    assert before.placement.apart == ("db",)
    assert is_same_machine(now, before)
    assert not is_same_machine(now, before._replace(vcpus=2))
    adopted = Adopted(("-m", "1024"), (), ())
    assert not is_same_machine(now, before._replace(adopted=adopted))


@pytest.mark.parametrize(
    ("machine", "is_by_path"),
    [("pc-i440fx-3.1", True), ("pc-q35-2.12", True), ("pc-q35-4.0.1", False),
     ("pc-q35-10.0", False), ("pc-i440fx-9.2", False), ("microvm", False)],
)  # fmt: skip
def test_memory_of_an_old_machine_keeps_its_name(machine: str, *, is_by_path: bool) -> None:
    """QEMU called it /objects/pc.ram on the target: the VM could neither move nor be restored."""
    made = rewrite("web", facts("-m 512", platform=replace(TCG, machine=machine)))
    (ram,) = [word for word in made.arguments if "memory-backend-file" in word]
    assert ('"x-use-canonical-path-for-ramblock-id":false' in ram) is is_by_path
