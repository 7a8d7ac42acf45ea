"""What stands aside of shared disks: who has the term alone writes it there, and no one else."""

import asyncio
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.faulty_host import FaultyHost, silence
from vmckpt.errors import (
    BusyError,
    HostDownError,
    NotFoundError,
    OperationFailedError,
    RefusedError,
)
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes.process import ProcessId, find_by_argument
from vmckpt.lease.file_store import FileStore
from vmckpt.lease.record import LeaseRecord, LeaseSpan
from vmckpt.lease.store import NONE_YET
from vmckpt.options.replication import SHARED, ReplicationOptions
from vmckpt.preflight.finding import Finding
from vmckpt.preflight.replication.disks import disk_checks
from vmckpt.qemu.block import DiskImage
from vmckpt.replicate.disks.copies import CopiedDisk
from vmckpt.replicate.disks.overlays import commit_overlays
from vmckpt.replicate.operator.committing import commit_overlays_on
from vmckpt.replicate.operator.stop import stop
from vmckpt.replicate.request import REQUEST, ReplicationRequest, ServiceFiles
from vmckpt.vm.inventory import Vm
from vmckpt.vm.lifecycle import read_again
from vmckpt.vm.paths import VmDir, vm_dir
from vmckpt.vm.record import Platform, Qemu
from vmckpt.vm.spec.spec import parse_spec

SPEC = 'name = "web"\nmemory = "32M"\n' + "".join(
    f'[[disks]]\nimage = "{name}.raw"\nformat = "raw"\n' for name in ("web", "more")
)
PLATFORM = Platform("q35", "tcg", "qemu64")
OURS = "a/1"


@pytest.fixture
def hosts(tmp_path: Path) -> tuple[LocalHost, LocalHost]:
    """On the first one something of a stopped VM stands aside; the second was its standby."""
    (tmp_path / "bin").mkdir()
    image = tmp_path / "bin/qemu-img"
    image.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/said\n! [ -e {tmp_path}/broken ]\n')
    image.chmod(0o755)
    qemu = str(tmp_path / "bin/qemu")
    a, b = (LocalHost(name, tmp_path / name, "127.0.0.1", qemu) for name in ("a", "b"))
    directory = vm_dir(a.state_dir, "web")
    directory.overlays.mkdir(parents=True)
    directory.spec.write_text(SPEC)
    went = Qemu(directory.qemu("old"), ProcessId(1 << 22, 1), PLATFORM)
    directory.current.write_text(went.to_json())
    request = ReplicationRequest(
        run="1", vm="web", spec=SPEC, platform=PLATFORM, primary=a, standby=b,
        options=ReplicationOptions(str(tmp_path / "leases"), disks=SHARED), one_machine=True,
        qemu_id="old", disks=(CopiedDisk(0, 4096), CopiedDisk(1, 4096)),
    )  # fmt: skip
    directory.overlays_request.write_text(REQUEST.encode(request))
    (directory.overlays / "disk0.qcow2").touch()
    for host in (a, b):
        (host.state_dir / "images").mkdir(parents=True)
        for name in ("web", "more"):
            (host.state_dir / f"images/{name}.raw").touch()
    return a, b


def recorded(
    tmp_path: Path, holder: str = OURS, in_sync: str | None = None, *, released: bool = False
) -> None:
    (tmp_path / "leases").mkdir(exist_ok=True)
    put = LeaseRecord(1, holder, 1, LeaseSpan(0.1), in_sync, released)
    asyncio.run(FileStore(tmp_path / "leases").replace("web", put, over=NONE_YET))


def home(tmp_path: Path) -> VmDir:
    return vm_dir(tmp_path / "a", "web")


def said(tmp_path: Path) -> list[str]:
    path = tmp_path / "said"
    return path.read_text().splitlines() if path.exists() else []


def test_what_an_earlier_home_left_is_not_folded_over_what_is_newer(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path
) -> None:
    """The removal of that home was cut off; the VM has come back since, and has powered off."""
    recorded(tmp_path, "a/2")
    since = Qemu(home(tmp_path).qemu("newer"), ProcessId(1 << 22, 1), PLATFORM)
    home(tmp_path).current.write_text(since.to_json())
    asyncio.run(commit_overlays(home(tmp_path).overlays))
    assert said(tmp_path) == []
    assert not home(tmp_path).overlays.exists()
    assert hosts[0].state_dir.exists()


