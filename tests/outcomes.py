"""What came of faults: counted as they are tried, and printed when all were."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class Outcomes:
    """How often each outcome was, by what was done."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, ...]] = Counter()

    def add(self, *words: str) -> None:
        """What was done, in words, and last what came of it."""
        self._counts[words] += 1

    @contextmanager
    def printed(self, what: str) -> Iterator[None]:
        """Those of the block, after it; pytest shows them with -s."""
        self._counts.clear()
        yield
        print(f"\n{self._counts.total()} {what} and what came of them:")
        for (*done, outcome), count in sorted(self._counts.items()):
            print(f"  {count:4d}  {', '.join(done)}: {outcome}")
