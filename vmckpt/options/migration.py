"""What the operator may ask of a migration."""

from dataclasses import asdict, dataclass
from enum import StrEnum

from vmckpt.options.policy import Policy
from vmckpt.qemu.abilities import XBZRLE, Wish

# The largest downtime-limit QEMU takes: with it the VM is stopped at the first look.
UNLIMITED_DOWNTIME_MS = 2_000_000
DEFAULT_CHANNELS = 2
# Of the bandwidth the disks being copied keep this part, together, while memory moves too.
DISKS_SHARE = 4


class Method(StrEnum):
    """How RAM moves.

    auto: pre-copy with auto-converge, which slows a guest that dirties faster than the link rather
    than risk it; stop where the source cannot track dirty pages. hybrid: pre-copy, post-copy when
    it will not converge. stop: the VM is stopped first and runs again when all of its RAM is there.
    """

    AUTO = "auto"
    PRECOPY = "precopy"
    POSTCOPY = "postcopy"
    HYBRID = "hybrid"
    STOP = "stop"


class OnTimeout(StrEnum):
    """What to do when the time is up: give up, post-copy, or stop the VM and send the rest."""

    ABORT = "abort"
    POSTCOPY = "postcopy"
    PAUSE = "pause"


class Tls(StrEnum):
    """Whether memory and disks travel encrypted.

    auto: by the hosts' certificates; in clear only between hosts of one machine that have none; as
    psk where QEMUs have users of their own. require: by certificates or not at all. psk: by a key
    made for this migration alone, which goes to both hosts the way commands do. off: in clear.
    """

    AUTO = "auto"
    REQUIRE = "require"
    PSK = "psk"
    OFF = "off"


class Disks(StrEnum):
    """What the disks are: auto finds out which both hosts share, and copies the others."""

    AUTO = "auto"
    SHARED = "shared"
    COPY = "copy"


@dataclass(frozen=True, slots=True)
class AtTarget:
    """How a domain of libvirt's is to be at the target: None is as it is at the source.

    Its name; its XML, while it runs there and when it starts the next time; where its display is.
    """

    name: str | None = None
    xml: str | None = None
    persistent_xml: str | None = None
    graphics_uri: str | None = None

    @property
    def asked(self) -> tuple[str, ...]:
        """The options that asked for it, by their names."""
        said = {"--dname": self.name, "--xml": self.xml, "--persistent-xml": self.persistent_xml,
                "--graphicsuri": self.graphics_uri}  # fmt: skip
        return tuple(option for option, value in said.items() if value is not None)

    def told(self) -> dict[str, object]:
        """For a record: XML may hold passwords, and does not go into it."""
        return {**asdict(self), "xml": self.xml is not None,
                "persistent_xml": self.persistent_xml is not None}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Options:
    """A migration's request. A bandwidth of 0 means no limit.

    `timeout_passes` is a time limit too, in what sending all of memory once takes. A policy may
    raise the downtime to `most_downtime_ms` and slow the guest by `most_throttle_percent`, None: as
    it says. `observe_only`: it only says what it would do. `finish_within_s` was promised by a
    forecast: it ends nothing, and is told of when it is over. `in_turn`: of all that say so, one at
    a time sends from a host, or to one. `offline`: the VM is off, and stays so. `tls_name`: whom
    the target's certificate is for, None: its address. `synchronous_writes`: to disks being copied.
    """

    method: Method = Method.AUTO
    max_downtime_ms: int = 300
    bandwidth_bytes_per_s: int = 0
    timeout_s: float | None = None
    on_timeout: OnTimeout = OnTimeout.ABORT
    auto_converge: bool = False
    throttle_initial_percent: int | None = None
    throttle_increment_percent: int | None = None
    compression: str | None = None
    compression_level: int | None = None
    xbzrle_cache_bytes: int | None = None
    channels: int | None = None
    zero_copy: bool = False
    postcopy_bandwidth_bytes_per_s: int = 0
    disks: Disks = Disks.AUTO
    synchronous_writes: bool = False
    tls: Tls = Tls.AUTO
    tls_name: str | None = None
    abort_on_error: bool = False
    offline: bool = False
    at_target: AtTarget | None = None
    never_risk_postcopy: bool = False
    policy: Policy | None = None
    observe_only: bool = False
    timeout_passes: float | None = None
    most_downtime_ms: int | None = None
    most_throttle_percent: int | None = None
    finish_within_s: float | None = None
    in_turn: bool = False

    @property
    def may_postcopy(self) -> bool:
        """Whether the VM may come to run on the target before all of its RAM is there."""
        wants = self.method in (Method.POSTCOPY, Method.HYBRID)
        policy = None if self.observe_only else self.steers
        wants |= policy is not None and policy.may_postcopy
        return wants or (self.has_timeout and self.on_timeout is OnTimeout.POSTCOPY)

    @property
    def has_timeout(self) -> bool:
        """Whether the time can be up."""
        return self.timeout_s is not None or self.timeout_passes is not None

    @property
    def steers(self) -> Policy | None:
        """The policy that steers, within what was promised; only a pre-copy has one."""
        if self.policy is None or self.method not in (Method.AUTO, Method.PRECOPY):
            return None
        # Beside auto-converge, which slows it by a rule of its own.
        slower = 0 if self.auto_converge else self.most_throttle_percent
        return self.policy.within(self.most_downtime_ms, slower)

    @property
    def throttles_at_will(self) -> bool:
        """Whether QEMU has to be able to slow the guest at the policy's word."""
        policy = None if self.observe_only else self.steers
        return policy is not None and policy.may_throttle

    @property
    def wished_channels(self) -> int | None:
        """Parallel channels for memory: what is compressed goes over several, but for xbzrle."""
        by_itself = DEFAULT_CHANNELS if self.compression not in (None, XBZRLE) else None
        return self.channels or by_itself

    def wish(self, *, copies_disks: bool = False) -> Wish:
        """What this asks of the pair of QEMUs."""
        # With more than the least downtime pre-copy is done before post-copy can begin.
        downtime_ms = 1 if self.method is Method.POSTCOPY else self.max_downtime_ms
        share = self.bandwidth_bytes_per_s // DISKS_SHARE
        return Wish(
            postcopy=self.may_postcopy,
            auto_converge=self.auto_converge,
            throttle_at_will=self.throttles_at_will,
            most_throttle_percent=self.most_throttle_percent,
            throttle_initial_percent=self.throttle_initial_percent,
            throttle_increment_percent=self.throttle_increment_percent,
            channels=self.wished_channels,
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
