"""The users of a host's VMs: a range of uids that nothing else uses."""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

# Below are uids of the system and of regular users; above are uids that the kernel and systemd use.
LEAST_FIRST, MOST_LAST = 100_000, 2_147_483_647
# A VM's uid follows from its identity: among a thousand VMs two rarely collide in a range of this
# size.
LEAST_USERS = 65_536
_RANGE = re.compile(r"(\d{1,10})-(\d{1,10})")
_NUMBER = re.compile(r"[0-9]{1,10}")


class Uids(NamedTuple):
    """A range, both ends included; the ends are groups of all VMs of the host, and no VM's user."""

    first: int
    last: int

    def __str__(self) -> str:
        """In the format of `--vm-uids`."""
        return f"{self.first}-{self.last}"

    def __contains__(self, number: object) -> bool:
        """Whether it is a group of all VMs, or may be a VM's."""
        return isinstance(number, int) and self.first <= number <= self.last


def make_uids(first: int, last: int) -> Uids:
    """The range. Raises ValueError."""
    if not LEAST_FIRST <= first < last <= MOST_LAST:
        raise ValueError(f"{first}-{last} is not between {LEAST_FIRST} and {MOST_LAST}")
    if last - first + 1 < LEAST_USERS:
        raise ValueError(f"{first}-{last} has fewer than {LEAST_USERS} uids")
    return Uids(first, last)


def parse_uids(text: str) -> Uids:
    """The inverse of `str`. Raises ValueError."""
    if not (found := _RANGE.fullmatch(text)):
        raise ValueError(f"'{text}' is not a range, FIRST-LAST")
    return make_uids(int(found[1]), int(found[2]))


def users_among(uids: Uids, accounts: str) -> Iterator[str]:
    """Names in a passwd(5) or group(5) file whose number is in the range. Pure."""
    for line in accounts.splitlines():
        words = line.split(":")
        if len(words) > 2 and _NUMBER.fullmatch(words[2]) and int(words[2]) in uids:
            yield f"{words[0]} ({words[2]})"


def ranges_among(uids: Uids, subordinate: str) -> Iterator[str]:
    """Lines of a subuid(5) or subgid(5) file that overlap the range. Pure."""
    for line in subordinate.splitlines():
        words = line.split(":")
        if len(words) == 3 and all(map(_NUMBER.fullmatch, words[1:])):
            first, count = int(words[1]), int(words[2])
            if first <= uids.last and uids.first < first + count:
                yield f"{words[0]} ({first}-{first + count - 1})"


def taken(uids: Uids, accounts: Sequence[str], subordinate: Sequence[str]) -> list[str]:
    """Existing owners of a part of a range intended for VMs. Pure."""
    found = [name for text in accounts for name in users_among(uids, text)]
    found += [name for text in subordinate for name in ranges_among(uids, text)]
    return list(dict.fromkeys(found))
