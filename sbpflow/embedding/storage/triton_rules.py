# pyright: basic, reportMissingImports=false
"""Defines the sparse optimizers for Triton, each with a jitted step function and constants.

A step function receives a tile of ``weight`` (after weight decay) and ``grad`` [rows, columns], and
the mean squares ``square`` [rows] (used only with row state). The function returns the new weight,
and stores the states ``first`` and ``second``: element state at ``place`` under the mask ``shown``,
row state at ``row`` under the mask ``heads``. ``rate`` and ``correction`` come from
``StepNumbers``; ``a`` to ``d`` are up to four constants.
"""

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

from sbpflow.embedding.rules.adagrad import Adagrad
from sbpflow.embedding.rules.base import SparseOptimizer
from sbpflow.embedding.rules.ftrl import Ftrl
from sbpflow.embedding.rules.lazy_adam import LazyAdam
from sbpflow.embedding.rules.rowwise_adagrad import RowwiseAdagrad

TritonRule = tuple[Callable[..., Any], tuple[float, ...]]

# Several arguments per line: one line per argument would double the length of this file.
# fmt: off


@triton.jit
def _sgd(
    weight, grad, square, first, second, place, shown, row, heads, rate, correction, a, b, c, d
):
    return weight - rate * grad


def sgd(optimizer: SparseOptimizer) -> TritonRule:
    return _sgd, ()


@triton.jit
def _adagrad(
    weight, grad, square, first, second, place, shown, row, heads, rate, correction, eps, b, c, d
):
    total = tl.load(first + place, mask=shown, other=0.0) + grad * grad
    tl.store(first + place, total, mask=shown)
    return weight - rate * (grad / (tl.sqrt_rn(total) + eps))


def adagrad(optimizer: Adagrad) -> TritonRule:
    return _adagrad, (optimizer.eps,)


@triton.jit
def _rowwise_adagrad(
    weight, grad, square, first, second, place, shown, row, heads, rate, correction, eps, b, c, d
):
    total = tl.load(first + row, mask=heads, other=0.0) + square
    tl.store(first + row, total, mask=heads)
    scale = -rate * (1.0 / (tl.sqrt_rn(total) + eps))
    return weight + scale[:, None] * grad


def rowwise_adagrad(optimizer: RowwiseAdagrad) -> TritonRule:
    return _rowwise_adagrad, (optimizer.eps,)


@triton.jit
def _lazy_adam(
    weight, grad, square, first, second, place, shown, row, heads, rate, correction,
    eps, rise, keep, share
):
    mean = tl.load(first + place, mask=shown, other=0.0)
    mean = mean + rise * (grad - mean)
    tl.store(first + place, mean, mask=shown)
    squares = tl.load(second + place, mask=shown, other=0.0) * keep
    squares = squares + share * grad * grad
    tl.store(second + place, squares, mask=shown)
    return weight - rate * (mean / (tl.sqrt_rn(squares) / correction + eps))


def lazy_adam(optimizer: LazyAdam) -> TritonRule:
    beta1, beta2 = optimizer.betas
    return _lazy_adam, (optimizer.eps, 1.0 - beta1, beta2, 1.0 - beta2)


@triton.jit
def _ftrl(
    weight, grad, square, first, second, place, shown, row, heads, rate, correction,
    lr, beta, l1, l2
):
    old = tl.load(first + place, mask=shown, other=0.0)
    total = old + grad * grad
    tl.store(first + place, total, mask=shown)
    root = tl.sqrt_rn(total)
    linear = tl.load(second + place, mask=shown, other=0.0) + grad
    linear = linear - (root - tl.sqrt_rn(old)) / lr * weight
    tl.store(second + place, linear, mask=shown)
    beyond = linear - tl.minimum(tl.maximum(linear, -l1), l1)
    curvature = (root + beta) / lr + l2
    safe = tl.where(beyond == 0.0, 1.0, curvature)
    return tl.where(beyond == 0.0, 0.0, -beyond / safe)


def ftrl(optimizer: Ftrl) -> TritonRule:
    return _ftrl, (optimizer.lr, optimizer.beta, optimizer.l1, optimizer.l2)


# fmt: on
