"""What libvirt is asked for, and what its answers mean."""

import time
from dataclasses import replace

import pytest

from vmckpt.migrate.domains.progress import progress
from vmckpt.migrate.domains.request import build
from vmckpt.options.migration import AtTarget, Method, MigrationOptions, OnTimeout
from vmckpt.options.policy import Act, Policy, PolicyRule
from vmckpt.preflight.domains.certificates import certificate_dir, qemu_users
from vmckpt.preflight.domains.checks import Contents, Route
from vmckpt.preflight.domains.options import off_checks, option_checks
from vmckpt.preflight.finding import REFUSE, WARN
from vmckpt.units import MIB
from vmckpt.vm.domains import flags
from vmckpt.vm.domains.flags import MigrateFlag as Flag
from vmckpt.vm.domains.job import parse_job

pytestmark = pytest.mark.unit
ROUTE = Route("qemu+tls://10.0.0.2/system", "10.0.0.2")
PLAIN = Contents(persistent=True, copied_disks=(), proved_shared=False, encrypted=True)
ALWAYS = Flag.PEER2PEER | Flag.PERSIST_DEST | Flag.UNDEFINE_SOURCE | Flag.TLS


def test_a_persistent_domain_moves_live_encrypted_and_for_good() -> None:
    request = build(MigrationOptions(method=Method.PRECOPY), ROUTE, PLAIN)
    assert request.flags == ALWAYS | Flag.LIVE
    assert request.parameters == {"migrate_uri": "tcp://10.0.0.2"}
    assert request.to_libvirtd == ROUTE.to_libvirtd


def test_a_source_that_can_is_held_back_from_the_switchover() -> None:
    request = build(MigrationOptions(method=Method.PRECOPY), ROUTE, PLAIN, held_mib_per_s=3)
    assert request.parameters["bandwidth.avail.switchover"] == 3


def test_a_transient_domain_is_defined_nowhere() -> None:
    cargo = PLAIN._replace(persistent=False, encrypted=False)
    assert build(MigrationOptions(method=Method.STOP), ROUTE, cargo).flags == Flag.PEER2PEER


@pytest.mark.parametrize(
    ("options", "more"),
    [
        (MigrationOptions(method=Method.POSTCOPY), Flag.POSTCOPY),
        (MigrationOptions(method=Method.HYBRID), Flag.POSTCOPY),
        (
            MigrationOptions(Method.PRECOPY, timeout_s=1, on_timeout=OnTimeout.POSTCOPY),
            Flag.POSTCOPY,
        ),
        (MigrationOptions(Method.PRECOPY, auto_converge=True), Flag.AUTO_CONVERGE),
        (MigrationOptions(Method.PRECOPY, channels=3), Flag.PARALLEL),
        (MigrationOptions(Method.PRECOPY, compression="zstd"), Flag.PARALLEL | Flag.COMPRESSED),
        (MigrationOptions(Method.PRECOPY, compression="xbzrle"), Flag.COMPRESSED),
        (
            MigrationOptions(Method.PRECOPY, channels=2, zero_copy=True),
            Flag.PARALLEL | Flag.ZEROCOPY,
        ),
        (MigrationOptions(Method.PRECOPY, abort_on_error=True), Flag.ABORT_ON_ERROR),
        # There is no copy whose writes could be waited for.
        (MigrationOptions(Method.PRECOPY, synchronous_writes=True), Flag(0)),
    ],
)
def test_each_option_has_its_flag(options: MigrationOptions, more: Flag) -> None:
    assert build(options, ROUTE, PLAIN).flags == ALWAYS | Flag.LIVE | more


def test_options_become_typed_parameters() -> None:
    options = MigrationOptions(
        Method.PRECOPY, bandwidth_bytes_per_s=100 * 10**6, compression="zstd", channels=4
    )
    route = Route("qemu+tls://[fd00::2]/system", "fd00::2", 50000, 50001)
    cargo = PLAIN._replace(copied_disks=("vda", "vdb"), proved_shared=True)
    request = build(options, route, cargo)
    assert request.parameters == {
        "migrate_uri": "tcp://[fd00::2]:50000",
        "disks_uri": "tcp://[fd00::2]:50001",
        "migrate_disks": ["vda", "vdb"],
        "bandwidth": 95,
        "parallel.connections": 4,
        "compression": ["zstd"],
    }
    assert Flag.NON_SHARED_DISK in request.flags
    assert Flag.UNSAFE in request.flags


