"""What uses the images of a host's folder, by whatever path; and that only unused ones go."""

import asyncio
import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.commands import vmckpt
from tests.faulty_host import Fault, FaultyHost
from vmckpt.errors import RefusedError
from vmckpt.hosts.every import Answers
from vmckpt.hosts.host import Completed
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes.process import ProcessId
from vmckpt.options.migration import Disks
from vmckpt.preflight.migration.disks import Owned, plan_disks
from vmckpt.qemu.block import DiskImage
from vmckpt.vm.disks import images as images_module
from vmckpt.vm.disks.backing import base_of_its_own
from vmckpt.vm.disks.images import (
    HostImage,
    files_of_domains,
    images_of,
    remove_image,
    remove_own,
    unused,
)
from vmckpt.vm.domains import inventory
from vmckpt.vm.domains.definition.description import ImageFile
from vmckpt.vm.domains.flags import DomainState
from vmckpt.vm.domains.inventory import Domain, as_domain
from vmckpt.vm.domains.replies import DomainInfo
from vmckpt.vm.paths import vm_dir
from vmckpt.vm.record import Platform, Qemu
from vmckpt.vm.spec.spec import Disk

pytestmark = pytest.mark.contract

PLATFORM = Platform("q35", "tcg", "qemu64")
UUID = "1f35de32-7e71-4af7-8d9b-1a3c5f3a0a01"
# As after a login to a host whose language is another.
IN_GERMAN = ["env", "LC_ALL=C.UTF-8", "LANGUAGE=de"]


def overlay(path: Path, backing: str) -> None:
    """A qcow2 image of no clusters on a backing file."""
    path.parent.mkdir(exist_ok=True)
    head = struct.pack(">4sIQIIQ", b"QFI\xfb", 3, 512, len(backing), 16, 1 << 20)
    path.write_bytes(head.ljust(512, b"\0") + backing.encode())


