"""The limits of a planned migration: which are tried, and what QEMU is given of them."""

from dataclasses import replace

from vmckpt.forecast.migrated_by import VMCKPT, MigratedBy
from vmckpt.forecast.model.choose import Intent
from vmckpt.forecast.model.forecast import MigrationLimits, TransferMode
from vmckpt.forecast.model.link import LinkModel
from vmckpt.forecast.model.rounds import NOT_HELD, SwitchoverHold
from vmckpt.options.migration import DEFAULT_CHANNELS, USUAL_DOWNTIME_MS, MigrationOptions
from vmckpt.options.policy import Act, Policy, PolicyRule
from vmckpt.qemu.abilities import auto_converge

# The fraction of an allowed downtime that is kept in reserve for deviations from the forecast.
PAUSE_MARGIN = 0.2
# The downtime limits to try when longer ones violate the intent.
STEPS_MS = tuple(sorted((base * 10**n for n in range(6) for base in (1, 2, 5)), reverse=True))
# How to help a planned pre-copy that makes no progress, see `within`.
STALLS, THROTTLE_STEP_PERCENT, DOWNTIME_STEP_PERCENT = 3, 10, 50


def limits(
    meant: MigrationOptions, by: MigratedBy = VMCKPT, held: SwitchoverHold = NOT_HELD
) -> MigrationLimits:
    """The limits that QEMU will be given, by that program."""
    if not by.throttles:
        meant = replace(meant, most_throttle_percent=None)
    throttle = auto_converge(meant.settings())["max-cpu-throttle"] / 100
    bandwidth, unit = meant.bandwidth_bytes_per_s, by.bandwidth_unit
    if bandwidth:
        bandwidth = max(bandwidth // unit, 1) * unit
    channels = meant.requested_channels or DEFAULT_CHANNELS
    downtime_s = meant.max_downtime_ms / 1e3
    return MigrationLimits(downtime_s, float(bandwidth), channels, throttle, held)


def within(most_downtime_ms: int | None, most_throttle_percent: int | None) -> Policy | None:
    """The policy for a planned pre-copy that makes no progress: all that is allowed, in steps."""
    slower, longer_ms = most_throttle_percent or 0, most_downtime_ms or 0
    rules = (
        PolicyRule(STALLS, Act.THROTTLE, THROTTLE_STEP_PERCENT, most_percent=slower),
        PolicyRule(STALLS, Act.RAISE_DOWNTIME, DOWNTIME_STEP_PERCENT, most_ms=longer_ms),
    )
    allowed = Policy(rules).within(longer_ms, slower)
    return allowed if allowed.rules else None


def limits_ms(
    mode: TransferMode, options: MigrationOptions, intent: Intent, link: LinkModel
) -> tuple[int, ...]:
    """The downtime limits to try: the usual one, as much as the intent allows, shorter ones.

    Methods that stop the guest first, or hardly at all, use no limit.
    """
    if intent.max_downtime_s is None or mode in (TransferMode.STOP, TransferMode.POSTCOPY):
        return (options.max_downtime_ms,)
    for_pages_s = intent.max_downtime_s * (1 - PAUSE_MARGIN) - link.switch_s
    most_ms = max(1, round(1e3 * for_pages_s))
    shorter = (step_ms for step_ms in STEPS_MS if step_ms < most_ms)
    return tuple(dict.fromkeys((min(most_ms, USUAL_DOWNTIME_MS), most_ms, *shorter)))
