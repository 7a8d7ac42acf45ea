"""The options of a migration, each declared once."""

from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from vmckpt.options import reading
from vmckpt.options.declared import About, also, changed_options, group, option
from vmckpt.options.policy import Policy

if TYPE_CHECKING:
    from vmckpt.qemu.abilities import WantedSettings

DEFAULT_CHANNELS = 2
USUAL_DOWNTIME_MS = 300
# The fraction of the bandwidth that all disks being copied keep together while memory is sent too.
DISKS_SHARE = 4


class Method(StrEnum):
    """How RAM moves.

    auto: pre-copy with auto-converge, which slows a guest that dirties faster than the link rather
    than risk it; stop where the source cannot track dirty pages. hybrid: pre-copy, post-copy when
    it will not converge. stop: the VM is stopped first and resumes once all of its RAM has arrived.
    """

    AUTO = "auto"
    PRECOPY = "precopy"
    POSTCOPY = "postcopy"
    HYBRID = "hybrid"
    STOP = "stop"


class OnTimeout(StrEnum):
    """What to do on timeout: give up, switch to post-copy, or stop the VM and send the rest."""

    ABORT = "abort"
    POSTCOPY = "postcopy"
    PAUSE = "pause"


class Tls(StrEnum):
    """Encryption of memory and disks.

    auto: with the hosts' certificates; unencrypted only between hosts of one machine without
    certificates; as psk where QEMUs have users of their own. require: with certificates, or
    refused. psk: with a key generated for this migration, sent to both hosts like commands. off:
    unencrypted.
    """

    AUTO = "auto"
    REQUIRE = "require"
    PSK = "psk"
    OFF = "off"


class Disks(StrEnum):
    """How to treat the disks: auto detects which ones both hosts share, and copies the others."""

    AUTO = "auto"
    SHARED = "shared"
    COPY = "copy"


class Compression(StrEnum):
    """How memory is compressed."""

    NONE = "none"
    ZSTD = "zstd"
    ZLIB = "zlib"
    XBZRLE = "xbzrle"

    @property
    def name_or_none(self) -> str | None:
        """QEMU's name for it; None: no compression."""
        return None if self is Compression.NONE else self.value


@dataclass(frozen=True, slots=True)
class AtTarget:
    """How a libvirt domain is changed at the destination: None keeps it as it is at the source.

    Its name; its XML, for the running domain and for its next start; its display's address.
    """

    name: str | None = option(
        None, "--dname NAME", "For libvirt domains: its name on the destination."
    )
    xml: str | None = option(
        None,
        "--xml FILE",
        "For libvirt domains: its XML on the destination.",
        typed=Path | None,
        read=reading.domain_xml,
    )
    persistent_xml: str | None = option(
        None,
        "--persistent-xml FILE",
        "For libvirt domains: its persistent XML on the destination.",
        typed=Path | None,
        read=reading.domain_xml,
    )
    graphics_uri: str | None = option(
        None,
        "--graphicsuri URI",
        "For libvirt domains: URI to which display clients reconnect.",
        about=About.MEMORY,
    )

    @property
    def flags(self) -> tuple[str, ...]:
        """The options that requested it, by name."""
        return tuple(one.flag for one in changed_options(self))

    def recorded(self) -> dict[str, object]:
        """For a record: XML may contain passwords, and is left out."""
        return {**asdict(self), "xml": self.xml is not None,
                "persistent_xml": self.persistent_xml is not None}  # fmt: skip


