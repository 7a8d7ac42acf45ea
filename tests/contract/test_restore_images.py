"""What stands where a restore or a fork makes its own, and is not its own, stays."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from tests.contract.test_checkpoint_disks import SIZE
from tests.contract.test_images import overlay
from tests.contract.test_restore_disks import COPY, IN_PLACE, at_home, host, spec
from tests.qcow2 import with_snapshots
from vmckpt.checkpoint.catalogue.location import reading
from vmckpt.checkpoint.facts import CheckpointFacts, usable_facts
from vmckpt.checkpoint.fork import fork as forks
from vmckpt.checkpoint.fork import room as fork_room
from vmckpt.checkpoint.fork.fork import Forked, ForkOptions
from vmckpt.checkpoint.origin import digest
from vmckpt.checkpoint.restore import restore as restores
from vmckpt.checkpoint.restore import restore_disks as disks_alone
from vmckpt.checkpoint.restore.planned import images_of
from vmckpt.checkpoint.restore.requests import CheckpointSource, RestoreOptions
from vmckpt.errors import BusyError, OperationFailedError, RefusedError, StorageError
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.lock import read_owner
from vmckpt.hosts.processes import promises
from vmckpt.hosts.processes.process import ProcessId
from vmckpt.preflight.checkpoint import NewImage, Wanted, _disks, require_replaceable
from vmckpt.preflight.finding import OK, REFUSE, Finding, ask
from vmckpt.qemu.monitor import Monitor
from vmckpt.qemu.replies import QemuVersion
from vmckpt.store.area import Area, Chunks
from vmckpt.store.files.manifest import Manifest
from vmckpt.store.open import open_store
from vmckpt.store.store import Checkpoint
from vmckpt.vm.disks.backing import snapshots_of
from vmckpt.vm.lifecycle import owner
from vmckpt.vm.paths import lock_path, vm_dir
from vmckpt.vm.record import Platform
from vmckpt.vm.spec.spec import parse_spec

__all__ = ["host"]

ITSELF = RestoreOptions(None, in_place=False, eager=True, plugged=False, keep_macs=False)
AS_COPY = replace(COPY, eager=True)


def source(host: LocalHost) -> CheckpointSource:
    location = str(host.state_dir / "checkpoints")
    with open_store(location) as store:
        one = store.find("one")
    return CheckpointSource(location, one.id, known=digest(one), is_foreign=False)


def two_forks(asked: CheckpointSource) -> ForkOptions:
    wish = ForkOptions(asked.checkpoint, "web-fork", 2, plugged=False, overcommit=True)
    return replace(wish, known=asked.known, is_foreign=False)


def restored(host: LocalHost, wish: RestoreOptions) -> None:
    asyncio.run(restores.restore(host, source(host), wish, lambda _: None))


def image_of_another(path: Path) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"another VM's")
    return path


def all_fits(
    monkeypatch: pytest.MonkeyPatch, module: object, meanwhile: Callable[[], object]
) -> None:
    """Nothing is against it, and then something happens before anything is made."""

    async def checks(*_: object, **__: object) -> list[Finding]:
        meanwhile()
        return [Finding("disk-target", OK, "-")]

    monkeypatch.setattr(module, "checks", checks)
    if module is forks:
        has_qemu(monkeypatch, "10.0.2")


def has_qemu(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    async def abilities(_: object) -> object:
        return SimpleNamespace(version=QemuVersion(*map(int, version.split("."))))

    monkeypatch.setattr(forks, "abilities", abilities)


def no_qemu(monkeypatch: pytest.MonkeyPatch, module: object) -> None:
    async def start(*_: object, **__: object) -> None:
        raise OperationFailedError("QEMU did not start", why="-", remedy="-")

    monkeypatch.setattr(module, "start_qemu", start)
    monkeypatch.setattr(Checkpoint, "blob", lambda *_: b"")


def test_a_restore_that_is_refused_removes_no_image(host: LocalHost) -> None:
    """It was to be made new, and is there: its undo removed it."""
    image = image_of_another(host.state_dir / "images" / "copy-0.raw")
    with pytest.raises(RefusedError):
        restored(host, AS_COPY)
    assert image.read_bytes() == b"another VM's"
    assert not vm_dir(host.state_dir, "copy").path.exists()


def test_a_vm_whose_images_stayed_keeps_them_when_its_restore_is_refused(host: LocalHost) -> None:
    """`vm rm` keeps the images, and a restore of the VM itself is to make them."""
    asyncio.run(host.remove(vm_dir(host.state_dir, "web").path))
    with pytest.raises(RefusedError):
        restored(host, ITSELF)
    assert (host.state_dir / "web.raw").read_bytes() == b"newer"


def test_an_image_that_another_vm_has_made_since_the_checks_stays(
    host: LocalHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = host.state_dir / "images" / "copy-0.raw"
    no_qemu(monkeypatch, restores)
    all_fits(monkeypatch, restores, lambda: image_of_another(path))
    with pytest.raises(FileExistsError):
        restored(host, AS_COPY)
    assert path.read_bytes() == b"another VM's"


def test_in_place_a_link_to_a_disk_stays(host: LocalHost, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new image took the link's place, wherever that is."""
    link, image = host.state_dir / "web.raw", host.state_dir / "large" / "1.raw"
    image.parent.mkdir()
    link.rename(image)
    link.symlink_to("large/1.raw")
    renames = list[list[str]]()

    async def start(*_: object, **__: object) -> None:
        record = vm_dir(host.state_dir, "web").restoring
        renames.extend(json.loads(record.read_text())["renames"])
        raise OperationFailedError("QEMU did not start", why="-", remedy="-")

    all_fits(monkeypatch, restores, lambda: None)
    monkeypatch.setattr(restores, "start_qemu", start)
    monkeypatch.setattr(Checkpoint, "blob", lambda *_: b"")
    with pytest.raises(OperationFailedError, match="did not start"):
        restored(host, replace(IN_PLACE, eager=True))
    [(made, replaced)] = renames
    assert replaced == str(image)
    assert Path(made).parent == image.parent
    assert link.is_symlink()
    assert [path.name for path in image.parent.iterdir()] == ["1.raw"]


