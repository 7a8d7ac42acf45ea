"""Who has a domain, by what both libvirtds say; and what their errors ask of the operator."""

import pytest

from vmckpt.hosts.local import LocalHost
from vmckpt.migrate.domains.whereabouts import (
    Move,
    Place,
    View,
    decide,
    decide_off,
    is_orphan,
    place,
)
from vmckpt.options.migration import Tls
from vmckpt.preflight.domains.link import TCP_PORT, TLS_PORT, Ways, decide_link
from vmckpt.preflight.finding import OK, REFUSE, WARN
from vmckpt.vm.domains.faults import UNFORESEEN, remedy_for
from vmckpt.vm.domains.flags import PausedReason, RunningReason, State

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("source", "target", "job", "move"),
    [
        (Place.RUNNING, Place.ABSENT, False, Move.SOURCE_OWNS),
        (Place.PAUSED, Place.OFF, False, Move.SOURCE_OWNS),
        (Place.RUNNING, Place.SILENT, False, Move.SOURCE_OWNS),
        (Place.RUNNING, Place.WAITING, False, Move.SOURCE_OWNS),
        (Place.RUNNING, Place.WAITING, True, Move.WAIT),
        (Place.ABSENT, Place.RUNNING, False, Move.TARGET_OWNS),
        (Place.OFF, Place.PAUSED, False, Move.TARGET_OWNS),
        (Place.SILENT, Place.RUNNING, False, Move.TARGET_OWNS),
        (Place.SILENT, Place.WAITING, False, Move.WAIT),
        (Place.WAITING, Place.RUNNING, True, Move.WAIT),
        (Place.WAITING, Place.RUNNING, False, Move.TARGET_OWNS),
        (Place.WAITING, Place.WAITING, False, Move.WAIT),
        (Place.WAITING, Place.ABSENT, False, Move.WAIT),
        (Place.SILENT, Place.ABSENT, False, Move.WAIT),
        (Place.SILENT, Place.SILENT, False, Move.WAIT),
        (Place.LOCKED, Place.ABSENT, False, Move.WAIT),
        (Place.LOCKED, Place.RUNNING, False, Move.TARGET_OWNS),
        (Place.OFF, Place.ABSENT, False, Move.LOST),
        (Place.RUNNING, Place.RUNNING, False, Move.UNKNOWN),
        (Place.POSTCOPY, Place.POSTCOPY, True, Move.WAIT),
        (Place.POSTCOPY_FAILED, Place.POSTCOPY, True, Move.WAIT),
        (Place.POSTCOPY_FAILED, Place.POSTCOPY_FAILED, True, Move.BROKEN_POSTCOPY),
        (Place.OFF, Place.POSTCOPY_FAILED, False, Move.LOST),
        (Place.OFF, Place.POSTCOPY, False, Move.WAIT),
        (Place.POSTCOPY_FAILED, Place.ABSENT, True, Move.LOST),
        (Place.POSTCOPY, Place.OFF, True, Move.LOST),
        (Place.POSTCOPY_FAILED, Place.SILENT, True, Move.WAIT),
    ],
)
def test_the_next_move_follows_from_what_both_say(
    source: Place, target: Place, job: bool, move: Move
) -> None:
    assert decide(View(source, target, job)) is move


@pytest.mark.parametrize(
    ("source", "target", "known", "move"),
    [
        (Place.OFF, Place.ABSENT, False, Move.SOURCE_OWNS),
        (Place.ABSENT, Place.OFF, False, Move.TARGET_OWNS),
        (Place.OFF, Place.OFF, False, Move.TARGET_OWNS),
        # What the target has may be what it had before.
        (Place.OFF, Place.OFF, True, Move.SOURCE_OWNS),
        # Somebody has started it.
        (Place.RUNNING, Place.OFF, False, Move.SOURCE_OWNS),
        (Place.OFF, Place.RUNNING, True, Move.TARGET_OWNS),
        (Place.ABSENT, Place.ABSENT, False, Move.UNKNOWN),
        (Place.OFF, Place.SILENT, False, Move.WAIT),
        (Place.LOCKED, Place.OFF, False, Move.WAIT),
    ],
)
def test_a_domain_that_is_off_is_where_it_is_defined(
    source: Place, target: Place, *, known: bool, move: Move
) -> None:
    assert decide_off(View(source, target), known_to_target=known) is move


