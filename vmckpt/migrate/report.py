"""The report of a successful migration."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MigrationReport:
    """The outcome. `method` is what QEMU really did; `requested_method` what you asked for.

    `downtime_ms` is QEMU's own figure; `guest_downtime_ms` the longest silence of the guest as seen
    from outside, `guest_silent_ms` the sum of silences over 20 ms, `guest_downtime_by` how: by its
    "heartbeats", or by "arp" probes every 5 ms from its source; None if neither was possible. With
    these it is too short by at most `guest_downtime_too_short_ms`.
    `encryption` is "x509", "psk" or "off"; `channels` is the number that memory was sent over.
    `blocktime_ms` is post-copy's: how long vCPUs waited for pages on the destination.
    `device_bytes` is the content of passed-through devices, saved in `device_out_s`;
    `device_back_s` is the time from plugging in others until the jobs continue.
    """

    run: str
    vm: str
    source: str
    target: str
    requested_method: str
    method: str
    encryption: str
    outcome: str
    total_time_s: float
    transfer_time_s: float
    downtime_ms: int | None
    guest_downtime_ms: float | None
    guest_silent_ms: float | None
    heartbeats_lost: int | None
    blocktime_ms: int | None
    transferred_bytes: int
    rounds: int
    warnings: tuple[str, ...]
    run_record: str
    channels: int = 1
    device_bytes: int = 0
    device_out_s: float = 0.0
    device_back_s: float = 0.0
    guest_downtime_by: str | None = None
    guest_downtime_too_short_ms: float | None = None
