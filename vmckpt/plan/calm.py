"""Is this moment a trough of the guest's own load?"""

from collections.abc import Sequence

# Before so many looks nobody knows what is little for this guest.
LEAST_LOOKS = 5
# Calm: among the lowest quarter of all looks, within this part.
QUARTER, ALIKE = 0.25, 1.1


def is_calm(rates: Sequence[float]) -> bool:
    """Whether the last of the dirty rates, oldest first, is among the lowest quarter of them."""
    if len(rates) < LEAST_LOOKS:
        return False
    lowest = sorted(rates)[: max(1, int(QUARTER * len(rates)))]
    return rates[-1] <= lowest[-1] * ALIKE
