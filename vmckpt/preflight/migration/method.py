"""What the chosen method and options risk or exclude, and which method "auto" selects."""

from collections.abc import Iterator
from dataclasses import replace

from vmckpt.options.migration import DEFAULT_CHANNELS, Method, MigrationOptions
from vmckpt.preflight.finding import REFUSE, WARN, Finding
from vmckpt.preflight.migration.encryption import Encryption, Scheme


def resolve_method(
    options: MigrationOptions, *, loses_pages: bool, splits_well: bool = False
) -> MigrationOptions:
    """The options with "auto" replaced by its choice. `splits_well`: see qemu/abilities."""
    if options.method is not Method.AUTO:
        return options
    if loses_pages:
        # A paused guest cannot be slowed, in one step or several.
        return replace(
            options,
            method=Method.STOP,
            throttle_initial_percent=None,
            throttle_increment_percent=None,
        )
    precopy = replace(options, method=Method.PRECOPY)
    if splits_well and _may_split(precopy):
        precopy = replace(precopy, channels=DEFAULT_CHANNELS)
    # A policy that slows the guest does so itself.
    return precopy if precopy.throttles_at_will else replace(precopy, auto_converge=True)


def _may_split(options: MigrationOptions) -> bool:
    """Whether several channels remain an option, and no requested option conflicts with them.

    With them QEMU keeps a bandwidth limit less exactly.
    """
    requested = options.channels, options.compression
    return requested == (None, None) and not (options.may_postcopy or options.bandwidth_bytes_per_s)


def postcopy_risk(options: MigrationOptions) -> Iterator[Finding]:
    """What post-copy risks, if it may be used."""
    if not options.may_postcopy:
        return
    risk = (
        "in post-copy the guest runs on the destination while part of its memory is still on the "
        "source: if the source dies then, the guest is lost"
    )
    if options.never_risk_postcopy:
        yield Finding("postcopy-risk", REFUSE, risk, "use --method precopy or stop")
    else:
        yield Finding("postcopy-risk", WARN, risk, "--never-risk-postcopy refuses it")


def encryption_checks(options: MigrationOptions, encryption: Encryption) -> Iterator[Finding]:
    """Options that encryption rules out, or that require it. Pure."""
    if options.zero_copy and encryption.scheme is not Scheme.UNENCRYPTED:
        reason = "--zerocopy: what is encrypted is a copy of the page already"
        remedy = "leave out --zerocopy, or in a network that you trust add --tls off"
        yield Finding("qemu-option", REFUSE, reason, remedy)
    if options.tls_name is not None and encryption.scheme is not Scheme.CERTIFICATES:
        reason = "--tls-destination: no certificate is shown, so it cannot be for that name"
        yield Finding("qemu-option", REFUSE, reason, "leave it out, or use --tls require")


def copy_checks(options: MigrationOptions, *, copies_disks: bool) -> Iterator[Finding]:
    """Options for disk copies when no disk is copied. Pure."""
    if options.synchronous_writes and not copies_disks:
        reason = "--synchronous-writes: no disk is copied, and no write waits"
        yield Finding("qemu-option", WARN, reason, "leave it out")


def domain_checks(options: MigrationOptions) -> Iterator[Finding]:
    """Options that apply only to libvirt domains. Pure."""
    if options.at_target is not None:
        flags = ", ".join(options.at_target.flags)
        reason = f"{flags}: only a domain of libvirt's arrives as another than it left"
        yield Finding("qemu-option", REFUSE, reason, f"leave out {flags}")
