"""A link that several migrations use at once: how much of it each gets."""

from collections.abc import Sequence


def fair_share(mine_bytes_per_s: int, others_bytes_per_s: Sequence[int]) -> int:
    """What a migration held to `mine` gets beside others that are held to theirs.

    Together they get the largest of these limits. It is divided evenly; what somebody may not use
    goes to the rest (max-min fairness). Nobody gets more than it asked for, and at least 1.
    """
    limits = sorted([mine_bytes_per_s, *others_bytes_per_s])
    rest, level = limits[-1], 0
    for number, limit in enumerate(limits):
        level = max(level, rest // (len(limits) - number))
        rest -= min(limit, level)
    return max(1, min(mine_bytes_per_s, level))
