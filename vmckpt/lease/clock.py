"""The clock that leases are measured by."""

import time


def boottime_s() -> float:
    """Seconds since this machine started, time asleep included; nobody sets it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