def test_only_a_target_without_its_source_is_an_orphan() -> None:
    assert is_orphan(View(Place.OFF, Place.POSTCOPY))
    assert not is_orphan(View(Place.SILENT, Place.POSTCOPY))
    assert not is_orphan(View(Place.OFF, Place.RUNNING))


def test_a_state_and_its_reason_are_one_place() -> None:
    assert place(State.RUNNING, 1) is Place.RUNNING
    assert place(State.RUNNING, RunningReason.POSTCOPY) is Place.POSTCOPY
    assert place(State.PAUSED, 1) is Place.PAUSED
    assert place(State.PAUSED, PausedReason.MIGRATION) is Place.WAITING
    assert place(State.PAUSED, PausedReason.STARTING_UP) is Place.WAITING
    assert place(State.PAUSED, PausedReason.POSTCOPY_FAILED) is Place.POSTCOPY_FAILED
    assert place(State.SHUTOFF, 4) is Place.OFF
    assert place(State.CRASHED, 0) is Place.OFF


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("internal error: Attempt to migrate guest to the same host 1234", "host_uuid"),
        ("hostname on destination resolved to localhost, but migration requires an FQDN",
         "--migration-addr"),
        ("Unable to resolve address 'lab-b' service '49152': Name or service not known",
         "--migration-addr"),
        ("Unsafe migration: Migration without shared storage is unsafe", "shared_filesystems"),
        ("Unsafe migration: Migration may lead to data corruption if disks use cache other than "
         "none or directsync", "cache='none'"),
        ("Storage pool not found: no storage pool with matching target path", "make what it names"),
        ("Compression method 'zstd' is only supported with parallel migration", "--parallel"),
        ("Unable to access credentials /etc/pki/qemu/ca-cert.pem: No such file", "pki issue"),
        ("Certificate does not match the hostname 10.0.0.2", "pki issue"),
        ("internal error: Userfaultfd not available: Operation not permitted", "sysctl"),
        ("operation failed: guest CPU doesn't match specification: missing features: vmx", "CPU"),
        ("unable to connect to server at '10.0.0.2:16514': Connection refused", "16514"),
        ("operation failed: domain 'web' already exists with uuid 1", "rename"),
        ("cannot migrate domain with 2 snapshots", "snapshot delete"),
        ("Timed out during operation: cannot acquire state change lock (held by "
         "monitor=remoteDispatchDomainMigratePerform3Params)", "restart libvirtd"),
        ("Timed out during operation: another job is active", "domjobinfo"),
    ],
)  # fmt: skip
def test_every_known_error_has_a_remedy_of_its_own(text: str, part: str) -> None:
    assert part in remedy_for(text)


def test_other_errors_point_to_libvirts_log() -> None:
    assert remedy_for("something new") == UNFORESEEN


ENOUGH = Ways(frozenset({TLS_PORT}), "/pki", one_machine=False)
IN_CLEAR = Ways(frozenset({TCP_PORT}), "/pki", one_machine=False)


@pytest.mark.parametrize(
    ("tls", "ways", "uri", "verdict"),
    [
        (Tls.AUTO, ENOUGH, "qemu+tls://10.0.0.2/system?pkipath=/pki", OK),
        (Tls.OFF, ENOUGH, "qemu+tls://10.0.0.2/system?pkipath=/pki", OK),
        (Tls.AUTO, ENOUGH._replace(certificates=""), "qemu+tls://10.0.0.2/system", OK),
        (Tls.AUTO, ENOUGH._replace(certificates=None), "", REFUSE),
        (Tls.AUTO, IN_CLEAR, "", REFUSE),
        (Tls.REQUIRE, IN_CLEAR._replace(one_machine=True), "", REFUSE),
        (Tls.AUTO, IN_CLEAR._replace(one_machine=True), "qemu+tcp://10.0.0.2/system", WARN),
        (Tls.OFF, IN_CLEAR, "qemu+tcp://10.0.0.2/system", WARN),
        (Tls.OFF, Ways(frozenset(), "", one_machine=True), "", REFUSE),
    ],
)
def test_libvirtds_talk_in_clear_only_when_asked_to(
    tmp_path_factory: pytest.TempPathFactory, tls: Tls, ways: Ways, uri: str, verdict: str
) -> None:
    target = LocalHost("b", tmp_path_factory.getbasetemp(), "10.0.0.2")
    link = decide_link(tls, ways, "a", target)
    assert (link.uri, link.check.verdict) == (uri, verdict)
    assert link.check.remedy or verdict == OK
