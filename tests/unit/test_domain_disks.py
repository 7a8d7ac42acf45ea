"""Disks of a domain that are no files: on the network, in a pool, of the host's own."""

import pytest

from vmckpt.preflight.domains.disks import may_vouch, strange
from vmckpt.vm.domains.definition.description import DomainDisk, parse_domain

pytestmark = pytest.mark.unit
_DOMAIN = """<domain type='qemu'><name>web</name><os><type>hvm</type></os><devices>
<disk type='{kind}' device='disk'><source {source}/><target dev='vdb'/></disk>
<disk type='file' device='disk'><source file='/srv/web.qcow2'/><target dev='vda'/></disk>
</devices></domain>"""


def disks(kind: str, source: str) -> tuple[DomainDisk, ...]:
    return parse_domain(_DOMAIN.format(kind=kind, source=source)).disks


@pytest.mark.parametrize(
    ("kind", "source", "refused", "vouched"),
    [
        ("network", "protocol='nbd' name='disk'", None, True),
        ("volume", "pool='default' volume='web'", None, False),
        ("nvme", "type='pci' namespace='1'", "NVMe device of the host's own", True),
        ("dir", "dir='/srv'", "does not know", True),
    ],
)
def test_what_is_no_file_is_on_the_network_or_libvirts_to_judge_or_refused(
    kind: str, source: str, refused: str | None, *, vouched: bool
) -> None:
    found = disks(kind, source)
    assert [disk.path is None for disk in found] == [True, False]
    reasons = [obstacle.reason for obstacle in strange(found)]
    assert (refused is None) is (reasons == [])
    assert refused is None or refused in reasons[0]
    assert may_vouch(found) is vouched
