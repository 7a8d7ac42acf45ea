"""Who has a domain, by what both libvirtds say; and what their errors ask of the operator."""

import pytest

from vmckpt.hosts.local import LocalHost
from vmckpt.migrate.domains.whereabouts import (
    DomainMove,
    DomainView,
    EndState,
    decide,
    decide_off,
    end_state,
    is_orphan,
)
from vmckpt.options.migration import Tls
from vmckpt.preflight.domains.link import TCP_PORT, TLS_PORT, Transports, decide_link
from vmckpt.preflight.finding import OK, REFUSE, WARN
from vmckpt.vm.domains.faults import UNFORESEEN, remedy_for
from vmckpt.vm.domains.flags import DomainState, PausedReason, RunningReason

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("source", "target", "job", "move"),
    [
        (EndState.RUNNING, EndState.ABSENT, False, DomainMove.SOURCE_OWNS),
        (EndState.PAUSED, EndState.OFF, False, DomainMove.SOURCE_OWNS),
        (EndState.RUNNING, EndState.SILENT, False, DomainMove.SOURCE_OWNS),
        (EndState.RUNNING, EndState.WAITING, False, DomainMove.SOURCE_OWNS),
        (EndState.RUNNING, EndState.WAITING, True, DomainMove.WAIT),
        (EndState.ABSENT, EndState.RUNNING, False, DomainMove.DESTINATION_OWNS),
        (EndState.OFF, EndState.PAUSED, False, DomainMove.DESTINATION_OWNS),
        (EndState.SILENT, EndState.RUNNING, False, DomainMove.DESTINATION_OWNS),
        (EndState.SILENT, EndState.WAITING, False, DomainMove.WAIT),
        (EndState.WAITING, EndState.RUNNING, True, DomainMove.WAIT),
        (EndState.WAITING, EndState.RUNNING, False, DomainMove.DESTINATION_OWNS),
        (EndState.WAITING, EndState.WAITING, False, DomainMove.WAIT),
        (EndState.WAITING, EndState.ABSENT, False, DomainMove.WAIT),
        (EndState.SILENT, EndState.ABSENT, False, DomainMove.WAIT),
        (EndState.SILENT, EndState.SILENT, False, DomainMove.WAIT),
        (EndState.LOCKED, EndState.ABSENT, False, DomainMove.WAIT),
        (EndState.LOCKED, EndState.RUNNING, False, DomainMove.DESTINATION_OWNS),
        (EndState.OFF, EndState.ABSENT, False, DomainMove.LOST),
        (EndState.RUNNING, EndState.RUNNING, False, DomainMove.UNKNOWN),
        (EndState.POSTCOPY, EndState.POSTCOPY, True, DomainMove.WAIT),
        (EndState.POSTCOPY_FAILED, EndState.POSTCOPY, True, DomainMove.WAIT),
        (EndState.POSTCOPY_FAILED, EndState.POSTCOPY_FAILED, True, DomainMove.BROKEN_POSTCOPY),
        (EndState.OFF, EndState.POSTCOPY_FAILED, False, DomainMove.LOST),
        (EndState.OFF, EndState.POSTCOPY, False, DomainMove.WAIT),
        (EndState.POSTCOPY_FAILED, EndState.ABSENT, True, DomainMove.LOST),
        (EndState.POSTCOPY, EndState.OFF, True, DomainMove.LOST),
        (EndState.POSTCOPY_FAILED, EndState.SILENT, True, DomainMove.WAIT),
    ],
)
def test_the_next_move_follows_from_what_both_say(
    source: EndState, target: EndState, job: bool, move: DomainMove
) -> None:
    assert decide(DomainView(source, target, job)) is move


@pytest.mark.parametrize(
    ("source", "target", "known", "move"),
    [
        (EndState.OFF, EndState.ABSENT, False, DomainMove.SOURCE_OWNS),
        (EndState.ABSENT, EndState.OFF, False, DomainMove.DESTINATION_OWNS),
        (EndState.OFF, EndState.OFF, False, DomainMove.DESTINATION_OWNS),
        # What the target has may be what it had before.
        (EndState.OFF, EndState.OFF, True, DomainMove.SOURCE_OWNS),
        # Someone has started it.
        (EndState.RUNNING, EndState.OFF, False, DomainMove.SOURCE_OWNS),
        (EndState.OFF, EndState.RUNNING, True, DomainMove.DESTINATION_OWNS),
        (EndState.ABSENT, EndState.ABSENT, False, DomainMove.UNKNOWN),
        (EndState.OFF, EndState.SILENT, False, DomainMove.WAIT),
        (EndState.LOCKED, EndState.OFF, False, DomainMove.WAIT),
    ],
)
def test_a_domain_that_is_off_is_where_it_is_defined(
    source: EndState, target: EndState, *, known: bool, move: DomainMove
) -> None:
    assert decide_off(DomainView(source, target), known_to_target=known) is move


