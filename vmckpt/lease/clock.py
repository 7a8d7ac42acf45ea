"""The clock for leases."""

import time


def boottime_s() -> float:
    """Seconds since this machine started, including suspend; cannot be set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
