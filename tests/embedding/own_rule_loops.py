"""Implements ``own_rule.ScaledMomentum`` for the numba kernel."""

import numba
import numpy as np


@numba.njit(error_model="numpy")
def loop(weights, at, rows, grads, velocity, scale, squares, rate, keep, momentum, eps):
    for j in range(at.size):
        a, r = at[j], rows[j]
        scale[r] += squares[j]
        divisor = np.sqrt(scale[r]) + eps
        for k in range(grads.shape[1]):
            velocity[r, k] = velocity[r, k] * momentum + grads[j, k]
            weights[a, k] = weights[a, k] * keep - rate * velocity[r, k] / divisor


def scaled_momentum(rule, to):
    numbers = map(to.number, (to.numbers.rate, to.numbers.decay, rule.momentum, rule.eps))
    loop(to.weights, to.at, to.rows, to.grads, *to.state, to.squares, *numbers)
