"""Memory of a QEMU that is not its guest's RAM file: of graphics cards, and ROMs.

It has no file that another process could map, so it is read from the process. Its pages are found
together with those of the RAM file: in offsets behind the file's end.
"""

from collections.abc import Sequence

from vmckpt.memory.private.process_memory import addresses_of, laid_out, read_memory
from vmckpt.memory.ram_file import Span
from vmckpt.memory.runs import union


class OtherBlocks:
    """Spans of addresses in process `pid`, as one image: its offsets begin at `behind`."""

    def __init__(self, pid: int, spans: Sequence[Span], behind: int) -> None:
        self._pid, self._behind, self._written = pid, behind, list[Span]()
        self.mappings = laid_out(spans, behind)
        self.size_bytes = sum(end - start for start, end in spans)

    def noted(self, spans: list[Span]) -> list[Span]:
        """Note which of these are written pages of this image: they come last. Returns the rest."""
        last = len(spans)
        while last and spans[last - 1][0] >= self._behind:
            last -= 1
            start, end = spans[last]
            self._written.append((start - self._behind, end - self._behind))
        return spans[:last]

    def take_spans(self) -> list[Span]:
        """The spans of the image that were written since the last time, ascending, each once."""
        taken, self._written = self._written, []
        return list(union(taken, ()))

    def copy(self, spans: Sequence[Span]) -> bytes:
        """The current content of the spans, in sequence. Raises OSError."""
        offsets = ((self._behind + start, self._behind + end) for start, end in spans)
        return read_memory(self._pid, addresses_of(self.mappings, offsets))