@dataclass(frozen=True, slots=True)
class MigrationOptions:
    """A migration's request. A bandwidth of 0 means no limit.

    `max_downtime_ms` is QEMU's limit, `allowed_downtime_ms` what a plan keeps; None: any downtime.
    `timeout_passes` is a time limit too, in multiples of the time that sending all of memory once
    takes. A policy may raise the downtime to `most_downtime_ms` and slow the guest by
    `most_throttle_percent`; None: as the policy says. `observe_only`: it only reports what it would
    do. `finish_within_s` was promised by a forecast: it aborts nothing, and exceeding it is
    reported. `in_turn`: of all migrations with it, one at a time sends from a host, or to one.
    `offline`: the VM is off, and stays off. `tls_name`: the name in the destination's certificate;
    None: its address. `synchronous_writes`: to disks being copied.
    """

    method: Method = option(
        Method.AUTO,
        "--method",
        "auto: pre-copy that throttles a guest which dirties memory faster than the link can "
        "carry it; hybrid: pre-copy, then post-copy if it does not converge; stop: the guest is "
        "paused while memory is sent.",
        about=About.MEMORY,
    )
    max_downtime_ms: int = option(
        USUAL_DOWNTIME_MS,
        "--max-downtime DURATION",
        "Maximum downtime. QEMU treats it as an estimate; a plan keeps it. [default: 300ms]",
        read=reading.downtime_ms,
        about=About.MEMORY,
    )
    allowed_downtime_ms: int | None = also(None, "max_downtime_ms", reading.downtime_ms)
    bandwidth_bytes_per_s: int = option(
        0,
        "--bandwidth --max-bandwidth RATE",
        "Maximum bandwidth, per second.",
        read=reading.rate_bytes_per_s,
    )
    timeout_s: float | None = option(
        None,
        "--timeout DURATION",
        "Time limit for memory, e.g. 5m; 5x: five times the duration of sending it once.",
        read=reading.timeout_s,
        about=About.MEMORY,
    )
    timeout_passes: float | None = also(None, "timeout_s", reading.timeout_passes)
    on_timeout: OnTimeout = option(
        OnTimeout.ABORT, "--on-timeout", "What to do when --timeout expires."
    )
    auto_converge: bool = option(
        False, "--auto-converge", "Throttle the guest until pre-copy converges.", about=About.MEMORY
    )
    throttle_initial_percent: int | None = option(
        None,
        "--auto-converge-initial PERCENT",
        "Initial throttling, in percent.",
        span=(1, 99),
        about=About.MEMORY | About.UNFORECAST,
    )
    throttle_increment_percent: int | None = option(
        None,
        "--auto-converge-increment PERCENT",
        "Throttling increment, in percent.",
        span=(1, 99),
        about=About.MEMORY | About.UNFORECAST,
    )
    compression: str | None = option(
        None,
        "--compress",
        "Compress memory: zstd or zlib over parallel channels; xbzrle sends only the "
        "differences of pages that were sent before.",
        typed=Compression,
        usual=Compression.NONE,
        read=lambda chosen: Compression(chosen).name_or_none,
        about=About.MEMORY,
    )
    compression_level: int | None = option(
        None,
        "--compress-level LEVEL",
        "Compression level: 0 to 20 for zstd, 0 to 9 for zlib.",
        span=(0, 20),
        about=About.UNFORECAST,
    )
    xbzrle_cache_bytes: int | None = option(
        None,
        "--xbzrle-cache SIZE",
        "Size of the xbzrle page cache, e.g. 512MiB.",
        read=reading.cache_bytes,
    )
    channels: int | None = option(
        None,
        "--parallel N",
        "Number of channels for memory.",
        span=(1, 64),
        about=About.MEMORY,
    )
    zero_copy: bool = option(
        False,
        "--zerocopy",
        "Send memory without copying it (with --parallel, unencrypted).",
        about=About.MEMORY | About.UNFORECAST,
    )
    postcopy_bandwidth_bytes_per_s: int = option(
        0,
        "--postcopy-bandwidth RATE",
        "Maximum bandwidth per second in post-copy for pages that the guest is not waiting for.",
        read=reading.rate_bytes_per_s,
        about=About.MEMORY | About.UNFORECAST,
    )
    abort_on_error: bool = option(
        False,
        "--abort-on-error",
        "Cancel the migration if QEMU stops the guest because of a disk error.",
        about=About.MEMORY,
    )
    never_risk_postcopy: bool = option(
        False, "--never-risk-postcopy", "Refuse everything that could switch to post-copy."
    )
    policy: Policy | None = option(
        None,
        "--policy FILE",
        "Policy file for rounds without progress (TOML).",
        typed=Path | None,
        read=reading.policy,
        about=About.MEMORY,
    )
    observe_only: bool = option(False, "--observe-only", "Only report what the policy would do.")
    disks: Disks = option(
        Disks.AUTO, "--disks", "auto: determine which disks both hosts share, and copy the others."
    )
    synchronous_writes: bool = option(
        False,
        "--synchronous-writes",
        "Writes to copied disks wait for the destination from the start.",
        about=About.MEMORY | About.UNFORECAST,
    )
    tls: Tls = option(
        Tls.AUTO,
        "--tls",
        "auto: with the hosts' certificates (`vmckpt pki`), unencrypted only between hosts of "
        "one machine without certificates; psk: with a key generated for this migration.",
    )
    tls_name: str | None = option(
        None,
        "--tls-destination NAME",
        "Name in the destination's certificate, if not its address.",
    )
    offline: bool = option(
        False,
        "--offline",
        "Migrate a VM that is off, with its disks according to --disks.",
        about=About.UNFORECAST,
    )
    at_target: AtTarget | None = group(AtTarget)
    # Set by forecasts and drains, not by an option.
    most_downtime_ms: int | None = None
    most_throttle_percent: int | None = None
    finish_within_s: float | None = None
    in_turn: bool = False

    @property
    def may_postcopy(self) -> bool:
        """Whether the VM may run on the destination before all of its RAM has arrived."""
        wants = self.method in (Method.POSTCOPY, Method.HYBRID)
        policy = None if self.observe_only else self.steers
        wants |= policy is not None and policy.may_postcopy
        return wants or (self.has_timeout and self.on_timeout is OnTimeout.POSTCOPY)

    @property
    def has_timeout(self) -> bool:
        """Whether there is a time limit."""
        return self.timeout_s is not None or self.timeout_passes is not None

    @property
    def steers(self) -> Policy | None:
        """The policy in effect, within what was promised; only a pre-copy has one."""
        if self.policy is None or self.method not in (Method.AUTO, Method.PRECOPY):
            return None
        # In addition to auto-converge, which slows it independently.
        slower = 0 if self.auto_converge else self.most_throttle_percent
        return self.policy.within(self.most_downtime_ms, slower)

    @property
    def throttles_at_will(self) -> bool:
        """Whether QEMU must be able to slow the guest when the policy says so."""
        policy = None if self.observe_only else self.steers
        return policy is not None and policy.may_throttle

    @property
    def requested_channels(self) -> int | None:
        """Parallel channels for memory: compressed memory uses several, except with xbzrle."""
        by_itself = DEFAULT_CHANNELS if self.compression not in (None, Compression.XBZRLE) else None
        return self.channels or by_itself

    def settings(self, *, copies_disks: bool = False) -> "WantedSettings":
        """The settings that this requests from the pair of QEMUs."""
        from vmckpt.qemu.abilities import WantedSettings

        # With a longer downtime limit pre-copy would complete before post-copy can begin.
        downtime_ms = 1 if self.method is Method.POSTCOPY else self.max_downtime_ms
        share = self.bandwidth_bytes_per_s // DISKS_SHARE
        return WantedSettings(
            postcopy=self.may_postcopy,
            auto_converge=self.auto_converge,
            throttle_at_will=self.throttles_at_will,
            most_throttle_percent=self.most_throttle_percent,
            throttle_initial_percent=self.throttle_initial_percent,
            throttle_increment_percent=self.throttle_increment_percent,
            channels=self.requested_channels,
            compression=self.compression,
            compression_level=self.compression_level,
            xbzrle_cache_bytes=self.xbzrle_cache_bytes,
            zero_copy=self.zero_copy,
            max_downtime_ms=downtime_ms,
            max_bandwidth_bytes_per_s=self.bandwidth_bytes_per_s - (share if copies_disks else 0),
            postcopy_bandwidth_bytes_per_s=self.postcopy_bandwidth_bytes_per_s,
            pause_before_switchover=copies_disks,
            hold_switchover=self.method not in (Method.STOP, Method.POSTCOPY),
        )
