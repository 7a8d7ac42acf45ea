"""What a checkpoint of an adopted machine becomes: on new images, and as a copy or a fork."""

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest

from tests.unit.test_adopted_rewrite import JSON_STYLE, PROXMOX, TCG, drive, facts
from tests.unit.test_checkpoint_plans import HOST, OURS
from tests.unit.test_checkpoint_tree import facts as checkpoint_facts
from vmckpt.checkpoint.facts import CheckpointFacts, DiskFacts
from vmckpt.checkpoint.restore.identity import new_macs
from vmckpt.checkpoint.restore.planned import plan_copy, plan_itself
from vmckpt.errors import RefusedError
from vmckpt.preflight.finding import ask
from vmckpt.preflight.isolation import isolation_checks
from vmckpt.vm.adopted.copies.copied import undoubled, with_new_generation, with_uuid
from vmckpt.vm.adopted.copies.nics import macs, with_macs
from vmckpt.vm.adopted.copies.whole_images import on_whole_images
from vmckpt.vm.adopted.rewrite import rewrite
from vmckpt.vm.adopted.spec_text import spec_text
from vmckpt.vm.argv import default_mac, qemu_argv
from vmckpt.vm.argv import macs as macs_of
from vmckpt.vm.paths import QemuDir
from vmckpt.vm.spec.spec import Adopted, Spec, parse_spec

MINE = UUID("11111111-2222-4333-8444-555555555555")


def taken(line: str, *drives: object, **more: object) -> CheckpointFacts:
    """The facts of a checkpoint of a QEMU that was started so, and adopted."""
    seen = facts(line, *drives, **more)  # type: ignore[arg-type]
    spec = parse_spec(spec_text("web", seen, rewrite("web", seen)), "-", Path("/"))
    disks = tuple(
        DiskFacts(str(disk.path), disk.format, 1 << 20, disk.read_only, f"disk-{number}")
        for number, disk in enumerate(spec.disks)
    )
    return replace(
        checkpoint_facts("one"), spec=spec.text, disks=disks, macs=macs_of(spec),
        memory_bytes=spec.memory_bytes,
    )  # fmt: skip


def copied(of: CheckpointFacts, *, plugged: bool = False, overlays: bool = False) -> Spec:
    made = plan_copy(
        of, HOST, "web-2", OURS, keep_macs=False, plugged=plugged, overlays=overlays
    ).spec
    # Its spec says the same wherever it is read.
    assert parse_spec(made.text, "-", Path("/elsewhere"))._replace(text="") == made._replace(
        text=""
    )
    return made


def started(spec: Spec, *, private: bool = False) -> list[str]:
    files = QemuDir(Path("/state/vms/web-2/qemu-12345678"), "web-2", "12345678")
    return qemu_argv(
        spec, TCG, files, "qemu", incoming=True, private_ram=private, ram_is_read_only=private
    )


# -- NICs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["-device", "virtio-net-pci,netdev=a"], ["52:54:00:12:34:56"]),
        # In the order in which QEMU makes them, and never one that is taken.
        (["-device", '{"driver":"e1000"}', "-device", "rtl8139", "-nic", "user", "-net", "nic"],
         ["52:54:00:12:34:59", "52:54:00:12:34:58", "52:54:00:12:34:56", "52:54:00:12:34:57"]),
        (["-nic", "tap,mac=52:54:00:12:34:56", "-device", "e1000e,netdev=b"],
         ["52:54:00:12:34:56", "52:54:00:12:34:57"]),
        (["-net", "nic,macaddr=BC:24:11:00:00:01", "-net", "user"], ["bc:24:11:00:00:01"]),
        (["-nic", "none", "-net", "none", "-netdev", "user,id=n", "-device", "virtio-blk-pci"], []),
        # What looks like an option is the value of another one.
        (["-append", "-nic", "-nic", "user"], ["52:54:00:12:34:56"]),
    ],
)  # fmt: skip
def test_each_nic_has_the_address_that_qemu_gives_it(
    arguments: list[str], found: list[str]
) -> None:
    assert macs(arguments) == found
    new = [f"52:54:00:00:00:{number:02x}" for number in range(len(found))]
    changed = with_macs(arguments, new)
    assert macs(changed) == new
    assert [changed[n] for n, word in enumerate(arguments) if word.startswith("-")] == [
        word for word in arguments if word.startswith("-")
    ]