def test_who_has_the_term_alone_folds_and_then_nothing_stands_aside(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path
) -> None:
    recorded(tmp_path)
    (tmp_path / "broken").touch()
    with pytest.raises(OperationFailedError, match="could not be committed"):
        asyncio.run(commit_overlays(home(tmp_path).overlays))
    assert home(tmp_path).overlays.exists()
    (tmp_path / "broken").unlink()
    asyncio.run(commit_overlays(home(tmp_path).overlays))
    # Of the second disk there was nothing yet.
    layer = home(tmp_path).overlays / "disk0.qcow2"
    assert said(tmp_path) == [f"commit -q -f qcow2 {layer}"] * 2
    assert not home(tmp_path).overlays.exists()
    assert hosts[0].state_dir.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_what_a_vm_wrote_is_folded_as_its_user_whatever_users_there_are_by_now(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path
) -> None:
    """It says itself which file it is written to: as root that would be any of the host's."""
    recorded(tmp_path)
    layer = home(tmp_path).overlays / "disk0.qcow2"
    os.chown(layer, 2_000_000_007, 2_000_000_007)
    program = Path(hosts[0].qemu).with_name("qemu-img")
    program.write_text(f"#!/bin/sh\nid -u >>{tmp_path}/said\n")
    (tmp_path / "said").touch()
    (tmp_path / "said").chmod(0o666)
    for path in (tmp_path, *tmp_path.parents):
        if path.stat().st_uid == os.geteuid() and not path.stat().st_mode & stat.S_IXOTH:
            path.chmod(path.stat().st_mode | stat.S_IXOTH)
    assert hosts[0].vm_uids is None
    asyncio.run(commit_overlays(home(tmp_path).overlays))
    assert said(tmp_path) == ["2000000007"]


@pytest.mark.parametrize(
    ("holder", "in_sync"),
    [("b/1", None), (OURS, "b/2"), (OURS, "c/1"), ("b/1", "a/2"), ("aa/1", None)],
)
def test_who_may_be_replaced_or_was_writes_nothing_to_a_shared_disk(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path, holder: str, in_sync: str | None
) -> None:
    """An old primary that comes back would write what no one has seen over what everybody has."""
    recorded(tmp_path, holder, in_sync)
    with pytest.raises(RefusedError, match="must not be written to its disks"):
        asyncio.run(commit_overlays(home(tmp_path).overlays))
    assert said(tmp_path) == []
    assert home(tmp_path).overlays.exists()
    assert hosts[1].name == "b"


@pytest.mark.parametrize("is_broken", [True, False])
def test_an_arbiter_that_is_gone_or_forgot_holds_nothing_up_that_it_was_told_before(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path, *, is_broken: bool
) -> None:
    """The VM ran unprotected, and could not be protected, stopped or moved any longer."""
    if is_broken:
        (tmp_path / "leases").write_text("no directory")
    home(tmp_path).claim.touch()
    with pytest.raises(OperationFailedError, match="not yet on its shared disks"):
        asyncio.run(commit_overlays_on("web", hosts))
    home(tmp_path).claim.unlink()
    assert asyncio.run(commit_overlays_on("web", hosts))
    assert not home(tmp_path).overlays.exists()


def term(tmp_path: Path) -> LeaseRecord:
    found = asyncio.run(FileStore(tmp_path / "leases").read("web"))
    assert found is not None
    return found.record


@pytest.mark.parametrize(
    ("holder", "in_sync", "released"),
    [
        # Its QEMU died, and the standby's service before it took over; the arbiter heard or not.
        (OURS, "b/1", True),
        (OURS, "b/1", False),
        # The standby could not go on with what it had, and said so.
        ("b/1", None, True),
        # It died with the term, and its host has given that up.
        ("b/1/abandon", None, True),
    ],
)
def test_what_its_standby_will_never_take_or_has_given_up_is_taken_back(
    hosts: tuple[LocalHost, LocalHost],
    tmp_path: Path,
    holder: str,
    in_sync: str | None,
    released: bool,
) -> None:
    recorded(tmp_path, holder, in_sync, released=released)
    (tmp_path / "broken").touch()
    with pytest.raises(OperationFailedError, match="could not be committed"):
        asyncio.run(commit_overlays_on("web", hosts))
    now = term(tmp_path)
    assert (now.term, now.holder, now.in_sync) == (2, "a/1/fold", None)
    (tmp_path / "broken").unlink()
    assert asyncio.run(commit_overlays_on("web", hosts))
    assert term(tmp_path) == now
    assert not home(tmp_path).overlays.exists()


