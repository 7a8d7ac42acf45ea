"""What an interrupted restore of a domain has made is finished or undone, by what libvirt says."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.fake_libvirtd import FakeLibvirtd
from tests.faulty_host import Fault, FaultyHost
from vmckpt.checkpoint.domains.record import (
    PendingDomain,
    Phase,
    files_of,
    old_of,
    settle_restore,
    write_down,
)
from vmckpt.checkpoint.restore.making import proof_of
from vmckpt.errors import BusyError, OperationFailedError, StorageError
from vmckpt.hosts.local import LocalHost
from vmckpt.vm.domains.faults import LibvirtRefusedError
from vmckpt.vm.domains.flags import DomainState, PausedReason, RunningReason
from vmckpt.vm.domains.job import DomainJob
from vmckpt.vm.domains.replies import DomainInfo
from vmckpt.vm.domains.running import domain_dir
from vmckpt.vm.paths import IN_MEMORY

pytestmark = pytest.mark.contract
RESTORED = RunningReason.RESTORED
UUID, ID = "11111111-1111-1111-1111-111111111111", "abcd0123"
XML = "<domain type='qemu'><name>web</name><os><type machine='q35'>hvm</type></os></domain>"
OLD, NEW, OF_ANOTHER = "the old one", "the new one", "of another"


def domain(state: DomainState, reason: int = 1) -> DomainInfo:
    return DomainInfo(UUID, "web", state, reason, True, XML)


class Restore:
    """A restore that was cut off: its record, images, and saved memory."""

    def __init__(self, root: Path, phase: Phase, *, replaces: bool) -> None:
        self.host = LocalHost("a", root / "state", "::1")
        self.image = root / "web.qcow2"
        self.pending = PendingDomain(
            "web", UUID, ID, (str(self.image),), replaces, replaces, "<definition/>", phase
        )
        asyncio.run(write_down(self.host, self.pending))
        self.files = files_of(self.host, UUID, ID)
        self.files.path.mkdir()
        self.proof = proof_of(self.image, ID)
        self.proof.write_text(NEW)
        if not replaces:
            self.image.hardlink_to(self.proof)
            return
        self.image.write_text(OLD)
        if phase is not Phase.MAKING:
            old_of(self.host, self.pending).write_text("memory")
        if phase is Phase.SWITCHING:
            self.pending.put_in_place()

    def settle(self, state: DomainState | None, reason: int = 1, **answers: Any) -> FakeLibvirtd:
        seen = None if state is None else domain(state, reason)
        session = FakeLibvirtd(self.host, find=seen, **answers)
        asyncio.run(settle_restore(self.host, UUID, session))
        return session

    def nothing_left(self) -> None:
        assert list(self.image.parent.glob("web.qcow2?*")) == []
        assert not self.files.path.exists()
        assert not self.files.memory(IN_MEMORY).exists()
        assert not domain_dir(self.host, UUID).restoring.exists()


def test_a_new_domain_that_libvirt_did_not_start_leaves_nothing(tmp_path: Path) -> None:
    work = Restore(tmp_path, Phase.MAKING, replaces=False)
    work.settle(None)
    assert not work.image.exists()
    work.nothing_left()
    work.settle(None)  # there is nothing to do any more


def test_what_took_the_name_of_a_new_image_stays(tmp_path: Path) -> None:
    """Recovery may come late, and somebody may have put another file there."""
    work = Restore(tmp_path, Phase.MAKING, replaces=False)
    work.image.unlink()
    work.image.write_text(OF_ANOTHER)
    work.settle(None)
    assert work.image.read_text() == OF_ANOTHER
    work.nothing_left()


def test_a_new_domain_that_runs_is_finished(tmp_path: Path) -> None:
    work = Restore(tmp_path, Phase.MAKING, replaces=False)
    session = work.settle(DomainState.RUNNING, RESTORED, job=DomainJob(False), define=None)
    assert session.told == [("define", "<definition/>")]
    assert work.image.read_text() == NEW
    work.nothing_left()


@pytest.mark.parametrize("phase", [Phase.MAKING, Phase.SAVING])
def test_the_old_guest_that_still_runs_is_left_alone(tmp_path: Path, phase: Phase) -> None:
    work = Restore(tmp_path, phase, replaces=True)
    session = work.settle(DomainState.RUNNING, job=DomainJob(False))
    assert session.told == []
    assert work.image.read_text() == OLD
    work.nothing_left()


@pytest.mark.parametrize("phase", [Phase.SAVING, Phase.SWITCHING])
def test_the_old_guest_that_was_saved_continues_with_its_disks(
    tmp_path: Path, phase: Phase
) -> None:
    work = Restore(tmp_path, phase, replaces=True)
    memory = old_of(work.host, work.pending)
    session = work.settle(DomainState.SHUTOFF, restore=None)
    assert session.told == [("restore", memory)]
    assert work.image.read_text() == OLD
    work.nothing_left()


def test_the_new_guest_that_runs_stays(tmp_path: Path) -> None:
    work = Restore(tmp_path, Phase.SWITCHING, replaces=True)
    session = work.settle(DomainState.RUNNING, RESTORED, job=DomainJob(False), define=None)
    assert session.told == [("define", "<definition/>")]
    assert work.image.read_text() == NEW
    work.nothing_left()


@pytest.mark.parametrize("replaces", [False, True])
def test_a_new_guest_that_ran_and_has_ended_since_keeps_its_disks(
    tmp_path: Path, *, replaces: bool
) -> None:
    """Its restore could not finish; days later it was shut down."""
    work = Restore(tmp_path, Phase.RUNNING, replaces=replaces)
    if replaces:
        work.pending.put_in_place()
    session = work.settle(DomainState.SHUTOFF, define=None)
    assert session.told == [("define", "<definition/>")]
    assert work.image.read_text() == NEW
    work.nothing_left()


def test_a_domain_that_was_booted_between_two_images_keeps_both(tmp_path: Path) -> None:
    """After a power cut, by its autostart: it may have old disks, new ones, or one of each."""
    work = Restore(tmp_path, Phase.SWITCHING, replaces=True)
    with pytest.raises(OperationFailedError, match="its restore did not start it"):
        work.settle(DomainState.RUNNING, job=DomainJob(False))
    [(image, _, old)] = work.pending.proofs()
    assert (image.read_text(), old.read_text()) == (NEW, OLD)
    assert old_of(work.host, work.pending).exists()
    assert domain_dir(work.host, UUID).restoring.exists()


def test_an_old_guest_that_ended_before_it_was_saved_stays_off(tmp_path: Path) -> None:
    work = Restore(tmp_path, Phase.SAVING, replaces=True)
    old_of(work.host, work.pending).unlink()
    assert work.settle(DomainState.SHUTOFF).told == []
    assert work.image.read_text() == OLD
    work.nothing_left()


def test_an_image_that_was_not_replaced_yet_has_one_name_again(tmp_path: Path) -> None:
    """Cut off between the link and the rename: both names are of one file."""
    work = Restore(tmp_path, Phase.SAVING, replaces=True)
    [(image, _, old)] = work.pending.proofs()
    old.hardlink_to(image)
    work.settle(DomainState.SHUTOFF, restore=None)
    assert work.image.read_text() == OLD
    work.nothing_left()


def test_a_domain_that_libvirt_still_saves_is_waited_for(tmp_path: Path) -> None:
    """It goes off a moment later: to leave it alone now would lose the old guest."""
    work = Restore(tmp_path, Phase.SAVING, replaces=True)
    with pytest.raises(BusyError):
        work.settle(DomainState.RUNNING, job=DomainJob(True))
    assert old_of(work.host, work.pending).exists()
    assert domain_dir(work.host, UUID).restoring.exists()


def test_a_domain_whose_save_ends_at_that_moment_is_waited_for(tmp_path: Path) -> None:
    """It was active, and has no job any more to ask about: its recovery gave up."""
    work = Restore(tmp_path, Phase.SAVING, replaces=True)
    ended = LibvirtRefusedError("no job", why="the domain is not running", remedy="-", code=55)
    with pytest.raises(BusyError):
        work.settle(DomainState.RUNNING, job=ended)
    assert old_of(work.host, work.pending).exists()


def test_a_new_guest_that_libvirt_still_loads_is_waited_for(tmp_path: Path) -> None:
    """It may yet fail: then the old one is still needed."""
    work = Restore(tmp_path, Phase.SWITCHING, replaces=True)
    with pytest.raises(BusyError):
        work.settle(DomainState.PAUSED, PausedReason.STARTING_UP)
    assert old_of(work.host, work.pending).exists()


def test_the_old_guests_memory_is_kept_if_libvirt_does_not_start_it(tmp_path: Path) -> None:
    work = Restore(tmp_path, Phase.SWITCHING, replaces=True)
    refused = LibvirtRefusedError("no", why="no room", remedy="make room", code=1)
    with pytest.raises(OperationFailedError) as caught:
        work.settle(DomainState.SHUTOFF, restore=refused)
    memory = old_of(work.host, work.pending)
    assert f"virsh restore {memory}" in caught.value.remedy
    assert memory.read_text() == "memory"
    assert work.image.read_text() == OLD
    session = work.settle(DomainState.SHUTOFF, restore=None)  # the next command tries again
    assert session.told == [("restore", memory)]
    work.nothing_left()


def test_an_old_guest_that_continues_is_not_taken_for_the_new_one(tmp_path: Path) -> None:
    """Killed as it undid: libvirt has restored the old guest, and its definition was replaced."""
    work = Restore(tmp_path, Phase.SWITCHING, replaces=True)
    work.pending.put_back()
    session = work.settle(DomainState.RUNNING, RESTORED, job=DomainJob(False))
    assert session.told == []
    assert work.image.read_text() == OLD
    work.nothing_left()


@pytest.mark.parametrize(
    "written",
    ["LibvirtQemudPart" + "\0" * 76, "", "\0" * 92],
    ids=["half", "empty", "not-synced"],
)
def test_a_guest_that_a_power_cut_ended_as_it_was_saved_stays_off(
    tmp_path: Path, written: str
) -> None:
    """Libvirt refuses half an image: each command on the domain failed with that, for good."""
    work = Restore(tmp_path, Phase.SAVING, replaces=True)
    old_of(work.host, work.pending).write_text(written)
    assert work.settle(DomainState.SHUTOFF).told == []
    assert work.image.read_text() == OLD
    work.nothing_left()


def test_one_whose_record_had_no_room_keeps_its_new_disks_when_it_ends(tmp_path: Path) -> None:
    """Killed as it finished: once the new guest was off, the old one was restored on its disks."""
    work = Restore(tmp_path, Phase.SWITCHING, replaces=True)

    def broken(_: str) -> StorageError:
        return StorageError("cannot remove it", why="input/output error", remedy="-")

    fault = Fault("remove", raises=broken, of=lambda path: "vmckpt-old" in str(path))
    host = work.host
    work.host = FaultyHost("a", host.state_dir, "::1", faults=(fault,))
    with pytest.raises(StorageError):
        work.settle(DomainState.RUNNING, RESTORED, job=DomainJob(False), define=None)
    assert not old_of(host, work.pending).exists()
    work.host = host
    session = work.settle(DomainState.SHUTOFF, define=None)
    assert session.told == [("define", "<definition/>")]
    assert work.image.read_text() == NEW
    work.nothing_left()
