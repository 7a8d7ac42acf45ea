"""Waiting for a moment in which the guest dirties little memory."""

import time
from collections.abc import Awaitable, Callable, Sequence

from vmckpt.forecast.measure.dirty_rate import DirtyRate
from vmckpt.forecast.measure.last_measured import keep
from vmckpt.units import format_duration, format_rate

MEASURE_S = 2.0
# With fewer samples it is unknown what counts as little for this guest.
LEAST_SAMPLES = 5
# Calm: in the lowest quarter of all measurements, within this tolerance.
QUARTER, ALIKE = 0.25, 1.1


async def wait_for_calm(
    name: str,
    measure: Callable[[float], Awaitable[DirtyRate]],
    for_s: float,
    tell: Callable[[str], None],
) -> None:
    """Return when the guest dirties little by its own standards, at most after `for_s`.

    Keeps the last measurement. Reports the reason through `tell`. Raises what `measure` raises.
    """
    began_s, rates = time.monotonic(), list[float]()
    while time.monotonic() - began_s + MEASURE_S <= for_s:
        measured = await measure(MEASURE_S)
        keep(name, measured)
        rates.append(measured.working_set_bytes / measured.took_s)
        if is_calm(rates):
            most = format_rate(max(rates))
            tell(f"calm: '{name}' dirties {format_rate(rates[-1])}; its highest rate was {most}")
            return
    tell(f"no calm moment within {format_duration(for_s)}: continuing")


def is_calm(rates: Sequence[float]) -> bool:
    """Whether the last of the dirty rates (oldest first) is in their lowest quarter. Pure."""
    if len(rates) < LEAST_SAMPLES:
        return False
    lowest = sorted(rates)[: max(1, int(QUARTER * len(rates)))]
    return rates[-1] <= lowest[-1] * ALIKE
