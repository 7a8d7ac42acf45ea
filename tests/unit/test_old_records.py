"""Records of earlier versions are read: golden/state-1 is what vmckpt wrote at commit 5834ac84."""

import asyncio
import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from vmckpt.checkpoint.catalogue.known_stores import KnownStore, known
from vmckpt.checkpoint.catalogue.retention import RetentionRule
from vmckpt.checkpoint.restore.making import PendingQemu
from vmckpt.errors import NotFoundError, RefusedError
from vmckpt.fleet.drain import record as drains
from vmckpt.fleet.guard import record as guards
from vmckpt.fleet.schedule import due
from vmckpt.fleet.schedule import record as schedules
from vmckpt.fleet.schedule.due import ClockReading, ScheduleState
from vmckpt.fleet.schedule.learned import CheckpointCost, LearnedCosts, VmSample
from vmckpt.fleet.schedule.request import CatchUp, ScheduleRequest, When
from vmckpt.forecast.drain import fleet
from vmckpt.forecast.drain.crowding import Past, PastMove
from vmckpt.forecast.drain.timetable import MoveSpan
from vmckpt.forecast.measure.dirty_rate import DirtyRate
from vmckpt.forecast.measure.last_measured import all_kept
from vmckpt.forecast.model.dirtying import DirtyCurve, DirtyPoint
from vmckpt.group import journal as groups
from vmckpt.hosts.inventory.inventory import local_host
from vmckpt.hosts.local import LocalHost
from vmckpt.hosts.processes.process import PROCESS, ProcessId
from vmckpt.hosts.remote.tls import TlsEndpoint
from vmckpt.hosts.uids import Uids
from vmckpt.memory.content import Content, Piece
from vmckpt.memory.observe import DirtyWindow
from vmckpt.memory.windows import Dirtied, DirtyHistory
from vmckpt.migrate.domains.journal import DomainJournal
from vmckpt.migrate.elsewhere import watch
from vmckpt.migrate.outcome.journal import MigrationJournal
from vmckpt.migrate.steps.disk_files import MovedDisk
from vmckpt.options import replication as wishes
from vmckpt.replicate import request as replication
from vmckpt.replicate.disks import copies
from vmckpt.replicate.primary.claim import Claim
from vmckpt.state.documents import Documents, Schema
from vmckpt.vm.paths import vm_dir
from vmckpt.vm.record import Platform, Qemu, Replaced
from vmckpt.vm.users.users import VmUser

pytestmark = pytest.mark.unit
GOLDEN = Path(__file__).parents[1] / "golden/state-1"
PLATFORM = Platform("pc-q35-10.0", "kvm", "host")
NOW = ClockReading(1795305600.5, 1000.25, "boot")


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    copied = shutil.copytree(GOLDEN, tmp_path / "state")
    copied.chmod(0o700)
    monkeypatch.setenv("VMCKPT_STATE_DIR", str(copied))
    return copied


def test_a_guard() -> None:
    asked = guards.GuardRequest(
        "web", ("apt", "upgrade"), guards.Where.GUEST, ("agent", "tcp:80"), "192.0.2.1", 60.0, 5.0,
        3, None, guards.OnFailure.ASK, guards.GuardProof.READ, 86400.0, 0.01, ("mail root",),
        "lab-a:",
    )  # fmt: skip
    assert guards.load("r1") == guards.GuardRecord(
        "r1", asked, guards.GuardPhase.ROLLING_BACK, 1.5, "c1", "local", 2.5, 62.5, None,
        guards.GuardWorker("local", "/r"), "why", NOW,
    )  # fmt: skip


def test_a_drain_and_how_long_one_took() -> None:
    assert drains.load("a") == drains.DrainRecord("a", "r2", 1.5, {"web": "b"}, {"db": "c"})
    move = fleet.PlannedMove("web", "a", "b", fleet.MoveCost(1.0, 2.0, 3.0, 0.5))
    taken = PastMove(move, MoveSpan(0.0, 1.0, 1.5, 2.0, 3.0))
    assert drains.load_past(here=True) == [Past((taken,), 2, 3.5)]
    assert drains.load_past(here=False) == []


def test_a_schedule() -> None:
    asked = ScheduleRequest(
        "web", When.CRON, "Europe/Berlin", cron="0 3 * * *", window="22:00-06:00", jitter_s=60.0,
        catch_up=CatchUp.SKIP, rule=RetentionRule(daily=7, max_age_s=1e6), store="lab-a:",
        copies=("lab-b:", "/srv"), kind="file", max_pause_s=0.0, key_file="/root/key",
        check_percent=2.5,
    )  # fmt: skip
    assert schedules.load("web") == schedules.ScheduleRecord(
        "web",
        "0123456789abcdef",
        asked,
        NOW,
        ScheduleState(3, 7.5, NOW, due.ClaimedRun(3, 7.5, 2, NOW, 4, NOW, 30.0, "why")),
        LearnedCosts(5.0, 1, VmSample(NOW, "q", alive=True), CheckpointCost(0.1, 2.0), 7),
        schedules.PendingCheckpoint("id", "lab-a:", "lab-a"),
        (schedules.ScheduleRun(2, 1.0, 2.0, 3.0, "done", "id", "", 1, 2),),
        ("lab-a:",),
        *(1, 2, 3, 4.5, "because", {"lab-a:": 3}),
    )
    assert schedules.load("db").request == ScheduleRequest("db", When.EVERY, "UTC", every_s=900.0)


