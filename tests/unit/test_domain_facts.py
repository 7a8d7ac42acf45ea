"""What a checkpoint of a libvirt domain records, and what it becomes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from vmckpt.checkpoint.domains.planned import ImageLocations, plan_copy, plan_itself
from vmckpt.checkpoint.facts import CheckpointFacts, DiskFacts, DomainFacts, own_facts
from vmckpt.errors import NotFoundError, RefusedError
from vmckpt.store.files.manifest import AreaFacts, Manifest
from vmckpt.vm.domains.definition.description import ImageFile
from vmckpt.vm.domains.definition.parts import parts_of

pytestmark = pytest.mark.unit
UUID = "11111111-1111-1111-1111-111111111111"
XML = f"""\
<domain type='kvm'><name>web</name><uuid>{UUID}</uuid>
<os><type arch='x86_64' machine='pc-q35-10.0'>hvm</type></os><devices>
<disk type='file' device='disk'><driver name='qemu' type='qcow2'/><source file='/i/web.qcow2'/>
<target dev='vda' bus='virtio'/></disk>
<disk type='file' device='cdrom'><driver name='qemu' type='raw'/><source file='/i/cd.iso'/>
<target dev='sda' bus='sata'/><readonly/></disk>
<disk type='block' device='disk'><driver name='qemu' type='raw'/><source dev='/dev/vg/data'/>
<target dev='vdb' bus='virtio'/></disk>
<interface type='bridge'><mac address='52:54:00:00:00:01'/><source bridge='br0'/></interface>
<graphics type='vnc' passwd='secret'/></devices></domain>"""
SPEC = """\
name = "web"
memory = "64M"
[[disks]]
path = "/i/web.qcow2"
[[disks]]
path = "/i/cd.iso"
format = "raw"
read_only = true
[[disks]]
path = "/dev/vg/data"
format = "raw"
[[nics]]
network = "bridge"
"""


def facts(**changes: object) -> CheckpointFacts:
    size = 1 << 20
    found = CheckpointFacts(
        name="one",
        host="lab-a",
        taken_unix_s=1.0,
        trigger="operator",
        tags={},
        spec=SPEC,
        platform={"machine": "pc-q35-10.0", "accel": "tcg", "cpu": "qemu64"},
        qemu_version="10.0.2",
        machine={},
        firmware=None,
        memory_bytes=64 << 20,
        disks=(
            DiskFacts("/i/web.qcow2", "qcow2", size, False, "disk-0"),
            DiskFacts("/i/cd.iso", "raw", size, True, None),
            DiskFacts("/dev/vg/data", "raw", size, False, "disk-1"),
        ),
        macs=("52:54:00:00:00:01",),
        pause_ms=9.4,
        passes=1,
        took_s=1.0,
        changed_pages=1,
        domain=DomainFacts(UUID, XML, XML),
    )
    return replace(found, **changes)  # type: ignore[arg-type]


def manifest(of: CheckpointFacts) -> Manifest:
    ram = AreaFacts("ram", 64 << 20, 4096, 1, 1, 1)
    disks = [AreaFacts(f"disk-{n}", 1 << 20, 65536, 1, 1, 1) for n in range(2)]
    areas = (ram, *disks)
    return Manifest("a" * 32, "web", None, 1.0, 1, areas, (), (), of.to_json(), UUID, 1)


def test_its_xml_is_recorded_and_not_shown() -> None:
    one = facts()
    assert CheckpointFacts.from_json(json.loads(json.dumps(one.to_json()))) == one
    assert one.shown()["domain"] == {"uuid": UUID}
    assert "secret" not in json.dumps(one.shown())
    plain = facts(domain=None)
    assert "domain" not in plain.to_json()  # earlier versions refuse what they do not know
    assert plain.shown() == plain.to_json()


def test_only_libvirt_makes_its_machine_again() -> None:
    with pytest.raises(RefusedError, match="cannot become a VM of vmckpt's own"):
        own_facts(manifest(facts()))
    assert own_facts(manifest(facts(domain=None))).domain is None
    with pytest.raises(RefusedError, match="not of a libvirt domain"):
        plan_itself(facts(domain=None))


ELSEWHERE = ImageLocations(
    lambda _n, part, kind: Path("/new") / f"{part.target}.{kind}",
    lambda store: Path("/new") / f"nvram.{store.format}",
)


def test_a_uefi_variable_store_is_one_more_image() -> None:
    """Its content is QEMU's to write, so it is no disk."""

    def stored(text: str) -> tuple[ImageFile | None, ...]:
        with_store = text.replace("</os>", "<nvram template='/t'>/v/web_VARS.fd</nvram></os>")
        taken = facts(domain=DomainFacts(UUID, with_store, with_store))
        plans = (
            plan_itself(taken),
            plan_itself(taken, ELSEWHERE),
            plan_copy(taken, "web-2", keep_macs=False, plugged=False),
        )
        for plan in plans:
            assert plan.images[-1] == plan.variables
            assert len(plan.images) == len(plan.disks) + 1
            for xml in (plan.xml, plan.definition):
                assert parts_of(xml).variables == plan.variables
        return tuple(plan.variables for plan in plans)

    places = [Path("/v/web_VARS.fd"), Path("/new/nvram.raw"), Path("/v/web-2_VARS.fd")]
    assert stored(XML) == tuple(ImageFile(path, "raw") for path in places)
    assert plan_itself(facts()).variables is None


