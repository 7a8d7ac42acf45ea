"""What killed services of a replication leave, with the arbiter and on hosts, and how it goes."""

import asyncio
import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faulty_host import Fault, FaultyHost, silence
from tests.scripted_qmp import Server
from vmckpt.drivers.find import find
from vmckpt.errors import (
    HostDownError,
    NotFoundError,
    OperationFailedError,
    OutcomeUnknownError,
    RefusedError,
    StorageError,
)
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes.process import ProcessId, find_by_argument, identify
from vmckpt.lease.file_store import FileStore
from vmckpt.lease.record import LeaseRecord, LeaseSpan
from vmckpt.lease.rule import Right
from vmckpt.lease.store import NONE_YET, Versioned
from vmckpt.migrate.steps.disk_files import MovedDisk as CopiedFile
from vmckpt.migrate.steps.disk_files import create_files, remove_files
from vmckpt.options.migration import Disks
from vmckpt.options.replication import COPY, SHARED, ReplicationOptions
from vmckpt.preflight.migration.disks import DiskPlan, Owned, plan_disks
from vmckpt.qemu.block import DiskImage
from vmckpt.replicate import recovery
from vmckpt.replicate.control import GO_ALONE, GO_ALONE_UNLESS_TAKEN, answering
from vmckpt.replicate.disks.copies import CopiedDisk, StandbyFile, prepare, read_mark
from vmckpt.replicate.operator import begin, leftover_copies, sides
from vmckpt.replicate.operator import keep as keeping
from vmckpt.replicate.operator import stop as stopping
from vmckpt.replicate.operator.committing import hosts_with_overlays
from vmckpt.replicate.operator.failback import _is_protected_by
from vmckpt.replicate.operator.leftover_copies import CopiesFate, settle_here
from vmckpt.replicate.operator.leftovers import remove_stale_home
from vmckpt.replicate.operator.operate import failover, require_decided, settle
from vmckpt.replicate.operator.sides import side_of
from vmckpt.replicate.operator.stop import stop
from vmckpt.replicate.primary import primary
from vmckpt.replicate.primary.claim import Claim, examine
from vmckpt.replicate.recovery import abandon, recover
from vmckpt.replicate.request import REQUEST, ReplicationRequest, ServiceFiles, read_request
from vmckpt.replicate.status import ReplicaStatus, Role
from vmckpt.vm.disks.superseded import is_superseded
from vmckpt.vm.inventory import Vm, read_vm
from vmckpt.vm.lifecycle import read_again
from vmckpt.vm.paths import IN_MEMORY, vm_dir
from vmckpt.vm.record import Platform, Qemu, Replaced
from vmckpt.vm.spec.spec import parse_spec
from vmckpt.vm.start import sweep

SPEC = 'name = "web"\nmemory = "32M"\n'
DISK = '[[disks]]\nimage = "web.raw"\nformat = "raw"\n'
PLATFORM = Platform("q35", "tcg", "qemu64")
GONE = ProcessId(1 << 22, 1)


@pytest.fixture
def hosts(tmp_path: Path) -> tuple[LocalHost, LocalHost]:
    return tuple(  # type: ignore[return-value]
        LocalHost(name, tmp_path / name, "127.0.0.1") for name in ("a", "b")
    )


def home(host: LocalHost, qemu_id: str, replaces: Replaced | None = None) -> Vm:
    directory = vm_dir(host.state_dir, "web")
    directory.path.mkdir(parents=True)
    spec = parse_spec(SPEC, "test", directory.path)
    qemu = Qemu(directory.qemu(qemu_id), GONE, PLATFORM, replaces=replaces)
    directory.spec.write_text(SPEC)
    directory.current.write_text(qemu.to_json())
    if replaces is not None:  # a standby's, which took it over
        directory.taken_over.write_text("1")
    return Vm(spec, host, directory, qemu)


def requested(
    hosts: tuple[LocalHost, LocalHost],
    tmp_path: Path,
    disks: tuple[CopiedDisk, ...] = (),
    kind: str = COPY,
    lease_s: float = 0.1,
) -> ServiceFiles:
    """Both services were asked, and were killed; the primary's files."""
    primary, standby = hosts
    options = ReplicationOptions(str(tmp_path / "leases"), lease_s=lease_s, disks=kind)
    request = ReplicationRequest(
        run="1", vm="web", spec=SPEC + DISK * len(disks), platform=PLATFORM,
        primary=primary, standby=standby, options=options, one_machine=True, qemu_id="old",
        disks=disks,
    )  # fmt: skip
    for host in hosts:
        files = ServiceFiles.of(host, "web")
        files.path.mkdir(parents=True)
        files.request.write_text(REQUEST.encode(request))
    return ServiceFiles.of(primary, "web")


def record(tmp_path: Path, holder: str, in_sync: str | None, *, released: bool = False) -> None:
    (tmp_path / "leases").mkdir(exist_ok=True)
    put = LeaseRecord(1, holder, 1, LeaseSpan(0.1), in_sync, released)
    asyncio.run(FileStore(tmp_path / "leases").replace("web", put, over=NONE_YET))


def stands(tmp_path: Path) -> LeaseRecord:
    found = asyncio.run(FileStore(tmp_path / "leases").read("web"))
    assert found is not None
    return found.record


def test_a_stop_after_both_were_killed_leaves_no_replica_that_may_take_over(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path
) -> None:
    home(hosts[0], "old")
    files = requested(hosts, tmp_path)
    record(tmp_path, "a/1", "b/1")
    said = asyncio.run(stop("web", hosts))
    assert said is not None
    assert said.state == "ended"
    assert (stands(tmp_path).term, stands(tmp_path).in_sync) == (2, None)
    assert not files.path.exists()
    assert not ServiceFiles.of(hosts[1], "web").path.exists()
    assert asyncio.run(read_vm(hosts[0], "web")) is not None
    with pytest.raises(NotFoundError):
        asyncio.run(stop("web", hosts))


