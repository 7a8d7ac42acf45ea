"""A benchmark in pieces of a few minutes: each measurement is on disk as it is made.

A piece says of what commit it is, when it was, how much of the machine others used meanwhile, and
how it ended: one that was killed in the middle has what it had measured, and says so. A later piece
goes on where the last one stopped, of the same commit alone: of code that was changed and not
committed no one knows what it was, so there such pieces begin again.
"""

import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks.others import Others
from benchmarks.parts import Found, measured_before
from benchmarks.setting import REPOSITORY, machine, write_result

Row = dict[str, Any]
Piece = dict[str, Any]
# Others' use of the machine up to which a piece was alone on it: its times count.
ALONE_PERCENT = 10.0
CUT_OFF = "cut off"
_DIRTY = "-dirty"


class Pieces:
    """Those of one part of a benchmark, until there are `goal` rows in all or the time is over."""

    def __init__(self, name: str, part: str, *, goal: int, minutes: float, again: bool) -> None:
        self._name, self._part, self._goal = name, part, goal
        self._until_s = time.monotonic() + 60 * minutes
        self._commit = commit()
        before = measured_before(name).get(part, {}).get("pieces", [])
        self._before: list[Piece] = [] if again else same(before, self._commit)
        if left := sum(len(one["rows"]) for one in before) - self.count:
            print(f"{part}: {left} of before are forgotten: of another commit, or asked for anew")

    @property
    def count(self) -> int:
        """How many rows there are."""
        return sum(len(one["rows"]) for one in self._before)

    def wants_more(self) -> bool:
        """Whether one more is to be measured."""
        return self.count < self._goal and time.monotonic() < self._until_s

    @contextmanager
    def piece(self, mark: str) -> Iterator["Writing"]:
        """One more, for the block; processes of its own name `mark` in their command line."""
        piece: Piece = {
            "commit": self._commit,
            "began": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
            "ended": CUT_OFF,
            "rows": [],
        }
        self._before.append(piece)
        writing = Writing(self, piece, Others(mark))
        yield writing
        piece["ended"] = "all there" if self.count >= self._goal else "time over"
        writing.keep()

    def write(self) -> None:
        """All of it, beside the other parts."""
        found = measured_before(self._name) | {"machine": machine()}
        found[self._part] = {"pieces": self._before}
        write_result(self._name, found)


class Writing:
    """A piece that is being measured."""

    def __init__(self, pieces: Pieces, piece: Piece, others: Others) -> None:
        self._pieces, self._piece, self._others = pieces, piece, others

    def add(self, row: Row, **more: Any) -> None:
        """One more row; `more` is said of the piece as a whole. On disk when this returns."""
        self._piece["rows"].append(row)
        self._piece |= more
        self.keep()

    def keep(self) -> None:
        """Write down how it stands."""
        self._piece["others_use_percent"] = round(self._others.busy_percent(), 1)
        self._pieces.write()


def commit() -> str:
    """The one that runs; results that were written since are no change."""
    git = ["git", "-C", str(REPOSITORY)]
    name = _said([*git, "rev-parse", "--short", "HEAD"]) or "unknown"
    changes = [*git, "status", "--porcelain", "--", ".", ":(exclude)benchmarks/results"]
    return name + _DIRTY if _said(changes) else name


def same(pieces: Sequence[Piece], of: str) -> list[Piece]:
    """Those of the commit; none of one that is not known."""
    if of.endswith(_DIRTY):
        return []
    return [one for one in pieces if one["commit"] == of]


def rows(found: Found, part: str, *, alone: bool = False) -> list[Row]:
    """All rows of a part, or those of its pieces that were `alone` on the machine."""
    return [
        row
        for piece in found.get(part, {}).get("pieces", [])
        if not alone or piece["others_use_percent"] <= ALONE_PERCENT
        for row in piece["rows"]
    ]


def _said(argv: Sequence[str]) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=False).stdout.strip()
