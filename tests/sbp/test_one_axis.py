"""Tests every conversion along one axis: same, overlapping, containing and disjoint placements.

A failure names the pair, the shape and the rank; ``tests/oracle.py`` computes the expected result.
"""

from unittest.mock import patch

import pytest

from sbpflow.boxing import program as boxing_program
from sbpflow.runtime.ranks.shared_memory import SharedChannel
from sbpflow.sbp.sbp import Broadcast, Split
from tests.quick import diagonal, quick
from tests.sbp.conversions import EXCHANGE, convert_all, expected_names, one_axis

SHAPES = [(4, 4), (6, 8), (5, 7), (25, 33), (13, 17)]
SRC = [[0, 1], [1, 2, 3], [0, 1, 2, 3]]
DST = [[0, 1, 3], [0, 1, 2, 3]]


@pytest.mark.parametrize(
    "line", quick([[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [2, 0, 3]], lambda n: n > 2), ids=str
)
def test_same_placement(ranks, line):
    values = one_axis([0, 1])
    expected = expected_names(values)
    if len(line) == 1:
        expected = {pair: [] for pair in expected}
    size = max(line) + 1
    counts = ranks(size, convert_all, line, line, values, SHAPES, ["float64"], expected)
    assert counts == [16 * len(SHAPES)] * size


def convert_apart(world, *case):
    """Convert like ``convert_all``, but copy every piece that stays on its rank directly, without
    buffers.
    """
    with patch.object(SharedChannel, "connects", lambda *_: False):
        return convert_directly(world, *case)


def convert_directly(world, *case):
    """Convert like ``convert_all``, but copy every piece directly, without buffers."""
    with patch.object(boxing_program, "APART_BYTES", 0):
        return convert_all(world, *case)


@pytest.mark.parametrize(
    "line", quick([[0, 1], [1, 0], [0, 1, 2], [0, 1, 2, 3], [2, 0, 3]], lambda n: n == 4), ids=str
)
@pytest.mark.parametrize("convert", [convert_apart, convert_directly])
def test_pieces_bypass_the_buffers(ranks, line, convert):
    values = [*one_axis([0, 1]), (Split(0, (1, *(0,) * (len(line) - 2), 5)),)]
    size = max(line) + 1
    ranks(size, convert, line, line, values, [(6, 8), (6, 5)], ["float64", "int32", "bfloat16"])
    others = [rank for rank in range(size) if rank != line[0]] or [0]
    ranks(size, convert, line, others, one_axis([0, 1]), [(6, 8), (25, 33)], ["float32"])


@pytest.mark.parametrize(("src", "dst"), diagonal(SRC, DST), ids=str)
def test_placements_of_the_reference_list(ranks, src, dst):
    ranks(4, convert_all, src, dst, one_axis([0, 1]), SHAPES, ["float64"])


@pytest.mark.parametrize(
    ("src", "dst"),
    quick([
        ([0, 1], [2, 3]),
        ([0, 1, 2], [1, 2, 3]),
        ([0, 1, 2, 3], [1, 2]),
        ([1, 2], [0, 1, 2, 3]),
        ([2], [0, 1, 2, 3]),
        ([0, 1, 2, 3], [3]),
        ([1], [3]),
        ([2, 3], [1]),
        ([3, 1], [1, 3]),
        ([0, 1, 2, 3], [3, 2, 1, 0]),
    ], lambda n: n % 2 == 0),
    ids=["disjoint", "overlap", "contains", "contained", "1-to-n", "n-to-1", "1-to-1", "2-to-1",
         "turned", "reversed"],
)  # fmt: skip
def test_placement_relations(ranks, src, dst):
    ranks(4, convert_all, src, dst, one_axis([0, 1]), [(5, 7), (8, 4)], ["float64"])


def test_conversions_of_dims_beyond_the_second(ranks):
    values = one_axis([2, 3])
    shapes = [(4, 4, 5, 7)]
    ranks(4, convert_all, [0, 1, 2, 3], [0, 1, 2, 3], values, shapes, ["float64"],
          expected_names(values))  # fmt: skip
    ranks(4, convert_all, [0, 1, 3], [1, 2, 3], values, shapes, ["float64"])


@pytest.mark.parametrize("shape", [(8, 0, 4), (5, 0, 7), (0, 4)], ids=str)
def test_conversions_of_tensors_without_elements(ranks, shape):
    values = one_axis([0, 1, len(shape) - 1])
    expected = {(str(a), str(b)): [] for (a,) in values for (b,) in values}
    ranks(4, convert_all, [0, 1, 2, 3], [0, 1, 2, 3], values, [shape], ["float64"], expected)
    ranks(4, convert_all, [0, 1, 2], [2, 3], values, [shape], ["float64"])


def test_tensors_without_dims_convert(ranks):
    values = one_axis([])
    ranks(3, convert_all, [0, 1, 2], [0, 1, 2], values, [()], ["float64"], expected_names(values))
    for src, dst in (([0, 1], [2]), ([2], [0, 1, 2]), ([0, 2], [2, 1])):
        ranks(3, convert_all, src, dst, values, [()], ["float64"])


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2, 0, 5), (0, 7, 0), (7, 0, 0), (1, 3, 3)], ids=str)
def test_explicit_sizes(ranks, sizes):
    values = [(Split(1, sizes),), (Split(0, (0, 4, 1)),), *one_axis([0, 1])]
    ranks(3, convert_all, [0, 1, 2], [0, 1, 2], values, [(5, 7)], ["float64"])
    ranks(4, convert_all, [0, 1, 3], [3, 1, 2], values, [(5, 7)], ["float64"])


def test_short_batch_with_explicit_sizes(ranks):
    values = [(Split(0, (1, 1, 0, 0)),), (Split(1, (3, 0, 0, 2)),), (Broadcast(),)]
    ranks(4, convert_all, [0, 1, 2, 3], [0, 1, 2, 3], values, [(2, 5)], ["float64"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int64", "int32", "int8"])
def test_dtypes(ranks, dtype):
    values = one_axis([0, 1])
    ranks(3, convert_all, [0, 1, 2], [0, 1, 2], values, [(5, 7)], [dtype], expected_names(values))
    ranks(3, convert_all, [0, 2], [0, 1, 2], values, [(5, 7)], [dtype])


def test_dtype_that_gloo_cannot_reduce(ranks):
    values = one_axis([0, 1])
    expected = expected_names(values) | {("P", "B"): EXCHANGE}
    ranks(3, convert_all, [0, 1, 2], [0, 1, 2], values, [(5, 7)], ["int16"], expected)


def test_conversions_of_bool_tensors(ranks):
    values = one_axis([0, 1], partial=False)
    ranks(3, convert_all, [0, 1, 2], [0, 1, 2], values, [(5, 7)], ["bool"])
