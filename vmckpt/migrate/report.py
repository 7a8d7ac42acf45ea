"""What a migration that ended well was like."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MigrationReport:
    """The outcome. `method` is what QEMU really did; `requested_method` what was asked for.

    `downtime_ms` is QEMU's own figure; `guest_downtime_ms` the longest silence of the guest as seen
    from outside, `guest_silent_ms` the sum of silences over 20 ms: None without a listener.
    `encryption` is "x509", "psk" or "off"; `channels` are those that memory went over.
    `blocktime_ms` is post-copy's: how long vCPUs waited for pages on the target.
    `device_bytes` is what passed-through devices held, saved in `device_out_s`; `device_back_s` is
    from plugging others in until the jobs go on.
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
