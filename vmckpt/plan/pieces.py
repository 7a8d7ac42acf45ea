"""What pages of each kind cost, told by pieces of moves instead of by whole ones. Pure.

Memory is not mixed: for a tenth of a second a migration sends little but zeroes, then little but
text. What whole moves of two or three guests cannot tell apart, a single one's looks do. It holds
where the target keeps up with the source: over several channels, where nobody touches zeroes there.
"""

from collections.abc import Mapping, Sequence

from vmckpt.plan.least_squares import Row, not_negative
from vmckpt.plan.link import Costs, Moved

# So many pieces tell more than their noise.
FEW_PIECES = 10


def costs_by_pieces(moves: Mapping[str, Sequence[Moved]]) -> dict[str, Costs]:
    """The costs of each way of sending that was asked for; none where too little was seen.

    They share what a page of zeroes is, a hole, and a page that compresses: it is the same code
    (multifd-zero-page.c). A piece is off by as much time however long it is.
    """
    kinds = tuple(moves)
    rows = list[Row]()
    for kind, these in moves.items():
        for one in these:
            for piece in one.pieces:
                pages = [piece.pages if kind == other else 0.0 for other in kinds]
                facts = (*pages, piece.squeezed, piece.zero_pages, piece.holes)
                scaled = tuple(fact * one.weight for fact in facts)
                rows.append((scaled, piece.took_s * one.weight))
    found = not_negative(rows, needed=set(range(len(kinds))))
    if found is None or len(rows) < FEW_PIECES:
        return {}
    *pages_s, squeezed_s, zero_s, hole_s = found
    return {
        kind: Costs(page_s, zero_s, 0.0, squeezed_s, hole_s)
        for kind, page_s in zip(kinds, pages_s, strict=True)
        if page_s > 0
    }
