"""Which images a domain's restore makes and replaces, on a host with real files."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tests.contract.test_images import overlay
from tests.fake_libvirtd import FakeLibvirtd
from tests.qcow2 import with_snapshots
from tests.unit.test_domain_facts import UUID, XML, facts
from vmckpt.checkpoint.domains import restore as module
from vmckpt.checkpoint.domains.planned import plan_itself
from vmckpt.checkpoint.domains.record import Phase, finished, write_down
from vmckpt.checkpoint.domains.restore import DomainRestoring
from vmckpt.checkpoint.facts import CheckpointFacts, DiskFacts, DomainFacts
from vmckpt.errors import RefusedError, StorageError
from vmckpt.hosts.local import LocalHost
from vmckpt.store.files.manifest import AreaFacts
from vmckpt.vm.domains.flags import DomainState
from vmckpt.vm.domains.inventory import as_domain
from vmckpt.vm.domains.job import DomainJob
from vmckpt.vm.domains.replies import DomainInfo

pytestmark = pytest.mark.contract
OLD, SIZE = b"the old one", 1 << 20


class Point:
    """A checkpoint whose disks begin with 1s, and whose memory has so many pages."""

    def __init__(self, pages: int) -> None:
        ram = AreaFacts("ram", pages * 4096, 4096, pages, pages, 0)
        self.manifest = SimpleNamespace(area=lambda _: ram)

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


def restoring(
    root: Path,
    checkpoint: CheckpointFacts,
    *,
    in_place: bool,
    state: DomainState = DomainState.SHUTOFF,
    pages: int = 1,
) -> DomainRestoring:
    host = LocalHost("a", root / "state", "::1")
    assert checkpoint.domain is not None
    seen = DomainInfo(UUID, "web", state, 1, persistent=True, xml=checkpoint.domain.xml)
    idle = DomainJob(active=False)
    session = FakeLibvirtd(
        host,
        snapshots=[],
        has_saved_memory=False,
        define=None,
        find=seen if in_place else None,
        job=idle,
    )
    old = as_domain(host, seen) if in_place else None
    point: Any = Point(pages)
    plan = plan_itself(checkpoint)
    return DomainRestoring(plan, point, checkpoint, host=host, session=session, old=old)


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


def test_a_copy_takes_no_memory_that_others_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guard's copy was loaded until the kernel ended a guest, the original for example."""
    image = tmp_path / "web.raw"
    work = restoring(tmp_path, of(image), in_place=False, pages=1 << 40)
    settles_by(monkeypatch, work)
    with pytest.raises(RefusedError, match="no room for the memory of 'web' on a"):
        asyncio.run(work.run(cast("Any", None), keep_macs=True))
    assert not image.exists()
    assert not work._files.promised.parent.exists()
    work = restoring(tmp_path, of(image), in_place=False)

    async def reserved() -> None:
        await work._host.make_dir(work._files.path)
        await work._reserve_memory()
        assert work._files.promised.exists()
        await work._host.remove(work._files.promised.parent)

    asyncio.run(reserved())


def settles_by(monkeypatch: pytest.MonkeyPatch, work: DomainRestoring) -> None:
    """By the same libvirtd."""

    @asynccontextmanager
    async def libvirtd(_: object) -> AsyncIterator[FakeLibvirtd]:
        yield cast("FakeLibvirtd", work._session)

    monkeypatch.setattr(module, "libvirtd", libvirtd)


def test_a_guest_whose_memory_has_no_room_is_not_paused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was paused while libvirt wrote until the disk was full."""
    image, free = tmp_path / "web.raw", [200 << 20]
    image.write_bytes(OLD)
    work = restoring(tmp_path, of(image), in_place=True, state=DomainState.RUNNING)

    async def free_bytes(_: object, directory: Path) -> int:
        assert directory == work._files.path
        return free[0]

    settles_by(monkeypatch, work)
    monkeypatch.setattr(LocalHost, "free_bytes", free_bytes)
    monkeypatch.setattr(module, "find_qemu", lambda uuid: os.getpid() if uuid == UUID else 0)
    monkeypatch.setattr(module, "saved_bytes", lambda pid, _: pid and 300 << 20)
    with pytest.raises(StorageError, match="no room for the memory of 'web'"):
        asyncio.run(work.run(cast("Any", None), keep_macs=True))
    assert image.read_bytes() == OLD
    assert [path.name for path in tmp_path.glob("web.raw*")] == ["web.raw"]
    free[0] = 400 << 20
    asyncio.run(work._require_room())


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


def test_what_another_image_is_based_on_is_not_replaced(tmp_path: Path) -> None:
    """A domain off whose image others are based on: they had another base from then on."""
    image = tmp_path / "web.raw"
    image.write_bytes(OLD)
    work = restoring(tmp_path, of(image), in_place=True)
    asyncio.run(work._require_same())
    overlay(tmp_path / "clone.qcow2", str(image))
    with pytest.raises(RefusedError, match="'web' cannot be replaced") as refused:
        asyncio.run(work._require_same())
    assert "image clone.qcow2" in refused.value.why