def test_a_start_does_not_push_aside_what_was_killed_and_may_be_taken_over_from(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path
) -> None:
    vm, files = home(hosts[0], "old"), requested(hosts, tmp_path)
    with pytest.raises(OperationFailedError) as refused:
        asyncio.run(begin._require_new(vm, hosts[1]))
    assert refused.value.remedy == "vmckpt replicate stop web"
    assert files.request.exists()
    # A primary that has ended has told the arbiter that the standby may not.
    ended = {"role": "primary", "state": "ended", "run": "1"}
    files.status.write_text(json.dumps(ended | {"run": "0"}))
    with pytest.raises(OperationFailedError):
        asyncio.run(begin._require_new(vm, hosts[1]))
    assert ServiceFiles.of(hosts[1], "web").request.exists()
    requested_again(files, ended)
    asyncio.run(begin._require_new(vm, hosts[1]))
    assert not files.path.exists()
    assert not ServiceFiles.of(hosts[1], "web").path.exists()


def requested_again(files: ServiceFiles, status: dict[str, str]) -> None:
    files.path.mkdir(exist_ok=True)
    files.request.write_text("{}")
    files.status.write_text(json.dumps(status))


def test_a_guest_that_died_with_its_service_is_left_to_the_standby(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path
) -> None:
    home(hosts[0], "old")
    files = requested(hosts, tmp_path)
    record(tmp_path, "a/1", "b/1")
    asyncio.run(recover(files.path))
    assert stands(tmp_path).in_sync == "b/1"
    assert not files.status.exists()


def test_a_home_that_the_standby_took_over_from_is_removed(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path
) -> None:
    home(hosts[0], "old")
    files = requested(hosts, tmp_path)
    home(hosts[1], "new", Replaced("a", "old"))
    record(tmp_path, "b/1", None)
    asyncio.run(recover(files.path, at_any_rate=True))
    assert json.loads(files.status.read_text())["why"].startswith("replaced")
    assert asyncio.run(read_vm(hosts[0], "web")) is None


def test_a_home_is_kept_of_a_guest_that_the_standby_could_not_go_on_with(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path
) -> None:
    """It took the term, and died before it had the guest: first its host gives the term up."""
    home(hosts[0], "old")
    files = requested(hosts, tmp_path)
    record(tmp_path, "b/1", None)

    async def both() -> None:
        recovering = asyncio.ensure_future(recover(files.path, at_any_rate=True))
        await asyncio.sleep(0.3)
        assert not recovering.done()
        await abandon(ServiceFiles.of(hosts[1], "web").path)
        await recovering

    asyncio.run(both())
    assert json.loads(files.status.read_text())["why"].startswith("off")
    assert stands(tmp_path).holder.startswith("a/")
    assert asyncio.run(read_vm(hosts[0], "web")) is not None


class LosesAnAnswer(FileStore):
    """Of one change no one is told whether it was made."""

    def __init__(self, location: Path, number: int, *, made: bool) -> None:
        super().__init__(location)
        self._left, self._made = number, made

    async def replace(self, vm: str, record: LeaseRecord, *, over: int) -> Versioned:
        self._left -= 1
        if self._left:
            return await super().replace(vm, record, over=over)
        if self._made:
            await super().replace(vm, record, over=over)
        raise OutcomeUnknownError("no answer", why="it was lost", remedy="-")


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("made", [True, False])
def test_a_dead_standbys_term_is_given_up_whatever_answer_is_lost(
    hosts: tuple[LocalHost, LocalHost],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    *,
    made: bool,
) -> None:
    requested(hosts, tmp_path)
    record(tmp_path, "b/1", None)
    store = LosesAnAnswer(tmp_path / "leases", number, made=made)
    monkeypatch.setattr(recovery, "open_arbiter", lambda _: store)
    asyncio.run(abandon(ServiceFiles.of(hosts[1], "web").path))
    assert (stands(tmp_path).holder[:3], stands(tmp_path).released) == ("b/1", True)


@asynccontextmanager
async def stands_still_at(host: LocalHost, did: list[str]) -> AsyncIterator[None]:
    """The VM at home on a host, as a standby's service has left it that died before its `cont`."""
    qemu = await asyncio.create_subprocess_exec("sleep", "60")
    itself = identify(qemu.pid)
    assert itself is not None
    vm = home(host, "new", Replaced("a", "old"))
    vm.directory.current.write_text(vm.qemu._replace(process=itself).to_json())
    vm.qemu.files.path.mkdir()

    async def play(server: Server) -> None:
        await server.greet()
        with suppress(EOFError):
            while True:
                command = await server.command()
                did.append(str(command["execute"]))
                state = {"status": "paused", "running": False}
                await server.answer(command, state if did[-1] == "query-status" else {})

    with socket.socket(socket.AF_UNIX) as ear:
        ear.bind(str(vm.qemu.files.operator))
        ear.listen()
        ear.setblocking(False)

        async def serve() -> None:
            sock, _ = await asyncio.get_running_loop().sock_accept(ear)
            with sock:
                await play(Server(sock))

        serving = asyncio.ensure_future(serve())
        try:
            yield
        finally:
            serving.cancel()
            await asyncio.wait({serving})
            with suppress(ProcessLookupError):
                qemu.kill()
            await qemu.wait()


@pytest.mark.parametrize("holder", ["b/1", "a/1/recovery", "nothing"])
def test_a_guest_whose_taking_over_was_cut_off_runs_only_while_the_term_counts(
    hosts: tuple[LocalHost, LocalHost],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    holder: str,
) -> None:
    """Its host was cut off too, and said to be dead; or the arbiter has lost its directory."""
    monkeypatch.setattr(recovery, "GIVEN_UP_S", 0.3)
    requested(hosts, tmp_path, lease_s=3.0)
    did = list[str]()

    async def act() -> Vm | None:
        async with stands_still_at(hosts[1], did):
            if holder == "nothing":
                with pytest.raises(OperationFailedError, match="is paused on b"):
                    await abandon(ServiceFiles.of(hosts[1], "web").path)
            else:
                await abandon(ServiceFiles.of(hosts[1], "web").path)
            return await read_vm(hosts[1], "web")

    if holder != "nothing":
        record(tmp_path, holder, None)
    stays = asyncio.run(act())
    assert ("cont" in did) == (holder == "b/1")
    assert (stays is None) == (holder == "a/1/recovery")
    if holder == "b/1":
        # Whoever wants the term waits from now on, for as long as a lease is.
        assert (stands(tmp_path).holder, stands(tmp_path).term) == ("b/1/abandon/1", 2)