def test_only_a_target_without_its_source_is_an_orphan() -> None:
    assert is_orphan(DomainView(EndState.OFF, EndState.POSTCOPY))
    assert not is_orphan(DomainView(EndState.SILENT, EndState.POSTCOPY))
    assert not is_orphan(DomainView(EndState.OFF, EndState.RUNNING))


def test_a_state_and_its_reason_are_one_place() -> None:
    assert end_state(DomainState.RUNNING, 1) is EndState.RUNNING
    assert end_state(DomainState.RUNNING, RunningReason.POSTCOPY) is EndState.POSTCOPY
    assert end_state(DomainState.PAUSED, 1) is EndState.PAUSED
    assert end_state(DomainState.PAUSED, PausedReason.MIGRATION) is EndState.WAITING
    assert end_state(DomainState.PAUSED, PausedReason.STARTING_UP) is EndState.WAITING
    assert end_state(DomainState.PAUSED, PausedReason.POSTCOPY_FAILED) is EndState.POSTCOPY_FAILED
    assert end_state(DomainState.SHUTOFF, 4) is EndState.OFF
    assert end_state(DomainState.CRASHED, 0) is EndState.OFF


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
        ("Storage pool not found: no storage pool with matching target path",
         "create the missing pool or file"),
        ("Compression method 'zstd' is only supported with parallel migration", "--parallel"),
        ("Unable to access credentials /etc/pki/qemu/ca-cert.pem: No such file", "pki issue"),
        ("Certificate does not match the hostname 10.0.0.2", "pki issue"),
        ("internal error: Userfaultfd not available: Operation not permitted", "sysctl"),
        ("operation failed: guest CPU doesn't match specification: missing features: vmx", "CPU"),
        ("unable to connect to server at '10.0.0.2:16514': Connection refused", "16514"),
        ("operation failed: domain 'web' already exists with uuid 1", "rename"),
        ("cannot migrate domain with 2 snapshots", "checkpoint rm NAME --kind internal"),
        ("Timed out during operation: cannot acquire state change lock (held by "
         "monitor=remoteDispatchDomainMigratePerform3Params)", "restart libvirtd"),
        ("Timed out during operation: another job is active", "domjobinfo"),
    ],
)  # fmt: skip
def test_every_known_error_has_a_remedy_of_its_own(text: str, part: str) -> None:
    assert part in remedy_for(text)


def test_other_errors_point_to_libvirts_log() -> None:
    assert remedy_for("something new") == UNFORESEEN


ENOUGH = Transports(frozenset({TLS_PORT}), "/pki", one_machine=False)
UNENCRYPTED = Transports(frozenset({TCP_PORT}), "/pki", one_machine=False)


@pytest.mark.parametrize(
    ("tls", "ways", "uri", "verdict"),
    [
        (Tls.AUTO, ENOUGH, "qemu+tls://10.0.0.2/system?pkipath=/pki", OK),
        (Tls.OFF, ENOUGH, "qemu+tls://10.0.0.2/system?pkipath=/pki", OK),
        (Tls.AUTO, ENOUGH._replace(certificates=""), "qemu+tls://10.0.0.2/system", OK),
        (Tls.AUTO, ENOUGH._replace(certificates=None), "", REFUSE),
        (Tls.AUTO, UNENCRYPTED, "", REFUSE),
        (Tls.REQUIRE, UNENCRYPTED._replace(one_machine=True), "", REFUSE),
        (Tls.AUTO, UNENCRYPTED._replace(one_machine=True), "qemu+tcp://10.0.0.2/system", WARN),
        (Tls.OFF, UNENCRYPTED, "qemu+tcp://10.0.0.2/system", WARN),
        (Tls.OFF, Transports(frozenset(), "", one_machine=True), "", REFUSE),
    ],
)
def test_libvirtds_talk_in_clear_only_when_asked_to(
    tmp_path_factory: pytest.TempPathFactory, tls: Tls, ways: Transports, uri: str, verdict: str
) -> None:
    target = LocalHost("b", tmp_path_factory.getbasetemp(), "10.0.0.2")
    link = decide_link(tls, ways, "a", target)
    assert (link.uri, link.check.verdict) == (uri, verdict)
    assert link.check.remedy or verdict == OK
