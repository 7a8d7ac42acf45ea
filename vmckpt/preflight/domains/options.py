"""Options for a domain's migration that libvirt lacks or implements differently."""

from collections.abc import Iterator

from vmckpt.options.migration import Method, MigrationOptions
from vmckpt.preflight.finding import REFUSE, WARN, Finding
from vmckpt.qemu.abilities import XBZRLE
from vmckpt.units import MIB
from vmckpt.vm.domains.connection import client_knows

# Each query passes through libvirtd to the sending QEMU, and costs it and the destination time. So
# query only as often as a display needs; more often if post-copy may come; and if it is to come at
# once, so often that a query comes before the end of a small guest's first pass.
SAMPLE_S, SAMPLE_POSTCOPY_S, SAMPLE_SOON_S = 0.5, 0.2, 0.05
# libvirt's client names for the options, from the version on that supports them.
LEVEL = "VIR_MIGRATE_PARAM_COMPRESSION_{}_LEVEL"


def option_checks(options: MigrationOptions) -> Iterator[Finding]:
    """What libvirt cannot do, and what it does differently. Pure."""
    if options.may_postcopy and options.requested_channels:
        reason = "post-copy and parallel channels cannot be combined"
        remedy = "leave out --parallel and --compress, or post-copy"
        yield Finding("qemu-option", REFUSE, reason, remedy)
    if options.zero_copy and options.compression:
        reason = "--zerocopy: a compressed page is a copy already"
        yield Finding("qemu-option", REFUSE, reason, "leave out --zerocopy or --compress")
    elif options.zero_copy and not options.requested_channels:
        reason = "--zerocopy: QEMU sends without copying over parallel channels alone"
        yield Finding("qemu-option", REFUSE, reason, "add --parallel 2")
    if options.compression == XBZRLE and options.channels:
        reason = "--parallel: QEMU cannot combine xbzrle with parallel channels"
        yield Finding("qemu-option", REFUSE, reason, "leave out --parallel")
    if options.postcopy_bandwidth_bytes_per_s and not options.may_postcopy:
        reason = "--postcopy-bandwidth: nothing here uses post-copy"
        yield Finding("qemu-option", REFUSE, reason, "leave out --postcopy-bandwidth")
    if options.throttles_at_will:
        reason = "libvirt throttles a guest by its own rule, not by a policy"
        remedy = 'leave out do = "throttle"; --auto-converge has libvirt slow it'
        yield Finding("qemu-option", REFUSE, reason, remedy)
    if options.auto_converge and options.most_throttle_percent is not None:
        reason = "libvirt's auto-converge has no upper limit: --max-slowdown holds by forecast only"
        yield Finding("qemu-option", WARN, reason, "leave out --auto-converge to be sure of it")
    for option, is_given in (
        ("--bandwidth", options.bandwidth_bytes_per_s),
        ("--postcopy-bandwidth", options.postcopy_bandwidth_bytes_per_s),
    ):
        rate = whole_mib(is_given)
        if is_given and is_given != rate * MIB:
            reason = f"libvirt limits the bandwidth by whole MiB/s: to {rate} MiB/s"
            yield Finding("bandwidth", WARN, reason, f"ask for {option} {rate}MiB/s")


def off_checks(options: MigrationOptions) -> Iterator[Finding]:
    """Options without meaning for a shut-off domain: only its definition is migrated. Pure."""
    for option, is_given in (
        ("--bandwidth", bool(options.bandwidth_bytes_per_s)),
        ("--tls-destination", options.tls_name is not None),
    ):
        if is_given:
            reason = f"{option}: of a domain that is off no memory moves, and no disk"
            yield Finding("qemu-option", REFUSE, reason, f"leave out {option}")


def client_checks(options: MigrationOptions) -> Iterator[Finding]:
    """Options for which this machine's libvirt client is too old."""
    level = LEVEL.format((options.compression or "").upper())
    if options.compression_level is not None and not client_knows(level):
        reason = "--compress-level: libvirt's client here (libvirt-python) is older than 9.1"
        yield Finding("qemu-option", REFUSE, reason, "leave it out, or upgrade libvirt-python")


def whole_mib(bandwidth_bytes_per_s: int) -> int:
    """In libvirt's unit: at most what was requested, but at least 1 MiB/s."""
    return max(1, bandwidth_bytes_per_s // MIB)


def sample_s(options: MigrationOptions) -> float:
    """How often libvirt is asked about a domain's migration while its memory is sent. Pure."""
    if options.method is Method.POSTCOPY:
        return SAMPLE_SOON_S
    return SAMPLE_POSTCOPY_S if options.may_postcopy else SAMPLE_S
