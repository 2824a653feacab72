"""Tests that the compiled gather of a bundle's rows equals torch's gather, and that malformed text
leaves nothing in memory.
"""

import numpy as np
import pytest
import torch

pytest.importorskip("numba", reason="the loops need numba")

from sbpflow.serving import encoder_loops
from sbpflow.serving.encoder import Encoded, Encoder, Vocabularies
from sbpflow.serving.lookups import Gather, Lookup
from sbpflow.serving.row_store import Store

ROWS, DIM = 50, 3
LOOKUPS = [Lookup("a", 0, 20, (0, 1), False), Lookup("b", 20, 30, (2, 4), False)]


def stores():
    """Return a store and two versions with changed rows; the second version has two pieces."""
    values = torch.arange(ROWS * DIM, dtype=torch.float32).view(ROWS, DIM)
    store = Store([values], torch.float32, merges=False)
    first = store.with_rows((torch.tensor([3, 20, 49]), torch.full((3, DIM), -1.0)))
    return store, first, first.with_rows((torch.tensor([3, 4]), torch.full((2, DIM), -2.0)))


def gathered(store, ids, policy="error"):
    """Return the vectors that the loops gather, after comparing them with torch's."""
    encoded = Encoded(ids, np.empty((len(ids), 0), np.float32))
    found = [
        Gather(LOOKUPS, loops)(store, ids, encoded, policy)[0] for loops in (encoder_loops, None)
    ]
    assert torch.equal(*found)
    return found[0]


@pytest.mark.parametrize("number", range(3))
def test_rows_and_changed_rows_are_gathered(number):
    store = stores()[number]
    draw = np.random.default_rng(number)
    ids = draw.integers(0, 20, (40, 4), dtype=np.int32)
    assert gathered(store, ids).shape == (40, 3, DIM)
    assert gathered(store, np.asfortranarray(ids)).shape == (40, 3, DIM)
    ids = np.array([[3, 7, 0, 29]], dtype=np.int32)
    assert gathered(store, ids)[0, :, 0].tolist() == [
        [9.0, -1.0, -2.0][number], [60.0, -1.0, -1.0][number], [147.0, -1.0, -1.0][number]
    ]  # fmt: skip


@pytest.mark.parametrize(("column", "value"), [(0, 20), (0, -1), (3, 30), (2, 2**31 - 1)])
def test_ids_that_are_not_rows_follow_the_policy(column, value):
    store = stores()[0]
    ids = np.zeros((4, 4), dtype=np.int32)
    ids[2, column] = value
    for policy in ("clamp", "hash"):
        gathered(store, ids, policy)
    with pytest.raises(
        IndexError, match=f"{'ab'[column > 0]}: the id {value} in row 2 is not a row"
    ):
        gathered(store, ids)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_rows_that_are_converted_are_gathered_by_torch(dtype):
    store = Store([torch.rand(ROWS, DIM).to(dtype)], torch.float32)
    assert store.arrays is None
    assert gathered(store, np.zeros((2, 4), dtype=np.int32)).dtype == torch.float32


def test_lines_of_any_number_of_cells_leave_nothing_in_memory():
    content = {
        "columns": [{"name": name, "kind": "dense", "required": True} for name in "ab"],
        **{"separator": ",", "quote": None, "header": False, "missing_values": []},
        **{"dense": [], "fields": []},
    }
    arrays = (np.zeros(0, dtype) for dtype in (np.uint64, np.int32, np.uint32))
    compiled = encoder_loops.CompiledInput(Encoder(content, Vocabularies({}, *arrays)))
    for count in range(2, 99):
        cells = compiled.parse(",".join("1" * count))
        assert (cells is not None) == (count == 2)
    assert len(compiled._lines) == 1