def test_every_option_of_virsh_becomes_what_virsh_makes_of_it() -> None:
    options = MigrationOptions(
        Method.HYBRID,
        auto_converge=True,
        throttle_initial_percent=30,
        throttle_increment_percent=15,
        compression="xbzrle",
        xbzrle_cache_bytes=1 << 20,
        postcopy_bandwidth_bytes_per_s=10**7,
        tls_name="b.example",
        at_target=AtTarget("web2", "<domain/>", "<domain id='2'/>", "vnc://b"),
    )
    assert build(options, ROUTE, PLAIN).parameters == {
        "migrate_uri": "tcp://10.0.0.2",
        "auto_converge.initial": 30,
        "auto_converge.increment": 15,
        "compression": ["xbzrle"],
        "compression.xbzrle.cache": 1 << 20,
        "bandwidth.postcopy": 9,
        "tls.destination": "b.example",
        "destination_name": "web2",
        "destination_xml": "<domain/>",
        "persistent_xml": "<domain id='2'/>",
        "graphics_uri": "vnc://b",
    }
    level = MigrationOptions(Method.PRECOPY, compression="zlib", compression_level=0)
    assert build(level, ROUTE, PLAIN).parameters["compression.zlib.level"] == 0


def test_copied_disks_stay_sparse_and_may_be_written_through() -> None:
    cargo = PLAIN._replace(copied_disks=("vda",), detects_zeroes=True)
    request = build(MigrationOptions(Method.PRECOPY, synchronous_writes=True), ROUTE, cargo)
    assert request.parameters["migrate_disks_detect_zeroes"] == ["vda"]
    assert Flag.NON_SHARED_DISK | Flag.NON_SHARED_SYNCHRONOUS_WRITES in request.flags


def test_of_a_domain_that_is_off_nothing_is_sent_that_could_be_limited_or_encrypted() -> None:
    assert not list(off_checks(MigrationOptions(offline=True)))
    asked = MigrationOptions(offline=True, bandwidth_bytes_per_s=MIB, tls_name="b.example")
    found = list(off_checks(asked))
    assert [check.verdict for check in found] == [REFUSE, REFUSE]
    assert [check.remedy for check in found] == [
        "leave out --bandwidth", "leave out --tls-destination",
    ]  # fmt: skip


def test_parameters_have_the_names_that_libvirt_gives_them() -> None:
    import libvirt

    known = {
        getattr(libvirt, name) for name in dir(libvirt) if name.startswith("VIR_MIGRATE_PARAM_")
    }
    options = MigrationOptions(
        Method.POSTCOPY, 1, 1, auto_converge=True, throttle_initial_percent=1,
        throttle_increment_percent=1, compression="xbzrle", xbzrle_cache_bytes=1, tls_name="b",
        postcopy_bandwidth_bytes_per_s=1, channels=1, at_target=AtTarget("a", "b", "c", "d"),
    )  # fmt: skip
    told = build(options, ROUTE, PLAIN._replace(copied_disks=("vda",))).parameters
    assert set(told) <= known


def test_libvirts_numbers_are_libvirts() -> None:
    import libvirt

    for flag in Flag:
        assert flag == getattr(libvirt, f"VIR_MIGRATE_{flag.name}")
    for state in flags.DomainState:
        assert state == getattr(libvirt, f"VIR_DOMAIN_{state.name}")
    for running in flags.RunningReason:
        assert running == getattr(libvirt, f"VIR_DOMAIN_RUNNING_{running.name}")
    for paused in flags.PausedReason:
        assert paused == getattr(libvirt, f"VIR_DOMAIN_PAUSED_{paused.name}")
    for code in flags.ErrorCode:
        assert code == getattr(libvirt, f"VIR_ERR_{code.name}")
    for undefine in flags.Undefine:
        assert undefine == getattr(libvirt, f"VIR_DOMAIN_UNDEFINE_{undefine.name}")
    for event in flags.EventId:
        assert event == getattr(libvirt, f"VIR_DOMAIN_EVENT_ID_{event.name}")