def test_another_runs_standby_that_gave_its_term_up_had_the_guest_before(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path
) -> None:
    recorded(tmp_path, "b/12", released=True)
    with pytest.raises(RefusedError, match="must not be written to its disks"):
        asyncio.run(commit_overlays(home(tmp_path).overlays))
    assert said(tmp_path) == []
    assert hosts[0].name == "a"


def test_a_layer_that_its_disk_is_ahead_of_is_not_folded(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path
) -> None:
    recorded(tmp_path)
    aside = home(tmp_path).overlays
    (aside / "disk0.qcow2").rename(aside / "disk0.folded")
    (aside / "disk1.qcow2").touch()
    assert asyncio.run(commit_overlays_on("web", hosts))
    assert said(tmp_path) == [f"commit -q -f qcow2 {aside / 'disk1.qcow2'}"]
    assert not aside.exists()


@contextmanager
def a_standby(host: LocalHost) -> Iterator[None]:
    """A process that looks like its service."""
    words = ["replica", "standby", str(ServiceFiles.of(host, "web").path), ""]
    wait = "import sys; sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", wait, *words], stdin=subprocess.PIPE) as process:
        while not find_by_argument("\0".join(words)):
            pass
        yield
        assert process.stdin is not None
        process.stdin.close()


def test_nothing_is_folded_while_the_standby_may_write(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path
) -> None:
    recorded(tmp_path)
    a, b = hosts
    silent = FaultyHost("b", b.state_dir, "127.0.0.1", faults=silence("find_processes"))
    with a_standby(b), pytest.raises(RefusedError, match="may still write"):
        asyncio.run(commit_overlays_on("web", hosts))
    with pytest.raises(HostDownError) as down:
        asyncio.run(commit_overlays_on("web", [a, silent]))
    assert "--standby-is-dead" in down.value.remedy
    with pytest.raises(NotFoundError):
        asyncio.run(commit_overlays_on("web", [a]))
    assert said(tmp_path) == []
    assert asyncio.run(commit_overlays_on("web", [a, silent], standby_is_dead=True))
    assert not asyncio.run(commit_overlays_on("web", hosts))


def test_what_a_dead_service_wrote_is_on_the_storage_before_anything_is_folded(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path
) -> None:
    """A killed process's pages may be written long after its end."""
    recorded(tmp_path)
    a, b = hosts
    more = b.state_dir / "images/more.raw"
    more.rename(tmp_path / "gone")
    with pytest.raises(RefusedError, match="may still write") as refused:
        asyncio.run(commit_overlays_on("web", hosts))
    assert str(more) in refused.value.why
    assert "--standby-is-dead" in refused.value.remedy
    hangs = FaultyHost("b", b.state_dir, "127.0.0.1", faults=silence("run"))
    with pytest.raises(HostDownError, match="may still write"):
        asyncio.run(commit_overlays_on("web", [a, hangs]))
    assert said(tmp_path) == []
    (tmp_path / "gone").rename(more)
    assert asyncio.run(commit_overlays_on("web", hosts))


def test_a_stop_needs_no_word_of_a_standby_that_is_said_to_be_dead(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path
) -> None:
    """Of what the services left a start may have removed the primary's already."""
    recorded(tmp_path)
    a, b = hosts
    off = FaultyHost("b", b.state_dir, "127.0.0.1", faults=silence())
    with pytest.raises(HostDownError) as down:
        asyncio.run(stop("web", [a, off]))
    assert "--standby-is-dead" in down.value.remedy
    assert said(tmp_path) == []
    stopped = asyncio.run(stop("web", [a, off], standby_is_dead=True))
    assert stopped is None
    with pytest.raises(HostDownError, match="b is down"):
        asyncio.run(stop("web", [a, off], standby_is_dead=True))


