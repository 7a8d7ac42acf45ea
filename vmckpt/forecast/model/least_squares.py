"""Non-negative least squares for a handful of unknowns. Pure."""

from collections.abc import Sequence
from itertools import combinations

# The coefficients of an equation, and its right side.
Row = tuple[Sequence[float], float]


def not_negative(rows: Sequence[Row], *, needed: set[int]) -> tuple[float, ...] | None:
    """The best non-negative solution, from all subsets of the unknowns.

    An unknown that `rows` cannot distinguish from the others is 0; None if nothing explains them
    with one of the `needed` in it.
    """
    size = len(rows[0][0]) if rows else 0
    scale = [max(abs(row[n]) for row, _ in rows) or 1.0 for n in range(size)]
    scaled = [(*(x / s for x, s in zip(row, scale, strict=True)), y) for row, y in rows]
    # Compute these products once, so that subsets need not read the rows again.
    products = [
        [sum(row[a] * row[b] for row in scaled) for b in range(size + 1)] for a in range(size + 1)
    ]
    best: tuple[float, dict[int, float]] | None = None
    for used in (c for n in range(1, size + 1) for c in combinations(range(size), n)):
        if not needed.intersection(used) or len(rows) < len(used):
            continue
        found = _solved([[products[a][b] for b in (*used, size)] for a in used])
        if found is None or min(found) < 0:
            continue
        explained = sum(x * products[a][size] for a, x in zip(used, found, strict=True))
        error = max(products[size][size] - explained, 0.0)
        if best is None or error < best[0] * (1 - 1e-9):
            best = (error, dict(zip(used, found, strict=True)))
    return best and tuple(best[1].get(n, 0.0) / scale[n] for n in range(size))


def _solved(matrix: list[list[float]]) -> list[float] | None:
    """The last column is the right side; None if the others cannot be distinguished."""
    size = len(matrix)
    for at in range(size):
        pivot = max(range(at, size), key=lambda n: abs(matrix[n][at]))
        if abs(matrix[pivot][at]) < 1e-6:
            return None
        matrix[at], matrix[pivot] = matrix[pivot], matrix[at]
        matrix[at] = [value / matrix[at][at] for value in matrix[at]]
        for other in range(size):
            if other != at:
                factor = matrix[other][at]
                matrix[other] = [
                    value - factor * own
                    for value, own in zip(matrix[other], matrix[at], strict=True)
                ]
    return [row[-1] for row in matrix]