def test_a_copy_has_its_own_macs_and_the_guest_is_told_of_them() -> None:
    of = taken("-m 512 -nic user -netdev tap,id=t -device virtio-net-pci,netdev=t")
    assert of.macs == ("52:54:00:12:34:56", "52:54:00:12:34:57")
    spec = copied(of)
    own = tuple(default_mac("web-2", number) for number in range(2))
    assert macs_of(spec) == own
    assert new_macs(of, spec) == list(zip(of.macs, own, strict=True))
    kept = plan_copy(of, HOST, "web-2", OURS, keep_macs=True).spec
    assert new_macs(of, kept) == []
    assert new_macs(of, plan_itself(of, HOST, OURS).spec) == []


# -- identity -------------------------------------------------------------------------------------


def test_a_machine_has_one_new_uuid_wherever_its_line_names_one() -> None:
    before = ["-uuid", str(MINE), "-smbios", f"type=1,uuid={MINE},serial=ds=x", "-smbios", "type=2"]
    assert with_uuid(before, "X") == [
        "-uuid", "X", "-smbios", "type=1,uuid=X,serial=ds=x", "-smbios", "type=2",
    ]  # fmt: skip
    assert with_uuid(["-m", "64M"], "X") == ["-m", "64M"]
    made = copied(taken(f"-m 512 -uuid {MINE} -smbios type=1,uuid={MINE}"))
    assert made.adopted
    text = " ".join(made.adopted.arguments)
    (new, again) = re.findall(r"-uuid (\S+)", text) + re.findall(r"uuid=(\S+)", text)
    assert new == again != str(MINE)


def test_the_guest_sees_that_time_went_back_in_its_generation_id() -> None:
    of = taken(f"-m 512 -device vmgenid,guid={MINE},id=g", devices={"g": "vmgenid"})
    for spec in (copied(of), plan_itself(of, HOST, OURS).spec):
        assert spec.adopted
        (device,) = [word for word in spec.adopted.arguments if "vmgenid" in word]
        assert str(MINE) not in device
        assert str(MINE) not in spec.text
    assert with_new_generation(["-device", "VGA"]) == ["-device", "VGA"]


def test_the_vm_itself_is_as_it_was_to_the_letter() -> None:
    for line, drives, known in (
        (PROXMOX, drive("/dev/pve/vm-100-disk-0", "drive-scsi0", owner="scsi0", driver="raw"),
         ("pci.3", "tablet", "vga", "qga0", "virtioscsi0", "scsi0", "net0")),
        (JSON_STYLE, drive("/img/a,b.qcow2", owner="v0", node="top"), ("v0", "n0", "s0")),
        ("-m 512 -hda /disk.img", drive("/disk.img", "ide0-hd0", driver="raw"), ()),
    ):  # fmt: skip
        of = taken(line, drives, devices=dict.fromkeys(known, "x"))
        if "/dev/" not in line:
            assert plan_itself(of, HOST, OURS).spec.text == of.spec