@pytest.mark.parametrize("is_silent", [True, False])
def test_the_term_of_a_guest_that_has_moved_on_is_not_given_up_to_its_old_primary(
    hosts: tuple[LocalHost, LocalHost],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    is_silent: bool,
) -> None:
    """Its standby's service was killed just as it took over; then it was moved to a third host,
    where a `start` names the `stop`. When the old host was back its guest ran as well.
    """
    monkeypatch.setattr(recovery, "GIVEN_UP_S", 0.3)
    vm = home(hosts[0], "old")
    requested(hosts, tmp_path, lease_s=3.0)
    Claim("web", "a/1", "b", str(tmp_path / "leases")).write(vm.directory.claim)
    record(tmp_path, "b/1", None)
    theirs = ServiceFiles.of(hosts[1], "web")

    async def taken_over() -> None:
        async with stands_still_at(hosts[1], []):
            await abandon(theirs.path)

    asyncio.run(taken_over())
    shutil.rmtree(vm_dir(hosts[1].state_dir, "web").path)
    if not is_silent:
        theirs.status.unlink(missing_ok=True)  # its disk was full
    third = LocalHost("c", tmp_path / "c", "127.0.0.1")
    home(third, "newer")
    off = FaultyHost("a", tmp_path / "a", "127.0.0.1", faults=silence())
    if is_silent:
        third = FaultyHost("c", tmp_path / "c", "127.0.0.1", faults=silence())
    asyncio.run(stop("web", (off, hosts[1], third)))
    assert (stands(tmp_path).holder, stands(tmp_path).released) == ("b/1/abandon/1", False)
    assert asyncio.run(examine(vm.directory.claim)).right is Right.ELSEWHERE


@pytest.mark.parametrize(("holder", "in_sync"), [("a/1", "b/1"), ("b/1", None)])
def test_a_guest_that_was_left_to_a_standby_that_died_is_taken_back_by_a_stop(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path, holder: str, in_sync: str | None
) -> None:
    vm, files = home(hosts[0], "old"), requested(hosts, tmp_path)
    record(tmp_path, holder, in_sync, released=holder == "a/1")
    left = {"role": "primary", "state": "ended", "run": "1", "ending": "yours", "why": "it died"}
    files.status.write_text(json.dumps(left))
    with pytest.raises(RefusedError, match="a standby may be about to take over"):
        asyncio.run(require_decided(vm))
    with pytest.raises(OperationFailedError, match="is being replicated"):
        asyncio.run(begin._require_new(vm, hosts[1]))
    said = asyncio.run(stop("web", hosts))
    assert said is not None
    assert (said.why or "").startswith("off")
    assert (stands(tmp_path).holder[:2], stands(tmp_path).in_sync) == ("a/", None)
    assert asyncio.run(read_vm(hosts[0], "web")) is not None
    asyncio.run(require_decided(vm))
    asyncio.run(begin._require_new(vm, hosts[1]))


@pytest.mark.parametrize(("in_sync", "released"), [("b/7", False), (None, True)])
def test_a_term_that_is_another_hosts_is_not_taken_back(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path, in_sync: str | None, *, released: bool
) -> None:
    vm, files = home(hosts[0], "old"), requested(hosts, tmp_path)
    Claim("web", "a/1", "b", str(tmp_path / "leases")).write(vm.directory.claim)
    record(tmp_path, "c/7", in_sync, released=released)
    with pytest.raises(RefusedError, match="not a's to take back"):
        asyncio.run(recover(files.path, at_any_rate=True))
    assert stands(tmp_path).holder == "c/7"
    assert asyncio.run(read_vm(hosts[0], "web")) is not None


def test_nothing_in_memory_stays_of_a_home_that_was_replaced(
    hosts: tuple[LocalHost, LocalHost],
) -> None:
    host, _ = hosts
    qemu_id = f"t{os.getpid():07x}"[:8]
    files = home(host, qemu_id).qemu.files
    directory = files.memory(IN_MEMORY)
    directory.mkdir(mode=0o700)
    try:
        for path in (files.ram(IN_MEMORY), files.promised, files.key):
            path.touch()
        asyncio.run(remove_stale_home(host, "web", qemu_id))
        assert not directory.exists()
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def test_of_two_homes_the_replaced_one_goes(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path
) -> None:
    """The old primary was off while its standby took over, and came back when all was over."""
    old = home(hosts[0], "old")
    Claim("web", "a/1", "b", str(tmp_path / "leases")).write(old.directory.claim)
    home(hosts[1], "new", Replaced("a", "old"))
    assert asyncio.run(settle("web", hosts))
    assert asyncio.run(read_vm(hosts[0], "web")) is None
    kept = asyncio.run(read_vm(hosts[1], "web"))
    assert kept is not None
    assert kept.qemu.replaces == Replaced("a", "old")
    assert not asyncio.run(settle("web", hosts))


def test_a_home_that_came_back_since_is_not_removed(hosts: tuple[LocalHost, LocalHost]) -> None:
    home(hosts[0], "newer")
    home(hosts[1], "new", Replaced("a", "old"))
    assert not asyncio.run(settle("web", hosts))
    assert asyncio.run(read_vm(hosts[0], "web")) is not None