STATS = {
    "type": 2,
    "memory_iteration": 3,
    "memory_total": 256 * MIB,
    "memory_remaining": 16 * MIB,
    "memory_processed": 200 * MIB,
    "memory_bps": 50 * MIB,
    "memory_dirty_rate": 1024,
    "memory_page_size": 4096,
    "auto_converge_throttle": 20,
    "downtime": 120,
}


def test_a_jobs_figures_become_progress() -> None:
    job = parse_job(STATS)
    seen = progress(job, 1.5, postcopy=False)
    assert (seen.status, seen.round, seen.remaining_bytes) == ("active", 3, 16 * MIB)
    assert seen.dirty_rate_bytes_per_s == 4 * MIB
    assert seen.expected_downtime_ms == 120
    assert seen.throttle_percent == 20
    assert seen.eta_s == pytest.approx(16 / 46)
    assert progress(job, 1.5, postcopy=True).status == "postcopy-active"


def test_before_the_second_round_rates_mean_nothing() -> None:
    seen = progress(parse_job(STATS | {"memory_iteration": 1}), 0.0, postcopy=False)
    assert seen.dirty_rate_bytes_per_s == 0
    assert seen.expected_downtime_ms is None


def test_while_disks_are_copied_the_figures_are_theirs() -> None:
    job = parse_job({"type": 2, "disk_total": 100, "disk_remaining": 60, "disk_bps": 20})
    seen = progress(job, 0.0, postcopy=False)
    assert (seen.status, seen.transferred_bytes, seen.remaining_bytes) == ("mirror", 40, 60)
    assert seen.eta_s == 3


def test_no_job_is_not_active() -> None:
    assert not parse_job({"type": 0}).active
    assert parse_job({}).downtime_ms is None


def test_what_libvirt_cannot_do_is_refused_or_said() -> None:
    [refused] = option_checks(MigrationOptions(Method.POSTCOPY, channels=2))
    assert refused.verdict == REFUSE
    throttle = Policy((PolicyRule(3, Act.THROTTLE, 10, most_percent=50),))
    [slowing] = option_checks(MigrationOptions(Method.PRECOPY, policy=throttle))
    assert (slowing.verdict, "auto-converge" in slowing.remedy) == (REFUSE, True)
    for option, wrong in {
        "--zerocopy": MigrationOptions(zero_copy=True),
        "--zerocopy: a compressed page": MigrationOptions(zero_copy=True, compression="zstd"),
        "--parallel": MigrationOptions(compression="xbzrle", channels=2),
        "--postcopy-bandwidth": MigrationOptions(
            Method.PRECOPY, postcopy_bandwidth_bytes_per_s=MIB
        ),
    }.items():
        [no] = option_checks(wrong)
        assert (no.verdict, no.reason.startswith(option)) == (REFUSE, True)
    fine = MigrationOptions(
        Method.POSTCOPY, postcopy_bandwidth_bytes_per_s=MIB, compression="xbzrle"
    )
    assert not list(option_checks(fine))
    [rounded] = option_checks(MigrationOptions(bandwidth_bytes_per_s=100 * 10**6))
    assert (rounded.code, rounded.verdict) == ("bandwidth", WARN)
    assert "95 MiB/s" in rounded.reason
    assert not list(option_checks(replace(MigrationOptions(), bandwidth_bytes_per_s=10 * MIB)))


def test_qemus_certificates_are_where_qemu_conf_says() -> None:
    assert str(certificate_dir("")) == "/etc/pki/qemu"
    general = '# default_tls_x509_cert_dir = "/no"\ndefault_tls_x509_cert_dir = "/a"\n'
    assert str(certificate_dir(general)) == "/a"
    assert str(certificate_dir(general + 'migrate_tls_x509_cert_dir = "/b"')) == "/b"


def test_the_users_of_qemu_stand_in_the_capabilities() -> None:
    label = "<baselabel type='kvm'>+64055:+64055</baselabel>"
    dac = f"<secmodel><model>dac</model>{label}</secmodel>"
    other = "<secmodel><model>apparmor</model><baselabel>x</baselabel></secmodel>"
    text = f"<capabilities><host>{other}{dac}</host></capabilities>"
    assert qemu_users(text) == {64055}


def test_qemu_conf_is_read_in_time_that_grows_with_its_length() -> None:
    began_s = time.process_time()
    for line in ("\n", 'a = "\n'):
        assert str(certificate_dir(line * 20_000)) == "/etc/pki/qemu"
    assert time.process_time() - began_s < 3
