"""Solves least squares with non-negative weights and optional upper bounds."""

import numpy as np

from sbpflow.costs.ids import Floats


def nonnegative_least_squares(
    x: Floats, y: Floats, rounds: int = 500, most: Floats | None = None
) -> Floats:
    """Return the w >= 0 with the least |x w - y|^2, by coordinate descent on the normal equations.

    ``most`` [columns] is the upper bound of the weights.
    """
    limit = np.full(x.shape[1], np.inf) if most is None else most
    gram, right = x.T @ x, x.T @ y
    diagonal = np.maximum(np.diag(gram), 1e-12)
    weights = np.zeros(x.shape[1])
    for _ in range(rounds):
        before = weights.copy()
        for place in range(len(weights)):
            step = (right[place] - gram[place] @ weights) / diagonal[place]
            weights[place] = min(max(0.0, weights[place] + step), limit[place])
        if np.abs(weights - before).max() <= 1e-9 * max(float(np.abs(weights).max()), 1e-9):
            break
    return weights