SERVICE = """
import json, socket, sys, time
from pathlib import Path
role, directory, ear_after_s, silent = sys.argv[2], Path(sys.argv[3]), *map(float, sys.argv[4:6])
stopped = Path(sys.argv[6])
time.sleep(ear_after_s)
server = socket.socket(socket.AF_UNIX)
server.bind(str(directory / "control.sock"))
server.listen()
print("hears", flush=True)
while True:
    peer, _ = server.accept()
    word = peer.makefile().readline().strip()
    if silent:
        time.sleep(60)
    peer.sendall(json.dumps({"role": role, "state": "protected", "asked": word}).encode() + b"\\n")
    if word == "stop":
        stopped.write_text("in good order")
        sys.exit()
"""


def until_seen(child: "subprocess.Popen[bytes]", mark: str) -> None:
    """A process's command line is there a moment after it has been started."""
    while not find_by_argument(mark):
        assert child.poll() is None


def stopped(files: ServiceFiles) -> Path:
    """What the service writes when it is stopped in good order."""
    return files.path.parent.parent / "stopped"


@contextmanager
def service(files: ServiceFiles, ear_after_s: float = 0, *, silent: bool = False) -> Iterator[None]:
    """A process that looks like a primary's service."""
    directory = files.path
    words = ["replica", "primary", str(directory), str(ear_after_s), str(float(silent))]
    words.append(str(stopped(files)))
    with subprocess.Popen([sys.executable, "-c", SERVICE, *words], stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            if not ear_after_s:
                child.stdout.readline()
            until_seen(child, f"replica\0primary\0{directory}\0")
            yield
        finally:
            child.kill()


def test_a_beginning_that_is_undone_stops_the_primary_as_soon_as_that_hears(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path
) -> None:
    """It was asked once, when it had no ear yet, and killed after a minute: the VM moved."""
    files = requested(hosts, tmp_path)
    with service(files, ear_after_s=1.0):

        async def main() -> None:
            async with asyncio.timeout(20):
                await begin._undo(hosts[0], files, hosts[1], ServiceFiles.of(hosts[1], "web"))

        asyncio.run(main())
    assert stopped(files).exists()
    assert not files.path.exists()


@pytest.mark.parametrize(
    ("fate", "run", "stays"),
    [
        (CopiesFate.DISCARD, "1", False),
        (CopiesFate.DISCARD, "0", False),
        (CopiesFate.UNDO, "1", False),
        (CopiesFate.UNDO, "0", True),
        (CopiesFate.KEEP, "1", True),
    ],
)
def test_copies_of_a_killed_standby_go_or_are_there_for_the_next_one(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path, fate: CopiesFate, run: str, stays: bool
) -> None:
    requested(hosts, tmp_path, (CopiedDisk(0, 4096),))
    copy = StandbyFile(hosts[1].state_dir / "images/web.raw", 4096, "raw")
    prepare([copy], "web", run)
    asyncio.run(settle_here(ServiceFiles.of(hosts[1], "web").path, fate))
    assert copy.path.exists() is stays
    if fate is CopiesFate.KEEP:  # also when the next one is undone
        prepare([copy], "web", "2")
        asyncio.run(settle_here(ServiceFiles.of(hosts[1], "web").path, CopiesFate.UNDO))
        assert copy.path.exists()


@pytest.mark.parametrize("fate", [CopiesFate.DISCARD, CopiesFate.UNDO])
def test_a_copy_that_is_another_vms_disk_by_now_is_not_removed(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path, fate: CopiesFate
) -> None:
    """An operator made a VM of what a lost standby had; it is off as `replicate stop` is called."""
    requested(hosts, tmp_path, (CopiedDisk(0, 4096),))
    copy = StandbyFile(hosts[1].state_dir / "images/web.raw", 4096, "raw")
    prepare([copy], "web", "1")
    saved = vm_dir(hosts[1].state_dir, "saved")
    saved.path.mkdir(parents=True)
    disk = '[[disks]]\nimage = "web.raw"\nformat = "raw"\n'
    saved.spec.write_text(f'name = "saved"\nmemory = "64M"\n{disk}')
    asyncio.run(settle_here(ServiceFiles.of(hosts[1], "web").path, fate))
    assert copy.path.exists()
    shutil.rmtree(saved.path)
    asyncio.run(settle_here(ServiceFiles.of(hosts[1], "web").path, fate))
    assert not copy.path.exists()


@pytest.mark.parametrize("fate", CopiesFate)
def test_copies_that_cannot_be_settled_are_an_error_of_storage(
    hosts: tuple[LocalHost, LocalHost],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fate: CopiesFate,
) -> None:
    def fails(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    requested(hosts, tmp_path, (CopiedDisk(0, 4096),))
    for name in ("keep", "discard"):
        monkeypatch.setattr(leftover_copies, name, fails)
    with pytest.raises(StorageError, match="settle the copies"):
        asyncio.run(settle_here(ServiceFiles.of(hosts[1], "web").path, fate))


@pytest.mark.parametrize("fate", CopiesFate)
def test_a_disk_that_both_hosts_have_is_no_copy_whatever_stands_on_it(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path, fate: CopiesFate
) -> None:
    requested(hosts, tmp_path, (CopiedDisk(0, 4096),), SHARED)
    disk = StandbyFile(hosts[1].state_dir / "images/web.raw", 4096, "raw")
    prepare([disk], "web", "1")
    asyncio.run(settle_here(ServiceFiles.of(hosts[1], "web").path, fate))
    assert read_mark(disk.path) == ("copy", "1", "web")


def test_a_beginning_that_is_undone_leaves_the_recovery_of_a_killed_primary_its_files(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path
) -> None:
    """They were removed before it could read them: the guest was stopped when the lease ended."""
    files = requested(hosts, tmp_path)
    script = "import sys, time; time.sleep(1); print(open(sys.argv[4]).read())"
    words = ["replica", "recover", str(files.path), str(files.request)]
    with subprocess.Popen([sys.executable, "-c", script, *words], stdout=subprocess.PIPE) as child:
        until_seen(child, f"replica\0recover\0{files.path}\0")
        undoing = begin._undo(hosts[0], files, hosts[1], ServiceFiles.of(hosts[1], "web"))
        asyncio.run(undoing)
        assert child.stdout is not None
        assert b'"vm": "web"' in child.stdout.read()
    assert not files.path.exists()


def test_a_beginning_that_is_undone_leaves_what_tells_that_its_standby_took_over(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path
) -> None:
    """The primary died when both were in sync: of two homes no one knew which was stale."""
    files = requested(hosts, tmp_path)
    home(hosts[1], "new", Replaced("a", "old"))
    theirs = ServiceFiles.of(hosts[1], "web")
    asyncio.run(begin._undo(hosts[0], files, hosts[1], theirs))
    assert not files.path.exists()
    assert theirs.request.exists()
    assert asyncio.run(read_vm(hosts[1], "web")) is not None


@pytest.mark.parametrize("took_over", [False, True])
def test_a_beginning_that_is_undone_needs_no_arbiter_once_nothing_is_left_of_its_standby(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path, *, took_over: bool
) -> None:
    """QEMU and both services died, the arbiter for good: `vm start` named `stop`, which knew of no
    replication, and so on.
    """
    files = requested(hosts, tmp_path)
    vm, theirs = home(hosts[0], "old"), ServiceFiles.of(hosts[1], "web")
    vm.directory.claim.touch()
    if took_over:  # and has moved on since
        word = ReplicaStatus(role=Role.STANDBY, state="promoted", run="1")
        theirs.status.write_text(json.dumps(word.to_json()))
    asyncio.run(begin._undo(hosts[0], files, hosts[1], theirs))
    assert not files.path.exists()
    assert theirs.request.exists() is took_over
    assert vm.directory.claim.exists() is took_over
    if not took_over:
        asyncio.run(require_decided(vm))


def test_a_beginning_that_is_undone_leaves_no_waiting_qemu(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path
) -> None:
    files, directory = requested(hosts, tmp_path), vm_dir(hosts[1].state_dir, "web")
    waiting = directory.qemu("1")
    waiting.path.mkdir(parents=True)
    directory.spec.write_text(SPEC)
    pidfile = waiting.mark.split("\0")[-1]
    with subprocess.Popen(["sleep", "60"]) as other:
        # What a QEMU that waits looks like.
        script = "import time; time.sleep(60)"
        argv = [sys.executable, "-c", script, *waiting.mark.strip("\0").split("\0")]
        with subprocess.Popen(argv) as qemu:
            until_seen(qemu, waiting.mark)
            asyncio.run(begin._undo(hosts[0], files, hosts[1], ServiceFiles.of(hosts[1], "web")))
            assert qemu.wait(10) == -9, pidfile
        other.kill()
    assert not directory.path.exists()


def test_a_service_that_stands_still_is_told_from_a_dead_one_in_time(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sides, "STATUS_TIMEOUT_S", 0.2)
    files = requested(hosts, tmp_path)
    with service(files, silent=True):
        side = asyncio.run(sides.side_of(hosts[0], "web"))
        assert side is not None
        assert (side.answers, side.status.state) == (False, "silent")
        assert "no answer" in (side.status.why or "")
    side = asyncio.run(sides.side_of(hosts[0], "web"))
    assert side is not None
    assert side.status.state == "dead"


def test_options_come_back_as_they_were(hosts: tuple[LocalHost, LocalHost], tmp_path: Path) -> None:
    files = requested(hosts, tmp_path)
    assert read_request(files.path).options.lease_s == 0.1


class WithoutArbiter:
    """A primary on `a` that waits for an arbiter, and what it is told."""

    def __init__(self, host: LocalHost, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host, self.told, self.fails = host, list[str](), "it is down: no way to it"
        self.ending = "stopped"
        monkeypatch.setattr(stopping, "ARBITER_S", 0.2)

    async def _answer(self, word: str) -> ReplicaStatus:
        self.told.append(word)
        if word == "stop":
            await asyncio.sleep(5)
        is_over = word in (GO_ALONE, GO_ALONE_UNLESS_TAKEN)
        return ReplicaStatus(
            role=Role.PRIMARY, state="ended" if is_over else "protected", primary="a", standby="b",
            arbiter_fails=self.fails, why=word, ending=self.ending if is_over else None,
        )  # fmt: skip

    def answering(self) -> AbstractAsyncContextManager[None]:
        return answering(ServiceFiles.of(self.host, "web").control, self._answer)

    async def stop(
        self, known: Iterable[LocalHost], *, standby_is_dead: bool = False
    ) -> ReplicaStatus | None:
        async with self.answering():
            try:
                return await stop("web", known, standby_is_dead=standby_is_dead)
            finally:
                for task in asyncio.all_tasks() - {asyncio.current_task()}:
                    task.cancel()


@contextmanager
def waiting_standby(host: LocalHost) -> Iterator["subprocess.Popen[bytes]"]:
    """What a standby's service and its QEMU look like, as far as a process goes."""
    directory = vm_dir(host.state_dir, "web")
    directory.path.mkdir(parents=True)
    directory.spec.write_text(SPEC)
    argv = ["sleep", "60", "replica", "standby", str(ServiceFiles.of(host, "web").path), ""]
    with subprocess.Popen(["sh", "-c", "read line", *argv], stdin=subprocess.PIPE) as process:
        while not Path(f"/proc/{process.pid}/cmdline").read_bytes():
            time.sleep(0.001)
        yield process
        process.kill()


def test_a_stop_without_an_arbiter_ends_the_standby_and_lets_the_guest_go_on(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested(hosts, tmp_path)
    waits = WithoutArbiter(hosts[0], monkeypatch)
    with waiting_standby(hosts[1]) as service:
        last = asyncio.run(waits.stop(hosts))
        assert last is not None
        assert last.why == GO_ALONE
        assert service.wait(5) < 0
    assert [word for word in waits.told if word != "status"][-1] == GO_ALONE
    assert not vm_dir(hosts[1].state_dir, "web").path.exists()
    assert not any(ServiceFiles.of(host, "web").path.exists() for host in hosts)


def test_an_arbiter_that_answers_again_has_the_primary_end_as_usual(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = requested(hosts, tmp_path)
    waits = WithoutArbiter(hosts[0], monkeypatch)

    async def answer(word: str) -> ReplicaStatus:
        if word == "stop" and waits.told.count("stop"):
            waits.told.append(word)
            return ReplicaStatus(role=Role.PRIMARY, state="ended", why=word)
        if word == "stop":
            waits.fails = ""
        return await waits._answer(word)

    async def main() -> ReplicaStatus:
        async with answering(files.control, answer):
            side = await sides.side_of(hosts[0], "web")
            assert side is not None
            last, has_arbiter = await stopping._primary_ended("web", side, hosts, False)
            assert has_arbiter
            return last

    assert asyncio.run(main()).why == "stop"
    assert GO_ALONE not in waits.told


def test_a_stop_without_an_arbiter_runs_no_guest_twice(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested(hosts, tmp_path)
    waits = WithoutArbiter(hosts[0], monkeypatch)
    with pytest.raises(RefusedError) as silent:
        asyncio.run(waits.stop(hosts[:1]))  # the standby's host does not answer
    assert "--standby-is-dead" in silent.value.remedy
    home(hosts[1], "new")
    with pytest.raises(RefusedError) as taken:
        asyncio.run(waits.stop(hosts))
    assert "failover" in taken.value.remedy
    assert GO_ALONE not in waits.told
    asyncio.run(waits.stop(hosts[:1], standby_is_dead=True))
    assert [word for word in waits.told if word != "status"][-1] == GO_ALONE_UNLESS_TAKEN


def test_a_primary_that_saw_its_standbys_term_is_not_free_without_the_arbiter(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its guest ran on by the operator's word alone, and again on its standby once that was back.

    The arbiter is asked for the term, as where the service was killed.
    """
    requested(hosts, tmp_path)
    waits = WithoutArbiter(hosts[0], monkeypatch)
    waits.ending, released = "replaced", list[tuple[str, bool]]()

    async def release(
        host: LocalHost, name: str, *, standby_is_dead: bool = False
    ) -> ReplicaStatus:
        released.append((host.name, standby_is_dead))
        return ReplicaStatus(role=Role.PRIMARY, state="ended", ending="off", why="off")

    monkeypatch.setattr(stopping, "take_back_term", release)
    home(hosts[0], "old")
    last = asyncio.run(waits.stop(hosts[:1], standby_is_dead=True))
    assert released == [("a", True)]
    assert last is not None
    assert last.why == "off"
    assert GO_ALONE not in waits.told


def test_a_primary_that_does_not_end_for_another_reason_is_not_run_alone(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested(hosts, tmp_path)
    waits = WithoutArbiter(hosts[0], monkeypatch)
    waits.fails = ""
    monkeypatch.setattr(stopping, "TIMEOUT_S", 0.2)
    with pytest.raises(HostDownError, match="does not answer 'stop'"):
        asyncio.run(waits.stop(hosts, standby_is_dead=True))
    assert GO_ALONE not in waits.told


@pytest.mark.parametrize("has_claim", [True, False])
@pytest.mark.parametrize("is_silent", [True, False])
def test_a_guest_that_was_left_to_a_standby_of_which_nothing_is_left_is_no_dead_end(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path, *, is_silent: bool, has_claim: bool
) -> None:
    """Its primary's QEMU died and gave the term up, and the standby's host died before it had it.

    Then it gives no answer, or has forgotten all.
    """
    vm, files = home(hosts[0], "old"), requested(hosts, tmp_path)
    request = read_request(files.path)
    record(tmp_path, "a/1", "b/1", released=True)
    left = {"role": "primary", "state": "ended", "run": "1", "ending": "yours", "why": "it died"}
    files.status.write_text(json.dumps(left | {"standby": "b"}))
    if has_claim:  # services of earlier versions wrote none
        Claim("web", "a/1", "b", str(tmp_path / "leases")).write(vm.directory.claim)
    a, b = hosts
    shutil.rmtree(b.state_dir)
    if is_silent:
        b = FaultyHost("b", b.state_dir, "127.0.0.1", faults=silence())
        with pytest.raises(RefusedError, match=r"may run it|may take 'web' over") as refused:
            asyncio.run(stop("web", [a, b]))
        assert "--standby-is-dead" in refused.value.remedy
        with pytest.raises(RefusedError, match=r"may be about to take over|may take 'web' over"):
            asyncio.run(require_decided(vm))
    asyncio.run(stop("web", [a, b], standby_is_dead=is_silent))
    asyncio.run(require_decided(vm))
    asyncio.run(primary._entitled(request, vm))  # it may be protected again


def test_a_replica_that_was_ended_without_the_arbiter_keeps_no_vm_from_protection(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path
) -> None:
    vm, request = home(hosts[0], "old"), read_request(requested(hosts, tmp_path).path)
    record(tmp_path, "a/1", "b/1")
    with pytest.raises(RefusedError, match="is protected already"):
        asyncio.run(primary._entitled(request, vm))
    vm.directory.gone_replica.write_text("b/1")
    lease, dead = asyncio.run(primary._entitled(request, vm))
    asyncio.run(lease.take(dead))
    assert stands(tmp_path).term == 2


def write_without_a_trace(file: Path) -> None:
    before = file.stat()
    with file.open("r+b") as opened:
        opened.write(b"own")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_disk_that_a_replaced_home_left_is_known_and_makes_way_for_the_vm(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failover and a failback the VM could not move to where its old image stood."""
    qemu_img = tmp_path / "qemu-img"
    qemu_img.write_text('#!/bin/sh\ntouch "$5"\n')
    qemu_img.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    a, b = hosts
    disk = SPEC + DISK

    def at_home(host: LocalHost, content: bytes) -> Vm:
        vm = home(host, "old")
        vm.directory.spec.write_text(disk)
        image = host.state_dir / "images/web.raw"
        image.parent.mkdir(exist_ok=True)
        image.write_bytes(content)
        return vm._replace(spec=parse_spec(disk, "test", vm.directory.path))

    async def planned() -> DiskPlan:
        vm = await read_vm(a, "web")
        assert vm is not None
        owned = Owned(a, "web", vm.spec.disks, ("disk0",))
        images = {"disk0": DiskImage("disk0", 512, 512, ())}
        return await plan_disks(owned, b, Disks.AUTO, images)

    async def made(plan: DiskPlan) -> None:
        try:
            await create_files(b, "web", "r1", plan.copies)
        finally:
            await remove_files(b, "r1", [CopiedFile("-", str(left))])

    at_home(a, b"new" * 512)
    at_home(b, b"old" * 512)
    left = b.state_dir / "images/web.raw"
    files = requested(hosts, tmp_path, (CopiedDisk(0, 1536),))
    asyncio.run(remove_stale_home(b, "web", "old"))
    assert left.exists()
    plan = asyncio.run(planned())
    assert plan.obstacles == ()
    assert plan.copies[0].replaces
    # What was written since is no leftover, whatever time its file says (as after cp -p).
    write_without_a_trace(left)
    assert [one.code for one in asyncio.run(planned()).obstacles] == ["disk-target"]
    with pytest.raises(OperationFailedError, match="cannot create"):
        asyncio.run(made(plan))
    vm = at_home(b, b"old" * 512)
    asyncio.run(remove_stale_home(b, "web", "old"))
    other = vm_dir(b.state_dir, "db")
    other.path.mkdir()
    other.spec.write_text(disk.replace('"web"', '"db"', 1))
    assert [one.code for one in asyncio.run(planned()).obstacles] == ["disk-target"]
    shutil.rmtree(other.path)
    asyncio.run(made(asyncio.run(planned())))
    assert not left.exists()
    assert (files.path.exists(), vm.directory.path.exists()) == (True, False)


@pytest.mark.parametrize("role", list(Role))
def test_a_service_that_says_less_than_it_might_ends_no_command(
    hosts: tuple[LocalHost, LocalHost], role: Role
) -> None:
    """Of another version, or of a host that was broken into: commands ended with a KeyError."""
    home(hosts[0], "new")
    theirs = ServiceFiles.of(hosts[0], "web")
    theirs.path.mkdir(parents=True)
    theirs.request.write_text("{}")
    state = "promoted" if role is Role.STANDBY else "protected"
    less = ReplicaStatus(role=role, state=state, qemu_id="new")

    async def answer(_word: str) -> ReplicaStatus:
        return less

    async def main() -> None:
        async with answering(theirs.control, answer):
            assert not await settle("web", hosts)
            with pytest.raises(RefusedError, match="is being replicated"):
                await _is_protected_by(hosts[1], "web", hosts)
            with pytest.raises(RefusedError, match="not certain"):
                told = replace(less, arbiter_fails="it is down")
                await stopping._end_standby("web", told, hosts, is_dead=False)
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

    asyncio.run(main())


@pytest.mark.parametrize("before", ["stop_for_good", "remove"])
def test_a_home_that_came_back_while_the_stale_one_was_removed_stays(
    hosts: tuple[LocalHost, LocalHost], before: str
) -> None:
    """Who removed it was frozen in it; another had done so meanwhile, and moved the VM back."""
    vm, done = home(hosts[0], "old"), list[str]()

    def comes_back(*_: object) -> None:
        if not done:
            done.append(before)
            shutil.rmtree(vm.directory.path)
            home(hosts[0], "newer")

    fault = Fault(before, first=comes_back)
    host = FaultyHost("a", hosts[0].state_dir, "127.0.0.1", faults=(fault,))
    asyncio.run(remove_stale_home(host, "web", "old"))
    back = asyncio.run(read_vm(hosts[0], "web"))
    assert done and back is not None and back.qemu.files.qemu_id == "newer"


def test_a_stale_home_on_a_full_disk_goes_for_which_the_guest_was_handed_over(
    hosts: tuple[LocalHost, LocalHost], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hosts had the VM until there was room again, and every command was refused."""
    host, write_text = hosts[0], LocalHost.write_text
    vm = home(host, "old")
    vm.directory.spec.write_text(SPEC + DISK)
    image = parse_spec(SPEC + DISK, "test", vm.directory.path).disks[0].on(host.state_dir)
    image.parent.mkdir(parents=True, exist_ok=True)
    image.write_bytes(b"old")

    async def full(self: LocalHost, path: Path, text: str) -> None:
        if vm.directory.path.exists():
            raise StorageError(f"cannot write {path}", why="No space left on device", remedy="-")
        await write_text(self, path, text)

    monkeypatch.setattr(LocalHost, "write_text", full)
    asyncio.run(remove_stale_home(host, "web", "old"))
    assert not vm.directory.path.exists()
    assert asyncio.run(is_superseded(host, "web", image))


# What is gone when the removal of a home is cut off: a file system lists its files in any order.
CUT_OFF: tuple[list[str], ...] = (
    ["claim.json"],
    ["vm.json"],
    ["spec.toml"],
    ["vm.json", "spec.toml"],
    [],
)


@pytest.mark.parametrize("gone", CUT_OFF)
@pytest.mark.parametrize("also", [0, 1, 2])
def test_a_home_whose_removal_is_cut_off_is_there_with_its_claim_or_not_at_all(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path, gone: list[str], also: int
) -> None:
    """By a power cut, a kill: an overlay of hundreds of gigabytes takes a file system seconds. What
    was left had no claim, and ran beside its successor; or it was in the way of all that came
    there later, of which it said that another host had it, and committed its overlay to its disks.
    """
    vm = home(hosts[0], "old")
    requested(hosts, tmp_path, (CopiedDisk(0, 1 << 20),), SHARED)
    Claim("web", "a/1", "b", str(tmp_path / "leases")).write(vm.directory.claim)
    vm.directory.overlays.mkdir()
    shutil.copy(ServiceFiles.of(hosts[0], "web").request, vm.directory.overlays_request)
    killed = HostDownError("a", why="it lost its power", remedy="-")

    def partly(path: Path) -> None:
        for name in gone:
            (path / name).unlink(missing_ok=True)
        raise killed

    def in_order(argv: list[str], *_: object) -> None:
        *before, path = map(Path, argv[3:])
        for one in before[:also]:
            one.unlink()
        if also >= len(before):
            partly(path)
        raise killed

    faults = (
        Fault("remove", of=lambda path: path == vm.directory.path, by=partly),
        Fault("run", of=lambda argv, *_: argv[:2] == ["rm", "-rf"], by=in_order),
    )
    host = FaultyHost("a", hosts[0].state_dir, "127.0.0.1", faults=faults)
    with pytest.raises(HostDownError):
        asyncio.run(remove_stale_home(host, "web", "old"))
    if asyncio.run(read_vm(hosts[0], "web")) is not None:
        assert vm.directory.claim.exists()
        asyncio.run(remove_stale_home(hosts[0], "web", "old"))
        assert not vm.directory.path.exists()
        return
    # A standby waits there, and takes over.
    asyncio.run(sweep(hosts[0], vm.spec, vm.directory, None))
    vm.directory.path.mkdir(exist_ok=True)
    vm.directory.spec.write_text(SPEC)
    assert asyncio.run(read_vm(hosts[0], "web")) is None
    vm.directory.current.write_text(vm.qemu.to_json())
    asyncio.run(read_again(vm))
    assert not asyncio.run(hosts_with_overlays("web", hosts))


def test_what_an_earlier_service_said_at_its_end_is_not_of_a_later_one(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path
) -> None:
    """The removal of its files was cut off. `stop` went by it: the later one seemed to have ended,
    and left no term to be taken back.
    """
    files = requested(hosts, tmp_path)
    request = read_request(files.path)
    files.request.unlink()
    files.status.write_text(json.dumps({"role": "primary", "state": "ended", "run": "0"}))
    asyncio.run(begin._write(hosts[0], files, request))
    side = asyncio.run(side_of(hosts[0], "web"))
    assert side is not None and (side.status.state, side.status.run) == ("dead", "1")


def test_a_stop_does_not_wait_for_good_for_a_service_that_is_stuck_in_the_kernel(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its disk hung: `stop`, the undoing of a `start`, and `keep` waited without a word."""
    monkeypatch.setattr(sides, "BEGIN_S", 0.2)
    monkeypatch.setattr(sides, "STUCK_S", 0.2)
    home(hosts[0], "old")
    requested(hosts, tmp_path).status.write_text(
        json.dumps({"role": "primary", "state": "ended", "run": "1", "ending": "alone"})
    )
    stuck = (Fault("find_processes", answers=[GONE]), Fault("kill", answers=False))
    standby = FaultyHost("b", tmp_path / "b", "127.0.0.1", faults=stuck)

    async def stopped() -> None:
        async with asyncio.timeout(20):
            await stop("web", (hosts[0], standby))

    with pytest.raises(OperationFailedError, match="on b does not end"):
        asyncio.run(stopped())


def test_a_protection_that_had_no_term_yet_is_ended_whoever_has_it(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path
) -> None:
    """The VM came from the host that has the term, by a migration, and the services of a `start`
    died before they had a term, and with them the command: it could neither be started nor
    protected again.
    """
    vm = home(hosts[0], "old")
    requested(hosts, tmp_path)
    record(tmp_path, "c/7", None)
    said = asyncio.run(stop("web", hosts))
    assert said is not None
    assert said.why == "stopped: the primary's service died before it had a term"
    assert stands(tmp_path).holder == "c/7"
    asyncio.run(require_decided(vm))
    asyncio.run(begin._require_new(vm, hosts[1]))


@pytest.mark.parametrize("how", ["read-only", "stuck in the kernel"])
def test_a_stale_home_that_cannot_be_removed_keeps_nothing_from_the_vm(
    hosts: tuple[LocalHost, LocalHost], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The old host's disk fails, for which the guest was handed over, and is read-only by now, or
    its QEMU hangs on it: each command on the VM failed, and `keep` left it unprotected.
    """

    def read_only(_: str) -> Exception:
        return StorageError("cannot remove it", why="Read-only file system", remedy="-")

    stale = home(hosts[0], "old")
    requested(hosts, tmp_path)
    record(tmp_path, "b/1", None)
    home(hosts[1], "new", Replaced("a", "old"))
    said = {
        "role": "standby", "state": "promoted", "run": "1", "primary": "a", "standby": "b",
        "qemu_id": "new", "primary_qemu_id": "old", "took_over_ms": 1.0,
    }  # fmt: skip
    ServiceFiles.of(hosts[1], "web").status.write_text(json.dumps(said))
    fault = Fault("stop_for_good", answers=False)
    if how == "read-only":
        fault = Fault("remove", raises=read_only)
    old = FaultyHost("a", tmp_path / "a", "127.0.0.1", faults=(fault,))
    both = old, hosts[1]
    monkeypatch.setattr("vmckpt.hosts.inventory.inventory.all_hosts", lambda: list(both))
    monkeypatch.setattr("vmckpt.vm.inventory.all_hosts", lambda: list(both))
    told = list[str]()
    found = asyncio.run(find("web", told.append))
    assert found.host.name == "b"
    assert "vmckpt host rm a" in told[0]
    assert (asyncio.run(failover("web", both))).warnings == (f"{told[0]}; it is never started",)
    assert (
        asyncio.run(keeping._inspect("web", both, None)).reason == "it runs on no host that answers"
    )
    asyncio.run(stop("web", both))
    assert not ServiceFiles.of(hosts[1], "web").path.exists()
    assert stale.directory.current.exists()
