"""Which images a domain's restore makes and replaces, on a host with real files."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.fake_libvirtd import FakeLibvirtd
from tests.qcow2 import with_snapshots
from tests.unit.test_domain_facts import UUID, XML, facts
from vmckpt.checkpoint.domains.planned import plan_itself
from vmckpt.checkpoint.domains.record import Phase, finished, write_down
from vmckpt.checkpoint.domains.restore import _DomainRestoring
from vmckpt.checkpoint.facts import CheckpointFacts, DiskFacts, DomainFacts
from vmckpt.errors import RefusedError
from vmckpt.hosts.local import LocalHost
from vmckpt.vm.domains.flags import DomainState
from vmckpt.vm.domains.inventory import as_domain
from vmckpt.vm.domains.replies import DomainInfo

pytestmark = pytest.mark.contract
OLD, SIZE = b"the old one", 1 << 20


class Point:
    """A checkpoint whose disks begin with 1s."""

    def area(self, _: str) -> "Point":
        return self

    def stream(self) -> Any:
        yield np.array([0]), b"1" * 65536


def of(image: Path, kind: str = "raw") -> CheckpointFacts:
    """A checkpoint of a domain with one disk."""
    head, disks = XML.split("<disk ", 1)[0], disks_xml(image, kind)
    xml = f"{head}{disks}</devices></domain>"
    stored = (DiskFacts(str(image), kind, SIZE, False, "disk-0"),)
    return replace(facts(), disks=stored, domain=DomainFacts(UUID, xml, xml))


def disks_xml(image: Path, kind: str) -> str:
    return (
        f"<disk type='file' device='disk'><driver name='qemu' type='{kind}'/>"
        f"<source file='{image}'/><target dev='vda' bus='virtio'/></disk>"
    )


def restoring(root: Path, checkpoint: CheckpointFacts, *, in_place: bool) -> _DomainRestoring:
    host = LocalHost("a", root / "state", "::1")
    session = FakeLibvirtd(host, snapshots=[], has_saved_memory=False, define=None)
    assert checkpoint.domain is not None
    seen = DomainInfo(UUID, "web", DomainState.SHUTOFF, 1, True, checkpoint.domain.xml)
    old = as_domain(host, seen) if in_place else None
    point: Any = Point()
    plan = plan_itself(checkpoint)
    return _DomainRestoring(plan, point, checkpoint, host=host, session=session, old=old)


def test_no_file_is_made_where_a_volume_was(tmp_path: Path) -> None:
    """It would be in the host's memory, and gone with all that the guest writes after a boot."""
    work = restoring(tmp_path, of(Path("/dev/vmckpt-test/web")), in_place=False)
    with pytest.raises(RefusedError, match="in the memory of a"):
        asyncio.run(work._require_new_images())


def test_libvirts_qemus_reach_images_in_a_directory_that_is_made_for_them(tmp_path: Path) -> None:
    """They run as another user: on a host without the directory no restore worked, nor a second
    try.
    """
    work = restoring(tmp_path, of(tmp_path / "srv" / "vms" / "web.raw"), in_place=False)
    before = os.umask(0o077)
    try:
        work._write_images()
    finally:
        os.umask(before)
    for directory in (tmp_path / "srv", tmp_path / "srv" / "vms"):
        assert directory.stat().st_mode & 0o777 == 0o711


def test_what_is_led_to_by_a_link_gets_the_content_where_it_is(tmp_path: Path) -> None:
    """The new image was put in the link's place, on a disk without room for it, say."""
    image, link = tmp_path / "large" / "1.raw", tmp_path / "web.raw"
    image.parent.mkdir()
    image.write_bytes(OLD)
    link.symlink_to("large/1.raw")
    work = restoring(tmp_path, of(link), in_place=True)
    asyncio.run(work._require_same())
    pending = work._pending()

    async def run() -> None:
        await write_down(work._host, pending)
        work._write_images()
        pending.put_in_place()
        await finished(work._host, pending.at(Phase.RUNNING), work._session)

    asyncio.run(run())
    assert link.is_symlink()
    assert image.read_bytes()[:65536] == b"1" * 65536
    assert {path.name for path in tmp_path.glob("**/*.raw*")} == {"web.raw", "1.raw"}


def test_a_link_of_another_user_is_not_followed(tmp_path: Path) -> None:
    link = tmp_path / "web.raw"
    (tmp_path / "of-root").write_bytes(OLD)
    link.symlink_to("of-root")
    if os.geteuid():
        pytest.skip("only root can give a link away")
    os.lchown(link, 12345, 12345)
    with pytest.raises(RefusedError, match="cannot be replaced"):
        restoring(tmp_path, of(link), in_place=True)._pending()


def test_internal_snapshots_from_before_the_checkpoint_stay(tmp_path: Path) -> None:
    """Libvirt knows nothing of those that qemu-img made, or of a domain that was undefined."""
    image = tmp_path / "web.qcow2"
    with_snapshots(image, ("clean", 0))
    work = restoring(tmp_path, of(image, "qcow2"), in_place=True)
    with pytest.raises(RefusedError, match="'web' cannot be replaced") as refused:
        asyncio.run(work._require_same())
    assert "clean" in refused.value.why