def on_data(path: Path, data: Path) -> None:
    """A qcow2 image whose clusters are in another file (qemu-img create -o data_file=...)."""
    head = bytearray(struct.pack(">4sIQIIQ", b"QFI\xfb", 3, 0, 0, 16, 1 << 20).ljust(104, b"\0"))
    head[72:80], head[100:104] = (4).to_bytes(8), (104).to_bytes(4)
    name = str(data).encode()
    extension = b"DATA" + len(name).to_bytes(4) + name.ljust(-(-len(name) // 8) * 8, b"\0")
    path.write_bytes(bytes(head) + extension + bytes(8))


def a_vm(host: LocalHost, name: str, disk: str, *, at_home: bool = True) -> None:
    directory = vm_dir(host.state_dir, name)
    directory.path.mkdir(parents=True)
    directory.spec.write_text(f'name = "{name}"\nmemory = "64M"\n[[disks]]\n{disk}\n')
    if at_home:
        qemu = Qemu(directory.qemu("0"), ProcessId(0, 0), PLATFORM)
        qemu.files.path.mkdir()
        (qemu.files.path / "argv.json").write_text('["qemu-system-x86_64"]')
        directory.current.write_text(qemu.to_json())


@pytest.fixture
def host(tmp_path: Path) -> LocalHost:
    (tmp_path / "images").mkdir()
    return LocalHost("local", tmp_path, "127.0.0.1")


def users(host: LocalHost, **domains: list[Path]) -> dict[str, tuple[str, ...]]:
    files = {
        name: [ImageFile(path, path.suffix[1:]) for path in paths]
        for name, paths in domains.items()
    }
    found: list[HostImage] = asyncio.run(images_of(host, files))
    return {image.path.name: image.users for image in found}


def test_what_a_vm_has_by_name_path_or_link_is_its_own(host: LocalHost, tmp_path: Path) -> None:
    images = tmp_path / "images"
    for name in ("a.raw", "b.raw", "c.raw", "d.raw", "e.raw", "free.raw"):
        (images / name).write_bytes(b"x")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/link.raw").symlink_to(images / "b.raw")
    (tmp_path / "elsewhere/hard.raw").hardlink_to(images / "c.raw")
    a_vm(host, "va", 'image = "a.raw"\nformat = "raw"')
    a_vm(host, "vb", f'path = "{tmp_path}/elsewhere/link.raw"\nformat = "raw"')
    # A standby, or a VM that is just being made, is at home nowhere.
    a_vm(host, "vc", f'path = "{tmp_path}/elsewhere/hard.raw"\nformat = "raw"', at_home=False)
    journal = vm_dir(tmp_path, "va").path / "restore.json"
    journal.write_text(json.dumps({"made": [str(images / "d.raw")]}))
    assert users(host, dom=[tmp_path / "elsewhere/../images/e.raw"]) == {
        "a.raw": ("VM va",),
        "b.raw": ("VM vb",),
        "c.raw": ("VM vc",),
        "d.raw": ("VM va",),
        "e.raw": ("domain dom",),
        "free.raw": (),
    }


def test_images_are_told_in_whatever_language_a_host_speaks(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    host = LocalHost("local", tmp_path, "127.0.0.1", enter=tuple(IN_GERMAN))
    (tmp_path / "images/a.raw").write_bytes(b"x")
    (tmp_path / "images/empty.raw").touch()
    (tmp_path / "images/folder").mkdir()
    a_vm(host, "va", 'image = "a.raw"\nformat = "raw"')
    assert users(host) == {"a.raw": ("VM va",), "empty.raw": ()}


def test_a_backing_file_is_used_by_all_that_stands_on_it(host: LocalHost, tmp_path: Path) -> None:
    images = tmp_path / "images"
    (images / "base.raw").write_bytes(b"x")
    (images / "alias").symlink_to("base.raw")
    overlay(images / "middle.qcow2", "alias")
    (tmp_path / "forks").mkdir()
    overlay(tmp_path / "forks/top.qcow2", "../images/middle.qcow2")
    described = {
        "driver": "qcow2",
        "file": {"driver": "file", "filename": str(images / "json.raw")},
    }
    (images / "json.raw").write_bytes(b"x")
    overlay(images / "on-json.qcow2", f"json:{json.dumps(described)}")
    overlay(images / "loop.qcow2", "loop.qcow2")
    a_vm(host, "fork", f'path = "{tmp_path}/forks/top.qcow2"')
    found = users(host)
    assert found["middle.qcow2"] == ("VM fork",)
    assert set(found["base.raw"]) == {"VM fork", "image middle.qcow2"}
    assert found["json.raw"] == ("image on-json.qcow2",)
    assert found["on-json.qcow2"] == ()
    assert found["loop.qcow2"] == ("image loop.qcow2",)


def test_what_an_image_is_based_on_is_where_qemu_looks_for_it(
    host: LocalHost, tmp_path: Path
) -> None:
    """`--remove-unused` removed the base of an image that had been moved behind a link: a relative
    name is relative to the name by which QEMU opens the image.
    """
    images, elsewhere = tmp_path / "images", tmp_path / "larger-disk"
    elsewhere.mkdir()
    for name in ("base.raw", "dotted.raw", "data.raw"):
        (images / name).write_bytes(b"x")
    overlay(elsewhere / "web.qcow2", "base.raw")
    (images / "web.qcow2").symlink_to(elsewhere / "web.qcow2")
    a_vm(host, "web", 'image = "web.qcow2"')
    dotted = {"driver": "raw", "file.driver": "file", "file.filename": str(images / "dotted.raw")}
    overlay(elsewhere / "db.qcow2", f"json:{json.dumps(dotted)}")
    a_vm(host, "db", f'path = "{elsewhere}/db.qcow2"')
    on_data(elsewhere / "mail.qcow2", images / "data.raw")
    a_vm(host, "mail", f'path = "{elsewhere}/mail.qcow2"')
    found = users(host)
    assert found["base.raw"] == ("image web.qcow2",)
    assert (found["dotted.raw"], found["data.raw"]) == (("VM db",), ("VM mail",))


def test_a_domain_uses_more_than_its_disks(
    host: LocalHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`vm rm --disks` of a domain whose XML was copied from it removed its UEFI variables."""
    images = tmp_path / "images"
    for name in ("disk.qcow2", "base.raw", "vars.fd", "vmlinuz"):
        (images / name).write_bytes(b"x")
    chain = f"<backingStore type='file'><source file='{images}/base.raw'/></backingStore>"
    xml = f"""<domain type='kvm'><name>web</name><uuid>{UUID}</uuid>
        <os><type>hvm</type><kernel>{images}/vmlinuz</kernel><nvram>{images}/vars.fd</nvram></os>
        <devices><disk type='file'><source file='{images}/disk.qcow2'/>{chain}
        <target dev='vda'/></disk></devices></domain>"""
    host = replace(host, libvirt=tmp_path / "libvirt-sock")
    seen = DomainInfo(UUID, "web", DomainState.SHUTOFF, 1, persistent=True, xml=xml)

    async def all_domains(_: object) -> Answers[Domain]:
        return Answers([as_domain(host, seen)], [])

    monkeypatch.setattr(inventory, "all_domains", all_domains)
    found = asyncio.run(images_of(host, asyncio.run(files_of_domains(host))))
    assert {image.users for image in found} == {("domain web",)}
    kept = asyncio.run(remove_own(host, [images / "vars.fd"]))[1]
    assert kept == {str(images / "vars.fd"): "domain web"}


@pytest.mark.parametrize(
    "name",
    [
        b"victim.raw\0hidden",
        b"a\0b",
        b'json:{"driver":"raw","filename":"a\\u0000b"}',
        b'json:{"driver":"raw","filename":"\\ud800"}',
        b"\xff\xfe",
        b"-rf",
    ],
)
def test_what_a_hostile_image_says_ends_nothing(
    host: LocalHost, tmp_path: Path, name: bytes
) -> None:
    """Any guest can write such a header into a raw disk: what uses images was not known then, for
    no VM of the host, and each command that asks ended as by a bug.
    """
    images = tmp_path / "images"
    (images / "victim.raw").write_bytes(b"x")
    head = struct.pack(">4sIQIIQ", b"QFI\xfb", 3, 512, len(name), 16, 1 << 20)
    for image in ("evil.raw", "broken-out.qcow2"):
        (images / image).write_bytes(head.ljust(512, b"\0") + name)
    a_vm(host, "evil", 'image = "evil.raw"\nformat = "raw"')
    a_vm(host, "broken-out", 'image = "broken-out.qcow2"')
    a_vm(host, "victim", 'image = "victim.raw"\nformat = "raw"')
    found = users(host)
    assert found["evil.raw"] == ("VM evil",)
    # A QEMU that was broken into may claim that; it reads as far as the zero.
    claims = ("image broken-out.qcow2",) if name.startswith(b"victim") else ()
    assert set(found["victim.raw"]) == {"VM victim", *claims}


@pytest.mark.parametrize("name", ["größe.raw", 'the "old" one.raw'])
def test_a_record_names_an_image_of_any_name(host: LocalHost, tmp_path: Path, name: str) -> None:
    """In JSON it is spelled otherwise: the disk of a standby counted as unused."""
    (tmp_path / "images" / name).write_bytes(b"x")
    request = tmp_path / "replicas/web/request.json"
    request.parent.mkdir(parents=True)
    request.write_text(json.dumps({"disks": [{"path": str(tmp_path / "images" / name)}]}))
    assert users(host) == {name: ("replication of web",)}


def test_beside_a_vm_that_cannot_be_read_nothing_is_said_to_be_unused(
    host: LocalHost, tmp_path: Path
) -> None:
    (tmp_path / "images/a.raw").write_bytes(b"x")
    a_vm(host, "va", 'image = "a.raw"')
    vm_dir(tmp_path, "va").spec.write_text("nonsense =")
    with pytest.raises(RefusedError, match="is not known"):
        users(host)


def test_what_forks_will_stand_on_is_in_use_before_there_are_any(
    host: LocalHost, tmp_path: Path
) -> None:
    point, run = "0123456789abcdef" * 2, tmp_path / "jobs/fork/r1"
    names = (f"{point}-0.qcow2", f".{point}-0.qcow2.r1", f"{'f' * 32}-0.qcow2")
    for name in names:
        (tmp_path / "images" / name).write_bytes(b"x")
    run.mkdir(parents=True)
    run.joinpath("order.json").write_text(json.dumps({"request": {"wish": {"checkpoint": point}}}))
    used = ("fork run r1",)
    assert users(host) == {names[0]: used, names[1]: used, names[2]: ()}
    run.joinpath("outcome.json").write_text('{"is_over": false}')
    assert users(host)[names[0]] == used
    run.joinpath("outcome.json").write_text('{"is_over": true}')
    assert not any(users(host).values())


def test_an_image_that_a_vm_has_begun_to_use_meanwhile_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images/a.raw").write_bytes(b"x")
    # A VM is written down between the look at the image and its removal.
    meanwhile = Fault(
        "resolve", first=lambda _: a_vm(local, "late", 'image = "a.raw"', at_home=False)
    )
    local = FaultyHost("local", tmp_path, "127.0.0.1", faults=(meanwhile,))
    with pytest.raises(RefusedError, match="is in use") as refused:
        asyncio.run(remove_image(local, HostImage(tmp_path / "images/a.raw", 1, 1, ())))
    assert refused.value.why == "VM late"
    assert [path.name for path in (tmp_path / "images").iterdir()] == ["a.raw"]


def test_an_image_that_forks_have_found_as_their_base_meanwhile_is_not_removed(
    tmp_path: Path,
) -> None:
    """The forks' own images name it, and none was there yet."""
    point = "0123456789abcdef" * 2
    base = tmp_path / f"images/{point}-0.raw"
    base.parent.mkdir()
    base.write_bytes(b"x")

    def begins(_: object) -> None:
        run = tmp_path / "jobs/fork/r1"
        run.mkdir(parents=True)
        order = {"request": {"wish": {"checkpoint": point}}}
        run.joinpath("order.json").write_text(json.dumps(order))

    meanwhile = Fault("resolve", first=begins)
    local = FaultyHost("local", tmp_path, "127.0.0.1", faults=(meanwhile,))
    with pytest.raises(RefusedError, match="is in use") as refused:
        asyncio.run(remove_image(local, HostImage(base, 1, 1, ())))
    assert refused.value.why == "fork run r1"
    assert list(base.parent.iterdir()) == [base]


def said(state: Path, *words: str) -> tuple[int, dict[str, Any]]:
    done = vmckpt(state, *words, "--json")
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize(
    "user", ["nothing", "spec", "overlay", "overlay elsewhere", "damaged", "silent"]
)
@pytest.mark.parametrize("read_only", [False, True])
def test_an_image_that_others_need_stays_when_its_vm_moves(
    tmp_path: Path, user: str, *, read_only: bool
) -> None:
    """Another VM's image, or what it stands on, went with the VM that was moved."""
    a, b = (LocalHost(name, tmp_path / name, "127.0.0.1") for name in ("a", "b"))
    images = a.state_dir / "images"
    images.mkdir(parents=True)
    (images / "base.raw").write_bytes(b"x")
    a_vm(a, "golden", 'image = "base.raw"\nformat = "raw"')
    match user:
        case "spec":
            a_vm(a, "web", 'image = "base.raw"\nformat = "raw"')
        case "overlay":
            overlay(images / "web.qcow2", "base.raw")
        case "overlay elsewhere":
            overlay(tmp_path / "web.qcow2", str(images / "base.raw"))
            a_vm(a, "web", f'path = "{tmp_path}/web.qcow2"\nformat = "qcow2"')
        case "damaged":
            a_vm(a, "web", "image = 5")
        case "silent":
            a = replace(a, libvirt=tmp_path / "no-libvirtd")
    disk = Disk(Path("images/base.raw"), "raw", None, read_only, "none", "disk0")
    known = {"disk0": DiskImage("disk0", 1 << 20, 1, ())}
    plan = asyncio.run(plan_disks(Owned(a, "golden", (disk,), ("disk0",)), b, Disks.AUTO, known))
    (copy,) = plan.copies
    assert copy.keep is (user != "nothing")


@pytest.mark.parametrize("user", ["nothing", "spec", "overlay", "another of that path"])
def test_an_image_that_a_third_hosts_vm_needs_stays_when_its_vm_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: str
) -> None:
    """On storage that it shares with the source, but the destination does not: it was removed."""
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path / "a"))
    a, b, c = (LocalHost(name, tmp_path / name, "127.0.0.1") for name in ("local", "b", "c"))
    golden = tmp_path / "san/golden.raw"
    golden.parent.mkdir()
    golden.write_bytes(b"x")
    (tmp_path / "a/hosts").mkdir(parents=True)
    entry = {"kind": "local", "state_dir": str(c.state_dir), "migration_address": "127.0.0.1"}
    (tmp_path / "a/hosts/c.json").write_text(json.dumps(entry))
    a = replace(a, state_dir=tmp_path / "a")
    a_vm(a, "golden", f'path = "{golden}"\nformat = "raw"')
    match user:
        case "spec" | "another of that path":
            a_vm(c, "web", f'path = "{golden}"\nformat = "raw"')
        case "overlay":
            overlay(c.state_dir / "web.qcow2", str(golden))
            a_vm(c, "web", f'path = "{c.state_dir}/web.qcow2"')
    if user == "another of that path":

        async def not_shared(*_: object) -> tuple[bool, str]:
            return False, ""

        monkeypatch.setattr(images_module, "is_shared", not_shared)
    disk = Disk(golden, "raw", None, False, "none", "disk0")
    known = {"disk0": DiskImage("disk0", 1 << 20, 1, ())}
    owned = Owned(a, "golden", (disk,), ("disk0",), {"disk0": tmp_path / "b.raw"})
    (copy,) = asyncio.run(plan_disks(owned, b, Disks.COPY, known)).copies
    assert copy.keep is (user in ("spec", "overlay"))


def test_images_of_hosts_that_share_their_folders_are_all_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An NFS mount at each host's `images`: one host's unused ones were the disks of others."""
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(tmp_path / "a"))
    a, b, c = (LocalHost(name, tmp_path / name, "127.0.0.1") for name in ("local", "b", "c"))
    a = replace(a, state_dir=tmp_path / "a")
    (tmp_path / "a/hosts").mkdir(parents=True)
    entry = {"kind": "local", "state_dir": str(b.state_dir), "migration_address": "127.0.0.1"}
    (tmp_path / "a/hosts/b.json").write_text(json.dumps(entry))
    shared = tmp_path / "a/images"
    shared.mkdir()
    for name in ("web.raw", "base.raw", "free.raw"):
        (shared / name).write_bytes(b"x")
    b.state_dir.mkdir()
    (b.state_dir / "images").symlink_to(shared)
    a_vm(b, "web", 'image = "web.raw"\nformat = "raw"')
    overlay(b.state_dir / "db.qcow2", str(b.state_dir / "images/base.raw"))
    a_vm(b, "db", f'path = "{b.state_dir}/db.qcow2"')
    assert [one.path.name for one in asyncio.run(unused(a, [], every=True))] == ["free.raw"]
    with pytest.raises(RefusedError) as refused:
        asyncio.run(unused(a, ["web.raw"]))
    assert refused.value.why == "VM web on b"
    removed, kept = asyncio.run(remove_own(a, [shared / "base.raw", shared / "free.raw"]))
    assert (removed, kept) == (
        [str(shared / "free.raw")], {str(shared / "base.raw"): "VM db on b"},
    )  # fmt: skip
    disk = Disk(Path("images/web.raw"), "raw", None, False, "none", "disk0")
    known = {"disk0": DiskImage("disk0", 1 << 20, 1, ())}
    plan = plan_disks(Owned(a, "old", (disk,), ("disk0",)), c, Disks.COPY, known)
    assert asyncio.run(plan).copies[0].keep


def test_unused_images_are_listed_and_removed_on_request(host: LocalHost, tmp_path: Path) -> None:
    images = tmp_path / "images"
    for name in ("used.raw", "old.raw", "older.raw"):
        (images / name).write_bytes(b"x")
    overlay(images / "old.qcow2", "older.raw")
    a_vm(host, "web", 'image = "used.raw"\nformat = "raw"')
    _, listed = said(tmp_path, "host", "images")
    assert {Path(one["path"]).name: one["users"] for one in listed["images"]} == {
        "used.raw": ["VM web"],
        "old.raw": [],
        "old.qcow2": [],
        "older.raw": ["image old.qcow2"],
    }
    for name in ("used.raw", "older.raw"):
        code, refused = said(tmp_path, "host", "images", "local", "--remove", name)
        assert (code, refused["error"]["kind"]) == (4, "refused")
    assert said(tmp_path, "host", "images", "local", "--remove", "../secret")[0] == 3
    assert said(tmp_path, "host", "images", "--remove-unused")[0] == 2
    assert len(list(images.iterdir())) == 4
    code, removed = said(tmp_path, "host", "images", "local", "--remove-unused")
    assert (code, sorted(Path(one).name for one in removed["removed"])) == (
        0, ["old.qcow2", "old.raw"],
    )  # fmt: skip
    assert sorted(path.name for path in images.iterdir()) == ["older.raw", "used.raw"]


def test_a_removed_vm_leaves_its_disks_unless_they_are_to_go(
    host: LocalHost, tmp_path: Path
) -> None:
    images = tmp_path / "images"
    for name in ("one.raw", "two.raw", "base.raw", "cd.iso"):
        (images / name).write_bytes(b"x")
    overlay(images / "fork.qcow2", "base.raw")
    a_vm(host, "one", 'image = "one.raw"\nformat = "raw"')
    disks = [f'image = "{name}"\nformat = "raw"' for name in ("two.raw", "base.raw", "cd.iso")]
    a_vm(host, "two", "\n[[disks]]\n".join(disks) + "\nread_only = true")
    code, removed = said(tmp_path, "vm", "rm", "one")
    assert (code, removed["disks"], removed["removed_disks"]) == (0, [str(images / "one.raw")], [])
    code, removed = said(tmp_path, "vm", "rm", "two", "--disks")
    assert code == 0
    assert removed["removed_disks"] == [str(images / "two.raw")]
    assert removed["kept_disks"] == {str(images / "base.raw"): "image fork.qcow2"}
    assert sorted(path.name for path in images.iterdir()) == [
        "base.raw", "cd.iso", "fork.qcow2", "one.raw",
    ]  # fmt: skip


def test_the_base_of_a_forked_domains_disk_goes_with_it_and_other_forks_keep_theirs(
    host: LocalHost, tmp_path: Path
) -> None:
    """Each fork has a name of its own for the one image; removed with the first, it was lost."""
    folder = tmp_path / "disks"
    folder.mkdir()
    for number in (1, 2):
        overlay(folder / f"copy-{number}-0.qcow2", str(folder / f"copy-{number}-0.vmckpt-base.raw"))
    (folder / "copy-1-0.vmckpt-base.raw").write_bytes(b"x")
    (folder / "copy-2-0.vmckpt-base.raw").hardlink_to(folder / "copy-1-0.vmckpt-base.raw")
    (folder / "by-hand-base.raw").write_bytes(b"x")
    overlay(folder / "other.qcow2", str(folder / "by-hand-base.raw"))
    first = [str(folder / name) for name in ("copy-1-0.qcow2", "copy-1-0.vmckpt-base.raw")]
    done = asyncio.run(remove_own(host, [folder / "copy-1-0.qcow2"]))
    assert done == (first, {})
    assert (folder / "copy-2-0.vmckpt-base.raw").read_bytes() == b"x"
    # What others are based on by that name stays, and so does what is no fork's.
    overlay(folder / "by-hand.qcow2", str(folder / "copy-2-0.vmckpt-base.raw"))
    removed, kept = asyncio.run(remove_own(host, [folder / "copy-2-0.qcow2"]))
    assert removed == [str(folder / "copy-2-0.qcow2")]
    assert kept == {str(folder / "copy-2-0.vmckpt-base.raw"): "image by-hand.qcow2"}
    assert asyncio.run(remove_own(host, [folder / "other.qcow2"]))[1] == {}
    assert (folder / "by-hand-base.raw").exists()


def test_a_base_that_its_user_named_after_an_image_stays(host: LocalHost, tmp_path: Path) -> None:
    """`web-base.qcow2` below `web.qcow2` went with it: as people name images that they keep."""
    folder = tmp_path / "disks"
    folder.mkdir()
    base, image = folder / "web-base.raw", folder / "web.qcow2"
    base.write_bytes(b"x")
    overlay(image, str(base))
    assert asyncio.run(base_of_its_own(host, image)) is None
    assert asyncio.run(remove_own(host, [image])) == ([str(image)], {})
    assert base.read_bytes() == b"x"


@pytest.mark.parametrize("enter", [[], IN_GERMAN], ids=["english", "german"])
def test_an_image_that_another_hosts_vm_has_too_stays(
    host: LocalHost, tmp_path: Path, enter: list[str]
) -> None:
    (tmp_path / "san").mkdir()
    shared = tmp_path / "san/web.raw"
    shared.write_bytes(b"x")
    (tmp_path / "hosts").mkdir()
    other = LocalHost("b", tmp_path / "b", "127.0.0.1")
    entry: dict[str, object] = {"kind": "local", "state_dir": str(other.state_dir)}
    entry |= {"migration_address": "127.0.0.1", "enter": enter}
    (tmp_path / "hosts/b.json").write_text(json.dumps(entry))
    disk = f'path = "{shared}"\nformat = "raw"'
    a_vm(host, "web", disk)
    a_vm(other, "db", disk)
    code, removed = said(tmp_path, "vm", "rm", "web", "--disks")
    assert (code, removed["kept_disks"]) == (0, {str(shared): "VM db on b"})
    assert said(tmp_path, "vm", "rm", "db", "--disks")[1]["removed_disks"] == [str(shared)]
    assert not shared.exists()


@pytest.mark.parametrize("command", ["stat", "od"])
def test_a_host_that_makes_up_what_its_images_are_is_said_to(tmp_path: Path, command: str) -> None:
    """It ended `host images` of all hosts, and a migration, as a bug of vmckpt's."""
    made_up = Fault("run", of=lambda argv, *_: argv[0] == command, answers=Completed(0, "x\0y", ""))
    there = FaultyHost("a", tmp_path, "127.0.0.1", faults=(made_up,))
    (tmp_path / "images").mkdir()
    overlay(tmp_path / "images" / "web.qcow2", "base.qcow2")
    with pytest.raises(RefusedError, match="what uses the images of a is not known") as told:
        asyncio.run(images_of(there, {}))
    assert f"{command} says" in told.value.why