# -- images ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "kind", "after"),
    [
        (["-drive", "file=<vmckpt:disk0>,if=virtio,format=raw"], "qcow2",
         ["-drive", "file=<vmckpt:disk0>,if=virtio,format=qcow2"]),
        (["-drive", "driver=qcow2,file.driver=host_device,file.filename=<vmckpt:disk0>,"
          "backing.driver=raw,backing.file.filename=/base"], "qcow2",
         ["-drive", "driver=qcow2,file.driver=file,file.filename=<vmckpt:disk0>"]),
        (["-blockdev", "driver=host_device,node-name=f,filename=<vmckpt:disk0>",
          "-blockdev", "driver=raw,node-name=d,file=f,offset=512,size=4096"], "raw",
         ["-blockdev", "driver=file,node-name=f,filename=<vmckpt:disk0>",
          "-blockdev", "driver=raw,node-name=d,file=f"]),
        # A fork's overlay: also where the format was none, or what reads it is not next to it.
        (["-blockdev", "driver=file,node-name=d,filename=<vmckpt:disk0>", "-device", "x,drive=d"],
         "qcow2",
         ["-blockdev", "driver=file,node-name=vmckpt-file0,filename=<vmckpt:disk0>",
          "-blockdev", '{"driver":"qcow2","node-name":"d","file":"vmckpt-file0"}',
          "-device", "x,drive=d"]),
        (["-blockdev", '{"driver":"raw","node-name":"d","file":{"driver":"throttle",'
          '"throttle-group":"g","file":{"driver":"file","filename":"<vmckpt:disk0>"}}}'], "qcow2",
         ["-blockdev", '{"driver":"qcow2","node-name":"d","file":{"driver":"throttle",'
          '"throttle-group":"g","file":{"driver":"file","filename":"<vmckpt:disk0>"}}}']),
        (["-blockdev", '{"driver":"qcow2","node-name":"d","backing":null,"file":{"driver":"file",'
          '"filename":"<vmckpt:disk0>"}}'], "qcow2",
         ["-blockdev", '{"driver":"qcow2","node-name":"d","file":{"driver":"file",'
          '"filename":"<vmckpt:disk0>"}}']),
    ],
)  # fmt: skip
def test_an_image_from_a_checkpoint_stands_alone(
    before: list[str], kind: str, after: list[str]
) -> None:
    made = on_whole_images(before, {0: kind})
    assert list(made.arguments) == after
    assert on_whole_images(made.arguments, {0: kind}).arguments == made.arguments


def test_images_that_it_was_based_on_are_not_opened_any_more() -> None:
    """QEMU read them instead of the image that it was given, and could not lock them."""
    chain = (
        "-blockdev driver=file,node-name=f,filename=/top.qcow2 "
        "-blockdev driver=file,node-name=bf,filename=/base.qcow2 "
        "-blockdev driver=qcow2,node-name=b,file=bf "
        "-blockdev driver=qcow2,node-name=d,file=f,backing=b -device virtio-blk-pci,drive=d,id=v"
    )
    of = taken(
        f"-m 512 {chain}", drive("/top.qcow2", owner="v", node="d"), devices={"v": "virtio-blk-pci"}
    )
    assert Path("/base.qcow2") in parse_spec(of.spec, "-", Path("/")).files
    for spec in (copied(of, overlays=True), plan_itself(of, HOST, OURS).spec):
        assert spec.files == ()
        text = " ".join(started(spec))
        assert "base" not in text
        assert "backing" not in text
    # Another disk that is based on the same image keeps it.
    other = "-blockdev driver=qcow2,node-name=e,file=g,backing=b"
    made = on_whole_images(
        chain.replace("/top.qcow2", "<vmckpt:disk0>").split() + other.split(), {0: "qcow2"}
    )
    assert "backing=b" in made.arguments[-1]
    assert "driver=qcow2,node-name=b,file=bf" in made.arguments
    assert made.unused == frozenset()


def test_a_place_for_an_overlays_format_is_not_invented() -> None:
    node = (
        '{"driver":"throttle","node-name":"d","throttle-group":"g",'
        '"file":{"driver":"file","filename":"<vmckpt:disk0>"}}'
    )
    with pytest.raises(RefusedError, match="disk 0 cannot have an image of format qcow2"):
        on_whole_images(["-blockdev", node], {0: "qcow2"})
    assert on_whole_images(["-blockdev", node], {0: "raw"}).arguments == ("-blockdev", node)


