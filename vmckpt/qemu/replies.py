"""QEMU's answers as typed values. No dicts beyond this module."""

from typing import NamedTuple, Self

from vmckpt.qemu.shapes import MigrationInfo, MigrationRam, SocketAddress
from vmckpt.units import whole_number

ENDED_STATES = frozenset({"completed", "failed", "cancelled"})
# What QEMU 11.1 says of a downtime that it has not estimated yet.
_NOT_EXPECTED = (1 << 63) - 1
POSTCOPY_STATES = frozenset(
    {"postcopy-active", "postcopy-paused", "postcopy-recover", "postcopy-recover-setup"}
)


class QemuVersion(NamedTuple):
    """QEMU's own version, e.g. 10.0.2."""

    major: int
    minor: int
    micro: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.micro}"


class RunState(NamedTuple):
    """query-status: `status` is QEMU's RunState; `running` is true when vCPUs run."""

    status: str
    running: bool


class MigrationStatus(NamedTuple):
    """query-migrate on either side. Absent fields are zero or None.

    `status` is "none" before the first migration. `round` is QEMU's dirty-sync-count.
    `dirty_rate_bytes_per_s` and `expected_downtime_ms` are meaningless before round 2. On the
    destination only `status` (and in post-copy the blocktime) are set.
    """

    status: str
    error: str = ""
    downtime_ms: int | None = None
    expected_downtime_ms: int | None = None
    total_bytes: int = 0
    remaining_bytes: int = 0
    transferred_bytes: int = 0
    throughput_bytes_per_s: float = 0.0
    dirty_rate_bytes_per_s: float = 0.0
    round: int = 0
    throttle_percent: int = 0
    postcopy_requests: int = 0
    normal_pages: int = 0
    zero_pages: int = 0
    blocktime_ms: int | None = None
    port: int | None = None
    blockers: tuple[str, ...] = ()

    @property
    def ended(self) -> bool:
        """This migration has ended: it will not change."""
        return self.status in ENDED_STATES

    @property
    def in_postcopy(self) -> bool:
        """The destination runs and the source only serves pages: neither can continue alone."""
        return self.status in POSTCOPY_STATES

    @classmethod
    def parse(cls, reply: MigrationInfo) -> Self:
        """From query-migrate's answer."""
        ram: MigrationRam = reply.get("ram", {})
        page_bytes = ram.get("page-size", 4096)
        expected = reply.get("expected-downtime")
        return cls(
            status=reply.get("status", "none"),
            error=reply.get("error-desc", ""),
            downtime_ms=reply.get("downtime"),
            expected_downtime_ms=None if expected == _NOT_EXPECTED else expected,
            total_bytes=ram.get("total", 0),
            remaining_bytes=ram.get("remaining", 0),
            transferred_bytes=ram.get("transferred", 0),
            throughput_bytes_per_s=ram.get("mbps", 0.0) * 1e6 / 8,
            dirty_rate_bytes_per_s=float(ram.get("dirty-pages-rate", 0) * page_bytes),
            round=ram.get("dirty-sync-count", 0),
            throttle_percent=reply.get("cpu-throttle-percentage", 0),
            postcopy_requests=ram.get("postcopy-requests", 0),
            normal_pages=ram.get("normal", 0),
            zero_pages=ram.get("duplicate", 0),
            blocktime_ms=reply.get("postcopy-blocktime"),
            port=_port(reply.get("socket-address", [])),
            blockers=tuple(reply.get("blocked-reasons", ())),
        )


def _port(addresses: list[SocketAddress]) -> int | None:
    for address in addresses:
        port = whole_number(address.get("port") or "", 65535)
        if address.get("type") == "inet" and port is not None:
            return port
    return None


class Cpu(NamedTuple):
    """One vCPU: its QOM path and host thread."""

    thread_id: int
    qom_path: str


class MachineType(NamedTuple):
    """A machine type this QEMU offers; `alias` is its short name ("q35"), if any."""

    name: str
    alias: str | None = None


class QemuJob(NamedTuple):
    """query-jobs: a snapshot or block job. `error` is set only if it failed."""

    id: str
    type: str
    status: str
    done: int
    total: int
    error: str | None

    @property
    def concluded(self) -> bool:
        """Ended, successfully or not; waits to be dismissed."""
        return self.status == "concluded"


class Snapshot(NamedTuple):
    """One internal snapshot in a qcow2 image. `state_bytes` > 0 if it contains the VM's memory."""

    name: str
    id: str
    state_bytes: int
    taken_unix_s: int
    guest_clock_s: float


class BlockNode(NamedTuple):
    """One block node that the VM opened by name."""

    node_name: str
    snapshots: tuple[Snapshot, ...]
