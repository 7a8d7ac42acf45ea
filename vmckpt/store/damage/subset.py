"""Select the packs whose content a check reads: all, a random share, or one of several parts."""

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from vmckpt.errors import UsageError

MOST_PARTS = 1000
_PART = re.compile(r"([0-9]{1,4})/([0-9]{1,4})")
_PERCENT = re.compile(r"([0-9]*\.?[0-9]+)%")


@dataclass(frozen=True, slots=True)
class Subset:
    """A percentage, drawn again each time; or one of several parts, with each pack always in the
    same one.
    """

    percent: float = 100.0
    part: int = 1
    parts: int = 1

    def choose(self, pack_ids: Sequence[bytes]) -> set[bytes]:
        """The packs whose content is to be read; with `percent` at least one."""
        if self.parts > 1:
            return {
                pack_id
                for pack_id in pack_ids
                if int.from_bytes(pack_id[:8]) % self.parts == self.part - 1
            }
        different = sorted(set(pack_ids))
        count = min(len(different), max(1, round(len(different) * self.percent / 100)))
        return set(random.sample(different, count))


EVERYTHING = Subset()


def part_of(percent: float, number: int) -> Subset:
    """The part after `number` others: consecutive checks read every part once."""
    parts = min(MOST_PARTS, max(1, math.ceil(100 / percent)))
    return Subset(part=number % parts + 1, parts=parts)


def parse_subset(text: str) -> Subset:
    """`5%`, or `2/7`: the second of seven parts. Raises UsageError."""
    if found := _PART.fullmatch(text):
        part, parts = map(int, found.groups())
        if 1 <= part <= parts <= MOST_PARTS:
            return Subset(part=part, parts=parts)
    if (found := _PERCENT.fullmatch(text)) and 0 < float(found[1]) <= 100:
        return Subset(percent=float(found[1]))
    raise UsageError(
        f"'{text}' is not part of a store",
        why=f"it is N%, more than 0 and up to 100, or n/t with n from 1 to t, t up to {MOST_PARTS}",
        remedy="write e.g. 5%, or 1/7 (tomorrow 2/7, and so on)",
    )