def test_a_copy_writes_to_images_of_its_own_and_a_fork_to_qcow2() -> None:
    known = ("pci.3", "tablet", "vga", "qga0", "virtioscsi0", "scsi0", "net0")
    disk = drive("/dev/pve/vm-100-disk-0", "drive-scsi0", owner="scsi0", driver="raw")
    of = taken(PROXMOX, disk, devices=dict.fromkeys(known, "x"), labels=frozenset())
    for overlays, kind in ((False, "raw"), (True, "qcow2")):
        text = " ".join(started(copied(of, overlays=overlays)))
        assert "/dev/pve" not in text
        image = f"/state/images/web-2-0.{kind}"
        assert f"-drive file={image},if=none,id=drive-scsi0,format={kind}," in text


# -- memory ---------------------------------------------------------------------------------------


def test_a_forks_memory_is_its_own_and_what_it_shares_is_not_opened_to_be_written() -> None:
    spec = copied(taken("-m 512"), overlays=True)
    (ram,) = [json.loads(word) for word in started(spec, private=True) if 'pc.ram"' in word]
    assert (ram["share"], ram["readonly"], ram["rom"]) == (False, True, "off")
    (ram,) = [json.loads(word) for word in started(spec) if 'pc.ram"' in word]
    assert ram["share"] is True
    assert "readonly" not in ram


# -- networks, and what only one machine can have -------------------------------------------------


def test_a_copy_has_no_network_now_or_later_unless_it_is_asked_for() -> None:
    of = taken("-m 512 -nic user -netdev tap,id=t,ifname=x -device e1000,netdev=t")
    isolated, plugged = started(copied(of)), started(copied(of, plugged=True))
    assert [word for word in isolated if word.startswith("type=user")] == []
    assert [word for word in plugged if word.startswith("type=user")] != []
    # Its tap has the same settings, on no bridge.
    taps = [[word for word in words if "ifname=" in word] for words in (isolated, plugged)]
    assert taps[0] == taps[1] == ["type=tap,id=t,ifname=vk123456781,script=no,downscript=no,"
                                  "vhost=off"]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "plugged", "words"),
    [
        ("-nic user,hostfwd=tcp::2222-:22", True, "'-nic type=user,hostfwd=tcp::2222-:22' listens"),
        ("-netdev user,id=n,hostfwd=udp::53-:53", True, "listens on ports of the host"),
        ("-device vhost-vsock-pci,guest-cid=3", False, "has the context ID 3"),
        (
            "-device e1000,id=n -set device.n.mac=52:54:00:00:00:01",
            False,
            "address of the original",
        ),
    ],
)
def test_what_only_one_machine_can_have_is_refused_by_name(
    line: str, words: str, *, plugged: bool
) -> None:
    with pytest.raises(RefusedError, match="cannot become 'web-2'") as refused:
        copied(taken(f"-m 512 {line}"), plugged=plugged)
    assert words in refused.value.why


def test_a_cut_off_copy_has_no_ports_of_the_host_later_either() -> None:
    of = taken("-m 512 -nic user,hostfwd=tcp::2222-:22")
    made = copied(of)
    assert made.adopted
    assert made.adopted.forwards == ()
    assert "hostfwd" not in made.text
    assert list(undoubled(made.adopted.arguments, plugged=True)) == []
    assert parse_spec(of.spec, "-", Path("/")).adopted == plan_itself(of, HOST, OURS).spec.adopted


def test_a_network_that_its_spec_does_not_list_is_no_isolation() -> None:
    """Only what [[nics]] lists is cut off: an argument that was added by hand was not."""
    spec = copied(taken("-m 512 -nic none"))
    assert spec.adopted
    for more, verdict in (((), "ok"), (("-netdev", "user,id=n"), "refuse")):
        adopted = Adopted((*spec.adopted.arguments, *more), (), ())
        found = asyncio.run(ask(isolation_checks(spec._replace(adopted=adopted), HOST)))
        assert [check.verdict for check in found] == [verdict]
