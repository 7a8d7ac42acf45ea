"""Status of a replication service: its answer to every request, and its record on exit."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, Self

from vmckpt.codec import builtins, convert

# States in which a service has ended. A standby's: the guest runs there.
PROMOTED = "promoted"
ENDED = ("ended", PROMOTED)
# A primary's: a standby could take over. Either's: the first copy is not complete; its service was
# killed, or does not answer.
PROTECTED, COPYING, DEAD, SILENT = "protected", "copying", "dead", "silent"


class Role(StrEnum):
    """Which side of a replication a service is."""

    PRIMARY = "primary"
    STANDBY = "standby"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """One side's status.

    None: a field of the other role, not known yet, or not reported by that version of vmckpt. Units
    are in the names. docs/replicate.md explains the fields shown to users.
    """

    role: Role
    state: str
    vm: str | None = None
    run: str | None = None
    # Names of hosts.
    primary: str | None = None
    standby: str | None = None
    why: str | None = None
    # Why the arbiter does not answer; "": it does.
    arbiter_fails: str | None = None
    term: int | None = None
    # Of the connection and of the second path (`paths.py`).
    paths: dict[str, str] | None = None
    path_addresses: dict[str, tuple[str, str]] | None = None
    path_heard_ms_ago: dict[str, float | None] | None = None
    second_path_lacks: str | None = None

    # A primary's: how it ended (`primary/protection.py`), and what it was asked for.
    ending: str | None = None
    arbiter: str | None = None
    lease_s: float | None = None
    may_run: bool | None = None
    output_commit: bool | None = None
    epoch_ms: float | None = None
    epoch_is_auto: bool | None = None
    max_pause_ms: float | None = None
    tracker: str | None = None
    # Its figures (`primary/figures.py`, `primary/epochs.py`, `disks/mirrors.py`).
    sent_bytes: int | None = None
    disk_bytes: int | None = None
    disk_bytes_not_sent: int | None = None
    written_bytes_per_s: float | None = None
    link_bytes_per_s: float | None = None
    epochs: int | None = None
    epochs_per_s: float | None = None
    pause_p50_ms: float | None = None
    pause_p99_ms: float | None = None
    pause_worst_ms: float | None = None
    safe_after_p50_ms: float | None = None
    output_latency_p50_ms: float | None = None
    output_latency_p99_ms: float | None = None
    slowed_percent: float | None = None
    dirty_pages: int | None = None
    raw_bytes: int | None = None
    acknowledged_epoch: int | None = None
    lag_ms: float | None = None
    rpo_now_ms: float | None = None

    # A standby's.
    epoch: int | None = None
    complete: bool | None = None
    heard_ms_ago: float | None = None
    disk_bytes_applied: int | None = None
    received_bytes: int | None = None
    qemu_id: str | None = None
    primary_qemu_id: str | None = None
    # When the primary's end was noticed (CLOCK_BOOTTIME); then until the term was held and the
    # primary certainly dead, and from there until the guest ran.
    noticed_boottime_s: float | None = None
    fencing_ms: float | None = None
    took_over_ms: float | None = None

    @classmethod
    def from_json(cls, value: object) -> Self:
        """The status that parsed JSON holds. Raises MalformedError."""
        return convert(cls, value)

    def to_json(self) -> dict[str, Any]:
        """All known fields."""
        fields: dict[str, Any] = builtins(self)
        return {name: value for name, value in fields.items() if value is not None}

    @property
    def is_primary(self) -> bool:
        """Whether it is the primary's."""
        return self.role is Role.PRIMARY

    @property
    def has_ended(self) -> bool:
        """Whether the service exited by itself, and was not killed."""
        return self.state in ENDED

    @property
    def has_left(self) -> bool:
        """Whether a primary's last word is that its standby may have the guest, or has it."""
        return self.ending in ("yours", "replaced")

    @property
    def is_settled(self) -> bool:
        """Whether a primary's last word is that no standby may have the guest."""
        return self.ending in ("stopped", "alone", "guest_off", "lost", "off")


class ReplicationOutcome(NamedTuple):
    """The result of `start`, `failover` or `failback`.

    `status`: of the primary that protects the VM now, or of the standby that took it over.
    `guest_downtime_ms`: the longest silence of the guest's heartbeats, None if nothing
    listens for them.
    """

    status: ReplicaStatus
    warnings: tuple[str, ...] = ()
    guest_downtime_ms: float | None = None

    def to_json(self) -> dict[str, Any]:
        """For programs."""
        fields = self.status.to_json() | {"warnings": list(self.warnings)}
        if self.guest_downtime_ms is not None:
            fields["guest_downtime_ms"] = self.guest_downtime_ms
        return fields
