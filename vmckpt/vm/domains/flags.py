"""Names for the libvirt constants that vmckpt uses: its ABI, so no import is needed."""

from enum import IntEnum, IntFlag


class MigrateFlag(IntFlag):
    """virDomainMigrateFlags."""

    LIVE = 1 << 0
    PEER2PEER = 1 << 1
    PERSIST_DEST = 1 << 3
    UNDEFINE_SOURCE = 1 << 4
    NON_SHARED_DISK = 1 << 6
    UNSAFE = 1 << 9
    OFFLINE = 1 << 10
    COMPRESSED = 1 << 11
    ABORT_ON_ERROR = 1 << 12
    AUTO_CONVERGE = 1 << 13
    POSTCOPY = 1 << 15
    TLS = 1 << 16
    PARALLEL = 1 << 17
    NON_SHARED_SYNCHRONOUS_WRITES = 1 << 18
    ZEROCOPY = 1 << 20


class DomainState(IntEnum):
    """virDomainState."""

    NOSTATE = 0
    RUNNING = 1
    BLOCKED = 2
    PAUSED = 3
    SHUTDOWN = 4
    SHUTOFF = 5
    CRASHED = 6
    PMSUSPENDED = 7


class RunningReason(IntEnum):
    """virDomainRunningReason, as far as migrations and restores cause it."""

    RESTORED = 3
    POSTCOPY = 10
    POSTCOPY_FAILED = 11


class PausedReason(IntEnum):
    """virDomainPausedReason, as far as migrations cause it."""

    MIGRATION = 2
    STARTING_UP = 11
    POSTCOPY = 12
    POSTCOPY_FAILED = 13


class ErrorCode(IntEnum):
    """virErrorNumber, as far as vmckpt handles it."""

    INTERNAL_ERROR = 1
    NO_SUPPORT = 3
    INVALID_CONN = 6
    SYSTEM_ERROR = 38
    RPC = 39
    NO_DOMAIN = 42
    AUTH_FAILED = 45
    OPERATION_INVALID = 55
    OPERATION_TIMEOUT = 68  # another job holds the domain's lock
    AUTH_CANCELLED = 79
    AGENT_UNRESPONSIVE = 86
    AUTH_UNAVAILABLE = 94
    AGENT_UNSYNCED = 97


class Undefine(IntFlag):
    """virDomainUndefineFlagsValues: keep a domain's files, forget its snapshots."""

    SNAPSHOTS_METADATA = 1 << 1
    KEEP_NVRAM = 1 << 3
    TPM = 1 << 5
    KEEP_TPM = 1 << 6


class Stats(IntFlag):
    """virDomainStatsTypes."""

    DIRTYRATE = 1 << 9


class DirtyRateStatus(IntEnum):
    """virDomainDirtyRateStatus."""

    UNSTARTED = 0
    MEASURING = 1
    MEASURED = 2


class Xml(IntFlag):
    """virDomainXMLFlags."""

    SECURE = 1 << 0
    INACTIVE = 1 << 1
    MIGRATABLE = 1 << 3


class EventId(IntEnum):
    """virDomainEventID, as far as vmckpt subscribes."""

    JOB_COMPLETED = 21