def test_a_stop_folds_what_an_earlier_one_could_not(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path
) -> None:
    home(tmp_path).claim.touch()
    with pytest.raises(OperationFailedError) as failed:
        asyncio.run(stop("web", hosts))
    assert "the arbiter says: there is no record" in failed.value.why
    recorded(tmp_path)
    assert asyncio.run(stop("web", hosts)) is None
    with pytest.raises(NotFoundError):
        asyncio.run(stop("web", hosts))


def test_a_vm_is_left_alone_while_something_stands_aside(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path
) -> None:
    directory = home(tmp_path)
    spec = parse_spec(SPEC, "test", directory.path)
    qemu = Qemu(directory.qemu("old"), ProcessId(1 << 22, 1), PLATFORM)
    vm = Vm(spec, hosts[0], directory, qemu)
    with pytest.raises(BusyError) as busy:
        asyncio.run(read_again(vm))
    assert busy.value.remedy.endswith("vmckpt replicate stop web")
    recorded(tmp_path)
    asyncio.run(commit_overlays(directory.overlays))
    assert asyncio.run(read_again(vm)).name == "web"
    # A directory whose word was removed, or never written, is what a killed command left.
    directory.overlays.mkdir()
    assert asyncio.run(read_again(vm)).name == "web"
    with pytest.raises(NotFoundError):
        asyncio.run(stop("web", hosts))


@pytest.mark.parametrize("text", ["", "{}", '{"format": 1}', "[]"])
def test_for_whom_it_stands_aside_is_not_guessed(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path, text: str
) -> None:
    recorded(tmp_path)
    home(tmp_path).overlays_request.write_text(text)
    for ask in (stop("web", hosts), commit_overlays(home(tmp_path).overlays)):
        with pytest.raises(OperationFailedError, match="unknown to which replication"):
            asyncio.run(ask)
    assert home(tmp_path).overlays.exists()


def checked(tmp_path: Path, disk: str) -> list[Finding]:
    hosts = [LocalHost(name, tmp_path / name, "192.0.2.1") for name in ("a", "b")]
    for host in hosts:
        (host.state_dir / "images").mkdir(parents=True, exist_ok=True)
    spec = parse_spec(f'name = "web"\nmemory = "64M"\n[[disks]]\n{disk}\n', "spec", tmp_path)
    directory = vm_dir(hosts[0].state_dir, "web")
    vm = Vm(spec, hosts[0], directory, Qemu(directory.qemu("0"), ProcessId(1, 1), PLATFORM))
    images = {"disk0": DiskImage("disk0", 1 << 20, 4096, ())}

    async def run() -> list[Finding]:
        return [found async for found in disk_checks(vm, hosts[1], images, SHARED)]

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("disk", "verdict", "code", "words"),
    [
        ('path = "web.raw"\nformat = "raw"', "ok", "disk-shared", "is there on both"),
        ('path = "web.qcow2"', "refuse", "disk-format", "qcow2"),
        ('image = "web.raw"\nformat = "raw"', "refuse", "disk-shared", "is not shared with b"),
        ('path = "/proc/web.raw"\nformat = "raw"', "refuse", "disk-shared", "it is unknown"),
        ('path = "gone.raw"\nformat = "raw"', "refuse", "disk-shared", "may not write"),
    ],
)
def test_that_a_disk_is_shared_is_found_out_not_believed(
    tmp_path: Path, disk: str, verdict: str, code: str, words: str
) -> None:
    for name in ("web.raw", "web.qcow2"):
        (tmp_path / name).touch()
    (found,) = checked(tmp_path, disk)
    assert (found.verdict, found.code) == (verdict, code)
    assert words in found.reason
    assert bool(found.remedy) == (verdict != "ok")


def test_links_to_two_files_in_one_folder_are_no_shared_disk(tmp_path: Path) -> None:
    (tmp_path / "both").mkdir()
    for name in ("a", "b"):
        (tmp_path / "both" / f"{name}.raw").touch()
        images = tmp_path / name / "images"
        images.mkdir(parents=True)
        (images / "web.raw").symlink_to(tmp_path / "both" / f"{name}.raw")
    (found,) = checked(tmp_path, 'image = "web.raw"\nformat = "raw"')
    assert (found.verdict, found.code) == ("refuse", "disk-shared")
    assert "another file" in found.reason