def test_so_it_does_when_the_disks_alone_are_restored(
    host: LocalHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = host.state_dir / "images" / "copy-0.raw"

    async def platform(*_: object) -> Platform:
        return Platform("pc-q35-9.9", "tcg", "qemu64")

    monkeypatch.setattr(disks_alone, "_platform", platform)
    all_fits(monkeypatch, disks_alone, lambda: image_of_another(path))
    with pytest.raises(FileExistsError):
        asyncio.run(disks_alone.restore_disks(host, source(host), COPY))
    assert path.read_bytes() == b"another VM's"
    assert not vm_dir(host.state_dir, "copy").path.exists()


def test_what_a_restore_has_made_goes_with_it(
    host: LocalHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_fits(monkeypatch, restores, lambda: None)
    no_qemu(monkeypatch, restores)
    with pytest.raises(OperationFailedError):
        restored(host, AS_COPY)
    assert list((host.state_dir / "images").iterdir()) == []


def test_a_fork_removes_no_image_that_it_has_not_made(
    host: LocalHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checks before are for one fork alone: each looks for itself."""
    all_fits(monkeypatch, forks, lambda: None)
    no_qemu(monkeypatch, forks)
    image = image_of_another(host.state_dir / "images" / "web-fork-1-0.qcow2")
    asked = source(host)
    wish = ForkOptions(asked.checkpoint, "web-fork", 3, plugged=False, overcommit=True)
    wish = replace(wish, known=asked.known, is_foreign=False)
    first, second, third = asyncio.run(forks.fork(host, asked.location, wish, run="r"))
    assert "exists already" in first.error
    assert "did not start" in second.error
    assert "did not start" in third.error  # its memory is there, though the second one's is gone
    assert image.read_bytes() == b"another VM's"
    assert not list((host.state_dir / "images").glob("web-fork-2*"))


BALLOON = '\n[[devices]]\ndriver = "virtio-balloon-pci"\n'


@pytest.mark.parametrize(
    ("version", "is_read_only"), [("7.2.0", False), ("8.1.9", False), ("8.2.0", True)]
)
@pytest.mark.parametrize("devices", ["", BALLOON])
def test_no_fork_can_take_memory_from_the_others(
    host: LocalHost, monkeypatch: pytest.MonkeyPatch, version: str, devices: str, *,
    is_read_only: bool,
) -> None:  # fmt: skip
    """A page that one gave back, by its balloon, was zeroes in all that had not written to it."""
    all_fits(monkeypatch, forks, lambda: None)
    has_qemu(monkeypatch, version)
    monkeypatch.setattr(Checkpoint, "blob", lambda *_: b"")
    began = list[object]()

    async def start(*_: object, **how: object) -> None:
        began.append((how["private_ram"], how["ram_is_read_only"]))
        raise OperationFailedError("QEMU did not start", why="-", remedy="-")

    def with_devices(manifest: Manifest) -> CheckpointFacts:
        found = usable_facts(manifest)
        return replace(found, spec=found.spec + devices)

    monkeypatch.setattr(forks, "start_qemu", start)
    monkeypatch.setattr(forks, "own_facts", with_devices)
    asked = source(host)
    wish = ForkOptions(asked.checkpoint, "f", 1, plugged=False, overcommit=True)
    wish = replace(wish, known=asked.known, is_foreign=False)
    if devices and not is_read_only:
        with pytest.raises(RefusedError, match="cannot be forked") as refused:
            asyncio.run(forks.fork(host, asked.location, wish, run="r"))
        assert "the VM has a balloon" in refused.value.why
        assert began == []
    else:
        asyncio.run(forks.fork(host, asked.location, wish, run="r"))
        assert began == [(True, is_read_only)]


def test_a_cancelled_fork_leaves_no_part_of_an_image(
    host: LocalHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that writes it went on, and what it had written stayed."""
    all_fits(monkeypatch, forks, lambda: None)
    asked = source(host)
    wish = ForkOptions(asked.checkpoint, "f", 1, plugged=False, overcommit=True)
    wish = replace(wish, known=asked.known, is_foreign=False)
    stream, loops, begun = Area.stream, list[asyncio.AbstractEventLoop](), asyncio.Event()

    def slow(area: Area) -> Iterator[Chunks]:
        for one in stream(area):
            loops[0].call_soon_threadsafe(begun.set)
            time.sleep(0.2)
            yield one

    async def cancelled() -> None:
        loops.append(asyncio.get_running_loop())
        work = asyncio.ensure_future(forks.fork(host, asked.location, wish, run="r"))
        await begun.wait()
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    monkeypatch.setattr(Area, "stream", slow)
    asyncio.run(cancelled())
    assert list((host.state_dir / "images").iterdir()) == []


@pytest.mark.parametrize("ends", ["made", "cancelled"])
def test_memory_of_forks_is_promised_while_what_they_share_is_loaded(
    host: LocalHost, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    """A VM that was started meanwhile was promised the same memory, and its guest died of that."""
    all_fits(monkeypatch, forks, lambda: None)
    no_qemu(monkeypatch, forks)
    monkeypatch.setattr(fork_room, "no_room", lambda *_: pytest.fail("there is room"))
    asked = source(host)
    wish = ForkOptions(asked.checkpoint, "web-fork", 2, plugged=False)
    wish = replace(wish, known=asked.known, is_foreign=False)
    with open_store(asked.location) as store:
        one = store.find("one")
    ram, memory_bytes = one.area("ram"), one.facts["memory_bytes"]
    assert ram is not None
    stream, seen = Area.stream, list[int]()
    kept = promises.RECORDS_DIR / "vmckpt-fork-r"

    def watched(area: Area) -> Iterator[Chunks]:
        given = [one.promise for path, one in promises._counting(promises.RECORDS_DIR)]
        seen.extend(one.size_bytes for one in given if one.record.parent == kept)
        if ends == "cancelled":
            raise asyncio.CancelledError
        yield from stream(area)

    monkeypatch.setattr(Area, "stream", watched)
    work = forks.fork(host, asked.location, wish, run="r")
    if ends == "cancelled":
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(work)
    else:
        assert len(asyncio.run(work)) == 2
    assert seen[0] == ram.chunks * ram.chunk_bytes + 2 * memory_bytes
    assert not kept.exists()


def test_names_of_forks_are_theirs_while_what_they_share_is_loaded(
    host: LocalHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That takes minutes: meanwhile another operator had a VM of such a name on another host."""
    all_fits(monkeypatch, forks, lambda: None)
    no_qemu(monkeypatch, forks)
    asked = source(host)
    wish = two_forks(asked)
    stream, seen = Area.stream, list[str]()

    def watched(area: Area) -> Iterator[Chunks]:
        owners = [read_owner(lock_path(host.state_dir, name)) for name in wish.names]
        seen.extend(owner.action for owner in owners if owner)
        yield from stream(area)

    monkeypatch.setattr(Area, "stream", watched)
    assert len(asyncio.run(forks.fork(host, asked.location, wish, run="r"))) == 2
    assert seen[:2] == ["fork", "fork"]
    assert read_owner(lock_path(host.state_dir, wish.names[0])) is None


def test_a_name_in_use_fails_its_fork_alone(
    host: LocalHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    all_fits(monkeypatch, forks, lambda: None)
    no_qemu(monkeypatch, forks)
    asked = source(host)
    wish = two_forks(asked)

    async def forked() -> list[Forked]:
        lock = lock_path(host.state_dir, "web-fork-1")
        async with host.lock(lock, owner("vm run")):
            return await forks.fork(host, asked.location, wish, run="r")

    first, second = asyncio.run(forked())
    assert "vm run" in first.error
    assert "QEMU did not start" in second.error


def test_forks_load_nothing_if_every_name_is_in_use(
    host: LocalHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of the memory was loaded, which takes minutes, and room reserved for it."""
    all_fits(monkeypatch, forks, lambda: None)
    monkeypatch.setattr(Area, "stream", lambda *_: pytest.fail("it is loaded"))
    asked = source(host)
    wish = two_forks(asked)

    async def forked() -> list[Forked]:
        first, second = (lock_path(host.state_dir, name) for name in wish.names)
        async with host.lock(first, owner("vm run")), host.lock(second, owner("vm run")):
            return await forks.fork(host, asked.location, wish, run="r")

    assert all("vm run" in one.error for one in asyncio.run(forked()))


def test_a_fork_that_runs_stays_where_a_full_disk_keeps_its_record_from_being_finished(
    host: LocalHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ran, and was ended: the same of a restore is a warning."""

    async def full(*_: object) -> None:
        raise StorageError("cannot write spec.toml", why="no space left", remedy="make room")

    async def no_undo(*_: object) -> None:
        pytest.fail("it runs")

    monkeypatch.setattr(forks, "settle", full)
    asked = source(host)
    wish = ForkOptions(asked.checkpoint, "f", 1, plugged=False)

    async def settled() -> Forked:
        async with reading(asked.location, asked.checkpoint) as point:
            planned = await restores.plan_of(point, asked, AS_COPY, host)
            work = forks._Forking(host, point, wish, asked.location, "r")
            monkeypatch.setattr(work, "_undo", no_undo)
            ready = forks._Ready(planned, [], cast("Monitor", object()), "", 0.0)
            return await work._settled(ready)

    made = asyncio.run(settled())
    assert made.error == ""
    assert "no space left" in made.warnings[0]


def test_the_guest_of_an_interrupted_migration_stays(
    host: LocalHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its source is silent, and the VM is at home nowhere that answers: its QEMU was killed."""
    all_fits(monkeypatch, restores, lambda: None)
    all_fits(monkeypatch, forks, lambda: None)
    asked = source(host)
    for name in ("copy", "f-1"):
        directory = vm_dir(host.state_dir, name)
        directory.qemu("1234").path.mkdir(parents=True)
        directory.journal.write_text("{}")
    with pytest.raises(BusyError, match="interrupted"):
        restored(host, AS_COPY)
    with pytest.raises(BusyError, match="interrupted"):
        asyncio.run(disks_alone.restore_disks(host, asked, COPY))
    wish = ForkOptions(asked.checkpoint, "f", 1, plugged=False, overcommit=True)
    wish = replace(wish, known=asked.known, is_foreign=False)
    monkeypatch.setattr(Checkpoint, "blob", lambda *_: b"")
    (made,) = asyncio.run(forks.fork(host, asked.location, wish, run="r"))
    assert "interrupted" in made.error
    for name in ("copy", "f-1"):
        directory = vm_dir(host.state_dir, name)
        assert directory.qemu("1234").path.exists()
        assert directory.journal.exists()


def test_a_disk_that_another_vm_has_by_now_is_not_replaced_in_place(host: LocalHost) -> None:
    """It was web's when the checkpoint was taken."""

    async def refusals() -> list[str]:
        asked = source(host)
        async with reading(asked.location, asked.checkpoint) as point:
            planned = await restores.plan_of(point, asked, IN_PLACE, host)
            wanted = Wanted(planned.vm, images_of(planned, in_place=True), None, None)
            return [one.reason for one in await ask(_disks(wanted)) if one.verdict == REFUSE]

    assert asyncio.run(refusals()) == []
    at_home(host, spec(host.state_dir, "other.raw"), ProcessId(0, 0))
    assert asyncio.run(refusals()) == []  # nothing has it
    directory = vm_dir(host.state_dir, "db")
    directory.path.mkdir()
    directory.spec.write_text(spec(host.state_dir).replace('"web"', '"db"'))
    (told,) = asyncio.run(refusals())
    assert "web.raw, which 'web' no longer has, is in use" in told


@pytest.mark.parametrize("user", ["a disk", "an overlay", "its own"])
def test_what_another_image_is_based_on_is_not_replaced_in_place(
    host: LocalHost, user: str
) -> None:
    """A VM off whose image others are based on: they had another base from their next start on."""
    image = host.state_dir / "web.raw"
    directory = vm_dir(host.state_dir, "clone")
    directory.path.mkdir()
    if user == "a disk":
        directory.spec.write_text(spec(host.state_dir).replace('"web"', '"clone"'))
    elif user == "an overlay":
        overlay(host.state_dir / "elsewhere" / "clone.qcow2", str(image))
        text = spec(host.state_dir / "elsewhere", "clone.qcow2").replace('"web"', '"clone"')
        directory.spec.write_text(text)

    async def refusals() -> list[str]:
        asked = source(host)
        async with reading(asked.location, asked.checkpoint) as point:
            planned = await restores.plan_of(point, asked, IN_PLACE, host)
            wanted = Wanted(planned.vm, images_of(planned, in_place=True), None, None)
            return [one.reason for one in await ask(_disks(wanted)) if one.verdict == REFUSE]

    if user == "its own":
        assert asyncio.run(refusals()) == []
        return
    (told,) = asyncio.run(refusals())
    assert "VM clone" in told
    with pytest.raises(RefusedError, match="cannot be replaced") as refused:
        asyncio.run(disks_alone.restore_disks(host, source(host), IN_PLACE))
    assert "VM clone" in refused.value.why
    assert image.read_bytes() == b"newer"


@pytest.mark.parametrize("path", ["/dev/vg0/web", "volume"])
def test_no_disk_is_restored_into_a_file_among_devices(
    host: LocalHost, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """On a host without its volume a VM ran from a file in the host's memory, and in place such a
    file took the volume's name: after a boot all of it was gone.
    """
    there = host.state_dir / "volume"
    there.touch()

    async def is_block_device(_: object, path: Path) -> bool:
        return path == there

    monkeypatch.setattr(LocalHost, "is_block_device", is_block_device)

    async def refusals(*, is_new: bool) -> list[str]:
        asked = source(host)
        async with reading(asked.location, asked.checkpoint) as point:
            planned = await restores.plan_of(point, asked, IN_PLACE, host)
            image = NewImage(host.state_dir / path, SIZE, is_new, not is_new)
            wanted = Wanted(planned.vm, (image,), None, None)
            return [one.code for one in await ask(_disks(wanted)) if one.verdict == REFUSE]

    for is_new in (False, True):
        assert asyncio.run(refusals(is_new=is_new)) == ["disk-device"]


def test_nor_are_the_disks_alone(host: LocalHost, monkeypatch: pytest.MonkeyPatch) -> None:
    async def is_block_device(_: object, path: Path) -> bool:
        return path == host.state_dir / "web.raw"

    monkeypatch.setattr(LocalHost, "is_block_device", is_block_device)
    with pytest.raises(RefusedError, match="cannot be replaced") as refused:
        asyncio.run(disks_alone.restore_disks(host, source(host), IN_PLACE))
    assert "is a device" in refused.value.why
    assert (host.state_dir / "web.raw").read_bytes() == b"newer"


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    ("snapshots", "lost"),
    [
        ([], ""),
        ([("later", 200)], ""),
        ([("golden", 50), ("later", 200), ("first", 1)], "golden, first"),
        ([("golden", 100.4), ("later", 100.6)], "golden"),
    ],
)
def test_internal_snapshots_from_before_the_checkpoint_stay(
    host: LocalHost, snapshots: list[tuple[str, float]], lost: str, *, whole: bool
) -> None:
    """The new image had none, and nothing said so: only what came later was said to be lost."""
    image = host.state_dir / "web.qcow2"
    with_snapshots(image, *snapshots)

    async def refused() -> str:
        disks = [(image, "qcow2")]
        if not whole:
            try:
                await require_replaceable(host, "web", disks, "no", 100.5)
            except RefusedError as exc:
                return exc.why
            return ""
        asked = source(host)
        async with reading(asked.location, asked.checkpoint) as point:
            planned = await restores.plan_of(point, asked, IN_PLACE, host)
        text = spec(host.state_dir, "web.qcow2")
        vm = planned.vm._replace(spec=parse_spec(text, "x", host.state_dir))
        wanted = Wanted(vm, (NewImage(image, SIZE, False, True),), None, None, 100.5)
        found = [one.reason for one in await ask(_disks(wanted)) if one.verdict == REFUSE]
        return "; ".join(found)

    told = asyncio.run(refused())
    assert told.endswith(lost)
    assert bool(told) is bool(lost)


def test_a_snapshot_that_cannot_be_read_is_one_all_the_same(host: LocalHost) -> None:
    image = host.state_dir / "web.qcow2"
    with_snapshots(image, ("one", 5), ("two", 6))
    with image.open("r+b") as file:
        file.truncate(540)
    assert [one.name for one in asyncio.run(snapshots_of(host, image))] == ["?"]
    image.write_bytes(b"no image")
    assert asyncio.run(snapshots_of(host, image)) == []
