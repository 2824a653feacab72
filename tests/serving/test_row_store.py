"""Tests that versions of a store are independent, and how much memory their changed rows need."""

import gc
import weakref
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from sbpflow.checkpoint import format
from sbpflow.run.export.bundle import array_of
from sbpflow.runtime.files.tensors_file import TensorsFile
from sbpflow.serving import row_store
from sbpflow.serving.deltas import DTYPE_CODES
from sbpflow.serving.operations import BundleError
from sbpflow.serving.row_store import Store, Tensors
from sbpflow.serving.scorer import load

ROWS, DIM = 50, 3


def base_of(parts):
    if parts == 1:
        return [torch.zeros(ROWS, DIM)]
    return [torch.zeros(ROWS, DIM, dtype=torch.uint8), torch.zeros(ROWS), torch.zeros(ROWS)]


def by_loops(store):
    """Return all rows as the compiled loops read them."""
    from sbpflow.serving import encoder_loops

    columns = np.arange(ROWS)
    limits, out = np.full(ROWS, ROWS), np.empty((1, 1 + ROWS * DIM), np.float32)
    ids, first = columns[None].astype(np.int32), np.zeros(ROWS, np.int64)
    assert encoder_loops.gather_rows(ids, columns, first, limits, *store.arrays, out, 1)
    return torch.from_numpy(out[0, 1:]).view(ROWS, DIM)


@pytest.mark.parametrize(("parts", "merges"), [(1, True), (1, False), (3, False)])
def test_every_version_keeps_its_rows(parts, merges):
    generator = torch.Generator().manual_seed(3)
    store = Store(base_of(parts), torch.float32, merges=merges)
    versions, most = [(store, torch.zeros(ROWS, DIM))], 0
    for number in range(1, 31):
        store, whole = versions[-1][0], versions[-1][1].clone()
        rows = torch.randperm(ROWS, generator=generator)[:20]
        new = torch.full((20, DIM), float(number))
        whole[rows] = new
        # one table without changes, and two with changed rows
        none = rows[:0], new[:0]
        store = store.with_rows(none, (rows[:5], new[:5]), (rows[5:], new[5:]))
        versions.append((store, whole))
        most = max(most, len(store._pieces))
        for kept, wanted in versions:
            assert torch.equal(kept.gather(torch.arange(ROWS)), wanted)
            if kept.arrays and find_spec("numba"):
                assert torch.equal(by_loops(kept), wanted)
        held = sum(len(piece[0]) for piece in store._pieces)
        changed = int((store._slots >= ROWS).sum())
        assert held == changed if merges or parts > 1 else changed <= held <= 2 * ROWS
    assert most == (1 if merges or parts > 1 else 10)


def test_places_beyond_int32_are_read(monkeypatch):
    monkeypatch.setattr(row_store, "_MOST_PLACES", ROWS + 20)  # a test cannot have 2^31 rows
    store, whole = Store(base_of(1), torch.float32, merges=False), torch.zeros(ROWS, DIM)
    kinds = []
    for first in (0, 10, 15):
        rows = torch.arange(first, first + 10)
        whole[rows] = new = torch.full((10, DIM), 1.0 + first)
        store = store.with_rows((rows, new))
        kinds.append(store._slots.dtype)
        assert torch.equal(store.gather(torch.arange(ROWS)), whole)
        if find_spec("numba"):
            assert torch.equal(by_loops(store), whole)
    assert kinds == [torch.int32, torch.int32, torch.int64]


def test_changed_rows_are_read_where_they_are():
    values = torch.rand(4, DIM)
    store = Store(base_of(1), torch.float32, merges=False).with_rows((torch.arange(4), values))
    (piece,) = store._pieces
    assert piece[0].data_ptr() == values.data_ptr()


@pytest.mark.parametrize("values", [torch.zeros(2, DIM + 1), (torch.zeros(1, DIM),)])
def test_values_of_another_shape_are_rejected(values):
    store = Store(base_of(1), torch.float32)
    with pytest.raises(BundleError, match=r"must have the shapes \[\(2, 3\)\], got"):
        store.with_rows((torch.arange(2), values))


def test_a_replaced_model_is_freed_without_garbage_collection(exported):
    """If freeing needed a garbage collection, a server would keep the mapped files of old
    bundles.
    """
    model = load(exported / "model")
    text = b"[]"
    model.encode_json(text)
    parts = [weakref.ref(each) for each in (model, model.encoder, *model.stores)]
    if find_spec("numba"):
        parts.append(weakref.ref(model.encoder._compiled))
    gc.disable()
    try:
        del model
        assert [part() for part in parts] == [None] * len(parts)
    finally:
        gc.enable()


def test_tensors_with_any_dtype_of_checkpoints_are_written_and_read(tmp_path):
    tensors = {name: torch.arange(2).to(dtype) for name, dtype in format.DTYPES.items()}
    kinds = {name: (DTYPE_CODES[tensor.dtype], [2]) for name, tensor in tensors.items()}
    with TensorsFile(tmp_path / "file", kinds) as out:
        for name, tensor in tensors.items():
            out.put(name, 0, array_of(tensor))
    found = Tensors(tmp_path / "file")
    for name, tensor in tensors.items():
        assert found.tensor(name).dtype == tensor.dtype
        assert found.tensor(name).tolist() == tensor.tolist()
