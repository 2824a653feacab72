"""Defines the sparse optimizers as loops compiled by numba, one function per optimizer.

The functions compute the same results as ``SparseOptimizer.apply``; the docstring of ``compiled``
says when results are bit-equal. A function updates ``weights[at[j]]`` and the states of ``rows[j]``
with ``grads[j]``. ``keep`` is the factor of weight decay, 1 - lr * weight_decay. Scalars have the
dtype of the arrays.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from torch import Tensor

from sbpflow.embedding.rules.adagrad import Adagrad
from sbpflow.embedding.rules.base import SparseOptimizer, StepNumbers
from sbpflow.embedding.rules.ftrl import Ftrl
from sbpflow.embedding.rules.lazy_adam import LazyAdam
from sbpflow.embedding.rules.rowwise_adagrad import RowwiseAdagrad
from sbpflow.embedding.storage.compiled import fma, squared_norm
from sbpflow.runtime.compute.compiled import DISTANCE, Array, compiled, prefetch
from sbpflow.runtime.compute.row_vectors import add_scaled_row


class RowArrays(NamedTuple):
    """The arrays of one step; each row occurs once."""

    weights: Array  # Rows to update and possibly others, [.., width].
    at: Array  # Positions of the rows in ``weights``, [touched] int.
    rows: Array  # Positions of the rows in the states, [touched] int.
    grads: Array  # Gradients of the rows, [touched, width].
    state: list[Array]  # In the order of ``SparseOptimizer.state``, [.., width] or [..].
    # As in ``RowBlock.mean_squares``; [0] without row state, or if the rows have all their columns
    # and the function is ``rowwise_adagrad``, which then computes them.
    squares: Array
    numbers: StepNumbers  # Python numbers, not tensors.
    number: Callable[[float | Tensor], float]  # Converts to the dtype of the arrays.


@compiled
def _step_sgd(weights: Array, at: Array, grads: Array, lr: float, keep: float) -> None:
    for j in range(at.size):
        if j + DISTANCE < at.size:
            prefetch(weights, at[j + DISTANCE])
        add_scaled_row(weights, np.intp(at[j]), grads, j, -lr, keep)


def sgd(optimizer: SparseOptimizer, to: RowArrays) -> None:
    _step_sgd(to.weights, to.at, to.grads, to.number(to.numbers.rate), to.number(to.numbers.decay))


@compiled
def _step_adagrad(
    weights: Array,
    at: Array,
    total: Array,
    rows: Array,
    grads: Array,
    lr: float,
    eps: float,
    keep: float,
) -> None:
    for j in range(at.size):
        if j + DISTANCE < at.size:
            prefetch(weights, at[j + DISTANCE])
            prefetch(total, rows[j + DISTANCE])
        a, r = at[j], rows[j]
        for k in range(grads.shape[1]):
            state = fma(grads[j, k], grads[j, k], total[r, k])
            total[r, k] = state
            move = (-lr * grads[j, k]) / (np.sqrt(state) + eps)
            weights[a, k] = weights[a, k] * keep + move


def adagrad(optimizer: Adagrad, to: RowArrays) -> None:
    (total,), number = to.state, to.number
    constants = number(to.numbers.rate), number(optimizer.eps), number(to.numbers.decay)
    _step_adagrad(to.weights, to.at, total, to.rows, to.grads, *constants)


@compiled
def _step_rowwise_adagrad(
    weights: Array,
    at: Array,
    total: Array,
    rows: Array,
    grads: Array,
    squares: Array,
    lr: float,
    eps: float,
    keep: float,
) -> None:
    one = total.dtype.type(1)
    share = one / total.dtype.type(grads.shape[1])
    for j in range(at.size):
        if j + DISTANCE < at.size:
            prefetch(weights, at[j + DISTANCE])
            prefetch(total, rows[j + DISTANCE])
        square = squares[j] if squares.size else squared_norm(grads, j) * share
        state = total[rows[j]] + square
        total[rows[j]] = state
        scale = (one / (np.sqrt(state) + eps)) * -lr
        add_scaled_row(weights, np.intp(at[j]), grads, j, scale, keep)


def rowwise_adagrad(optimizer: RowwiseAdagrad, to: RowArrays) -> None:
    (total,), number = to.state, to.number
    constants = number(to.numbers.rate), number(optimizer.eps), number(to.numbers.decay)
    _step_rowwise_adagrad(to.weights, to.at, total, to.rows, to.grads, to.squares, *constants)


@compiled
def _step_lazy_adam(
    weights: Array,
    at: Array,
    mean: Array,
    square: Array,
    rows: Array,
    grads: Array,
    move: float,
    eps: float,
    keep: float,
    take: float,
    beta2: float,
    give2: float,
    correction: float,
) -> None:
    """Update weights with lazy Adam.

    ``take`` is 1 - beta1, ``give2`` is 1 - beta2, and ``move`` is -lr divided by the bias
    correction of the mean.
    """
    half, one = take / (take + take), take / take
    for j in range(at.size):
        if j + DISTANCE < at.size:
            prefetch(weights, at[j + DISTANCE])
            prefetch(mean, rows[j + DISTANCE])
            prefetch(square, rows[j + DISTANCE])
        a, r = at[j], rows[j]
        for k in range(grads.shape[1]):
            g, m = grads[j, k], mean[r, k]
            if take < half:  # exact at both ends, like ``torch.lerp``
                m = fma(take, g - m, m)
            else:
                m = fma(-(g - m), one - take, g)
            mean[r, k] = m
            v = fma(give2 * g, g, square[r, k] * beta2)
            square[r, k] = v
            denominator = np.sqrt(v) / correction + eps
            weights[a, k] = weights[a, k] * keep + (move * m) / denominator


def lazy_adam(optimizer: LazyAdam, to: RowArrays) -> None:
    (mean, square), number = to.state, to.number
    beta1, beta2 = optimizer.betas
    _step_lazy_adam(
        to.weights,
        to.at,
        mean,
        square,
        to.rows,
        to.grads,
        number(-to.numbers.rate),
        number(optimizer.eps),
        number(to.numbers.decay),
        number(1.0 - beta1),
        number(beta2),
        number(1.0 - beta2),
        number((1.0 - beta2**to.numbers.step) ** 0.5),
    )


@compiled
def _step_ftrl(
    weights: Array,
    at: Array,
    total: Array,
    linear: Array,
    rows: Array,
    grads: Array,
    rate: float,
    beta: float,
    l1: float,
    l2: float,
) -> None:
    for j in range(at.size):
        if j + DISTANCE < at.size:
            prefetch(weights, at[j + DISTANCE])
            prefetch(total, rows[j + DISTANCE])
            prefetch(linear, rows[j + DISTANCE])
        a, r = at[j], rows[j]
        for k in range(grads.shape[1]):
            g, before, w = grads[j, k], total[r, k], weights[a, k]
            state = fma(g, g, before)
            total[r, k] = state
            root = np.sqrt(state)
            z = fma(-((root - np.sqrt(before)) / rate), w, linear[r, k] + g)
            linear[r, k] = z
            beyond = z - min(max(z, -l1), l1)
            curvature = (root + beta) / rate + l2
            weights[a, k] = -beyond / curvature if beyond != 0 else l1 - l1


def ftrl(optimizer: Ftrl, to: RowArrays) -> None:
    (total, linear), number = to.state, to.number
    constants = map(number, (optimizer.lr, optimizer.beta, optimizer.l1, optimizer.l2))
    _step_ftrl(to.weights, to.at, total, linear, to.rows, to.grads, *constants)
