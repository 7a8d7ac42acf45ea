"""The clock that leases are measured by."""

import time


def boottime_s() -> float:
    """Seconds since this machine started, including suspend; cannot be set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