def test_the_domain_itself_has_its_images_where_they_were_or_where_they_are_put() -> None:
    plan = plan_itself(facts())
    assert (plan.name, plan.uuid) == ("web", UUID)
    assert [(one.target, one.area, str(one.image.path)) for one in plan.disks] == [
        ("vda", "disk-0", "/i/web.qcow2"), ("vdb", "disk-1", "/dev/vg/data"),
    ]  # fmt: skip
    moved = plan_itself(facts(), ELSEWHERE)
    for text in (moved.xml, moved.definition):
        assert [str(part.path) for part in parts_of(text).disks] == [
            "/new/vda.qcow2", "/i/cd.iso", "/new/vdb.raw",
        ]  # fmt: skip
    assert plan_itself(facts(domain=DomainFacts(UUID, XML, ""))).definition == ""


def test_a_copys_images_are_where_libvirts_qemus_reach_them() -> None:
    plan = plan_copy(facts(), "web-2", keep_macs=False, plugged=False)
    assert plan.name == "web-2"
    assert plan.uuid != UUID
    assert [str(one.image.path) for one in plan.disks] == [
        "/i/web-2-0.qcow2", "/var/lib/libvirt/images/web-2-2.raw",
    ]  # fmt: skip
    assert plan.uuid in plan.xml
    assert plan.uuid in plan.definition
    assert parts_of(plan.xml).macs != ("52:54:00:00:00:01",)
    kept = plan_copy(facts(), "web-2", keep_macs=True, plugged=True)
    assert parts_of(kept.xml).macs == ("52:54:00:00:00:01",)


def test_a_forks_images_are_overlays_beside_bases_of_its_own_name() -> None:
    plan = plan_copy(facts(), "web-2", keep_macs=False, plugged=False, overlays=True)
    assert [(one.image, one.base) for one in plan.disks] == [
        (
            ImageFile(Path("/i/web-2-0.qcow2"), "qcow2"),
            ImageFile(Path("/i/web-2-0.vmckpt-base.qcow2"), "qcow2"),
        ),
        (
            ImageFile(Path("/var/lib/libvirt/images/web-2-2.qcow2"), "qcow2"),
            ImageFile(Path("/var/lib/libvirt/images/web-2-2.vmckpt-base.raw"), "raw"),
        ),
    ]
    # A restore that is cut off removes both, and libvirt is given the overlay.
    assert {one.path for one in plan.images} >= {Path("/i/web-2-0.vmckpt-base.qcow2")}
    written = [part for part in parts_of(plan.xml).disks if not part.read_only]
    assert [str(part.path) for part in written] == [str(one.image.path) for one in plan.disks]
    assert "-base" not in plan.xml


def test_memory_whose_free_pages_read_as_zeroes_is_not_shared() -> None:
    """What QEMU gives back of it would have the file's content again."""
    for balloon, shares in (("", True), (" freePageReporting='on'", False)):
        xml = XML.replace("</devices>", f"<memballoon model='virtio'{balloon}/></devices>")
        plan = plan_copy(
            facts(domain=DomainFacts(UUID, xml, xml)), "web-2", keep_macs=False, plugged=False
        )
        assert (plan.cannot_share == "") is shares


def test_contradictions_are_refused() -> None:
    first, *rest = facts().disks
    with pytest.raises(RefusedError, match="contradictory"):
        plan_itself(facts(disks=(replace(first, path="/etc/passwd"), *rest)))
    with pytest.raises(NotFoundError, match="vda"):
        plan_itself(facts(disks=(replace(first, area=None), *rest)))


def test_a_copy_shares_no_disk_that_the_original_has_from_its_next_start_on() -> None:
    later = """<disk type='file' device='disk'><driver name='qemu' type='qcow2'/>
<source file='/i/more.qcow2'/><target dev='vdc' bus='virtio'/></disk></devices>"""
    domain = DomainFacts(UUID, XML, XML.replace("</devices>", later))
    with pytest.raises(RefusedError) as refused:
        plan_copy(facts(domain=domain), "web-2", keep_macs=False, plugged=False)
    assert "had disk vdc (/i/more.qcow2) from its next start on" in refused.value.why


def test_a_nic_that_the_original_has_from_its_next_start_on_gets_an_address_of_its_own() -> None:
    later = "<interface type='bridge'><mac address='52:54:00:00:00:02'/></interface></devices>"
    domain = DomainFacts(UUID, XML, XML.replace("</devices>", later))
    plan = plan_copy(facts(domain=domain), "web-2", keep_macs=False, plugged=False)
    macs = parts_of(plan.definition).macs
    assert len(set(macs) | {"52:54:00:00:00:01", "52:54:00:00:00:02"}) == 4
