"""Memory of a QEMU that is not its guest's RAM file: of graphics cards, and ROMs.

It has no file that another process could map, so it is read from the process. Its pages are found
together with those of the RAM file: in offsets behind the file's end.
"""

from collections.abc import Iterator, Sequence

from vmckpt.memory.dirty_pages import Mapping
from vmckpt.memory.private.process_memory import read_memory
from vmckpt.memory.ram_file import Span
from vmckpt.memory.runs import union


class OtherBlocks:
    """Spans of addresses in process `pid`, as one image: its offsets begin at `behind`."""

    def __init__(self, pid: int, spans: Sequence[Span], behind: int) -> None:
        self._pid, self._behind, self._written = pid, behind, list[Span]()
        self.mappings, at = list[Mapping](), behind
        for start, end in spans:
            self.mappings.append(Mapping(start, end, at))
            at += end - start
        self.size_bytes = at - behind

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
        return read_memory(self._pid, list(self._addresses(spans)))

    def _addresses(self, spans: Sequence[Span]) -> Iterator[Span]:
        """Where they are in the process."""
        for start, end in spans:
            for mapping in self.mappings:
                shift = mapping.start - (mapping.offset - self._behind)
                first, last = max(start + shift, mapping.start), min(end + shift, mapping.end)
                if first < last:
                    yield first, last
