"""Tests that operations on rows with vector instructions give the same bits as loops."""

import numpy as np
import pytest

pytest.importorskip("numba")

import numba

from sbpflow.embedding.storage.compiled import fma
from sbpflow.runtime.compute.row_vectors import (
    add_row,
    add_scaled_row,
    add_scaled_to_rows,
    add_to_rows,
    copy_row,
    sum_of_rows,
    sum_of_scaled_rows,
)


@numba.njit(error_model="numpy")  # not cached, so that the current operations are compiled
def _copy(out, rows):
    copy_row(out, 1, rows, 2)


@numba.njit(error_model="numpy")
def _add(out, rows):
    add_row(out, 1, rows, 2)


@numba.njit(error_model="numpy")
def _add_scaled(out, rows, scale, keep):
    add_scaled_row(out, 1, rows, 2, scale, keep)


@numba.njit(error_model="numpy")
def _add_scaled_in_loop(out, rows, scale, keep):
    for k in range(out.shape[1]):
        out[1, k] = fma(rows[2, k], scale, out[1, k] * keep)


@pytest.mark.few(12)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("width", [0, 1, 3, 4, 7, 8, 12, 15, 16, 17, 31, 44, 64, 95])
def test_rows_are_copied_added_and_scaled(width, dtype):
    random = np.random.default_rng(width)
    # An offset of one element, so that no row starts at a multiple of a vector's size.
    start, rows = (
        random.standard_normal(3 * width + 1).astype(dtype)[1:].reshape(3, width) for _ in range(2)
    )
    scale, keep = dtype(0.3), dtype(0.9)
    out = start.copy()
    _copy(out, rows)
    assert np.array_equal(out, np.stack([start[0], rows[2], start[2]]))
    out = start.copy()
    _add(out, rows)
    assert np.array_equal(out, np.stack([start[0], start[1] + rows[2], start[2]]))
    out, wanted = start.copy(), start.copy()
    _add_scaled(out, rows, scale, keep)
    _add_scaled_in_loop(wanted, rows, scale, keep)
    assert np.array_equal(out, wanted)
    if width:
        assert not np.array_equal(out, start)


@numba.njit(error_model="numpy")
def _sum(out, rows, at, scales):
    if scales.size:
        sum_of_scaled_rows(out, 1, rows, at, 1, 5, scales)
    else:
        sum_of_rows(out, 1, rows, at, 1, 5)


@numba.njit(error_model="numpy")
def _add_to(rows, out, at, scales):
    if scales.size:
        add_scaled_to_rows(rows, 1, out, at, 1, 5, scales)
    else:
        add_to_rows(rows, 1, out, at, 1, 5)


@numba.njit(error_model="numpy")
def _by_loops(out, rows, at, scales, to_rows):
    for n in range(1, 5):
        i, j = (at[n], 1) if to_rows else (1, at[n])
        for k in range(out.shape[1]):
            if scales.size:
                out[i, k] = fma(rows[j, k], scales[n], out[i, k])
            else:
                out[i, k] += rows[j, k]


@pytest.mark.few(12)
@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("width", [0, 1, 7, 8, 16, 31, 64, 95])
def test_lists_of_rows_are_summed_and_added_to(width, dtype, index):
    random = np.random.default_rng(width)
    start, rows = (
        random.standard_normal(3 * width + 1).astype(dtype)[1:].reshape(3, width) for _ in range(2)
    )
    at = np.array([9, 2, 0, 2, 1, 9], index)  # only elements 1 to 4 belong to the list
    for scales in (np.empty(0, dtype), random.standard_normal(6).astype(dtype)):
        out, wanted = start.copy(), start.copy()
        _sum(out, rows, at, scales)
        wanted[1] = 0
        _by_loops(wanted, rows, at, scales, False)
        assert np.array_equal(out, wanted)
        out, wanted = start.copy(), start.copy()
        _add_to(rows, out, at, scales)
        _by_loops(wanted, rows, at, scales, True)
        assert np.array_equal(out, wanted)
        if width:
            assert not np.array_equal(out, start)


@pytest.mark.parametrize(
    ("out", "rows"),
    [
        (np.zeros((3, 4)), np.zeros((3, 4), np.float32)),
        (np.zeros((3, 4)), np.zeros((3, 4), order="F")),
        (np.zeros((3, 8))[:, ::2], np.zeros((3, 4))),
        (np.zeros(4), np.zeros((3, 4))),
    ],
    ids=["dtypes", "order", "strides", "dims"],
)
def test_other_arrays_are_refused(out, rows):
    with pytest.raises(numba.TypingError, match="C-contiguous matrices of the same dtype"):
        _add(out, rows)
