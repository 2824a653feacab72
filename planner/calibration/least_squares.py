"""Least squares with weights that are not negative, and bounded where a bound is known."""

import numpy as np

from sbpflow.costs.ids import Floats


def nonnegative_least_squares(
    x: Floats, y: Floats, rounds: int = 500, most: Floats | None = None
) -> Floats:
    """The w >= 0 of least |x w - y|^2: coordinate by coordinate on the normal equations.

    ``most`` [columns] bounds them from above, too.
    """
    limit = np.full(x.shape[1], np.inf) if most is None else most
    gram, right = x.T @ x, x.T @ y
    diagonal = np.maximum(np.diag(gram), 1e-12)
    found = np.zeros(x.shape[1])
    for _ in range(rounds):
        before = found.copy()
        for place in range(len(found)):
            step = (right[place] - gram[place] @ found) / diagonal[place]
            found[place] = min(max(0.0, found[place] + step), limit[place])
        if np.abs(found - before).max() <= 1e-9 * max(float(np.abs(found).max()), 1e-9):
            break
    return found