def test_journals_of_migrations(state: Path) -> None:
    disks = (MovedDisk("/s/d", "/t/d", keep=True),)
    journal = MigrationJournal(
        "r3", "web", "a", "b", "q-a", "q-b", "/dev/shm", True, "transfer", disks, False, True,
        PLATFORM,
    )  # fmt: skip
    assert asyncio.run(MigrationJournal.read(local_host(), "web")) == journal
    domain = DomainJournal(
        "r4", "dom", "0a", "a", "b", True, (MovedDisk("/s/d", "/t/d"),), True, True,
        held_mib_per_s=32, max_downtime_ms=300,
    )  # fmt: skip
    moved = DomainJournal("r5", "dom", "0a", "a", "b", persistent=True, moved=True)
    stayed = DomainJournal("r6", "dom", "0a", "a", "b", persistent=True, stayed=True)
    assert asyncio.run(DomainJournal.all_of("dom")) == [domain, moved, stayed]


def test_the_records_of_a_vm(state: Path) -> None:
    own, adopted = vm_dir(state, "web"), vm_dir(state, "adopted")
    process = ProcessId(4711, 99)
    assert Qemu.from_json(own.current.read_text(), own) == Qemu(
        own.qemu("0a0b0c0d"), process, PLATFORM
    )
    assert Qemu.from_json(adopted.current.read_text(), adopted) == Qemu(
        adopted.qemu("0a0b0c0d")._replace(is_loose=False), process, PLATFORM, ("drive0",), True,
        Replaced("a", "q-a"), True,
    )  # fmt: skip
    for directory in (own, adopted):
        text = directory.current.read_text()
        assert json.loads(Qemu.from_json(text, directory).to_json()) == json.loads(text)
    user = own.path / "user.json"
    assert VmUser.from_json(user.read_text(), user) == VmUser(
        345678, Uids(300_000, 400_000), taps=("vk0",)
    )


def test_what_a_host_is_asked_for(state: Path) -> None:
    """A replication's request."""
    uids, link = Uids(300_000, 400_000), TlsEndpoint("192.0.2.2", 4711, "ab:cd", "token")
    a = LocalHost(
        "a", Path("/var/lib/vmckpt"), "192.0.2.1", migration_ports=(49152, 49215), vm_uids=uids
    )
    b = LocalHost(
        "b", Path("/var/lib/vmckpt"), "192.0.2.2", bridge="br0", second_address="198.51.100.2"
    )
    wished = wishes.ReplicationOptions(
        "host:c", ("fence", "--now"), None, 0.01, True, 3.0, "/root/cred"
    )
    request = replication.ReplicationRequest(
        "r8", "web", 'name = "web"\n', PLATFORM, a, b, wished, one_machine=False,
        qemu_id="0a0b0c0d", disks=(copies.CopiedDisk(0, 1 << 30),), place=link, identity="id-1",
    )  # fmt: skip
    assert replication.read_request(state / "replicas/web") == request
    found = replication.read_request(state / "replicas/db")
    assert found == dataclasses.replace(request, vm="db", place=None, disks=())
    claim = Claim.read(vm_dir(state, "web").claim)
    assert claim == Claim("web", "a/r8", "b", "host:c", "/root/cred")


def test_what_is_under_way_at_a_store(state: Path) -> None:
    """A group's commit, a restore, and what stores were."""
    parts = (
        groups.Part("web", "a", ProcessId(1, 2), None, "/srv", "c1"),
        groups.Part("db", "b", ProcessId(3, 4), "b", "/srv", "c2"),
    )
    group = Documents(state / "groups", Schema(groups.GroupJournal, "-")).load("g1")
    assert group == groups.GroupJournal("g1", "both", parts)
    making = Documents(state / "vms/web", Schema(PendingQemu, "-")).load("restore")
    assert making == PendingQemu("q9", 'name = "web"\n', ("/i/a",), (("/i/n", "/i/o"),))
    assert known("lab-a:/srv") == KnownStore("lab-a:/srv", "ab" * 16, True, 3, accepted=True)


def test_a_migration_that_it_began_on_a_host_is_refused_by_name(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = LocalHost("a", state, "192.0.2.1")
    monkeypatch.setattr(watch, "all_hosts", lambda: [host])
    with pytest.raises(RefusedError, match="run r7 on a was begun by an earlier version of vmckpt"):
        asyncio.run(watch.find_job("r7"))
    with pytest.raises(NotFoundError):
        asyncio.run(watch.find_job("r9"))


def test_who_did_a_job_and_what_was_measured(state: Path) -> None:
    process = state / "jobs/r7/process.json"
    assert PROCESS.decode(process.read_text(), process) == ProcessId(4711, 99)
    content = Content(0.25, 0.5, 0.25, 0.5)
    counts = ((Dirtied(0.5, 0), Dirtied(1.0, 100)),)
    measured = DirtyRate(
        "page-tracking", "", 2.0, 1 << 20,
        DirtyCurve((DirtyPoint(1.0, 40.0, 50.0, 60.0),), 256), (DirtyWindow(0.0, 0.5, 7),), 100,
        content, None, 0.5, (Piece(0.25, content),), DirtyHistory((2.0,), ((100,),), counts),
        NOW.wall_s,
    )  # fmt: skip
    assert list(all_kept()) == [("web", 1795305601.0, measured)]
