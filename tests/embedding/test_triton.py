"""Tests that the Triton kernels equal the torch kernel; without a GPU they run in Triton's
interpreter.

The results are bit-equal if both kernels round every operation. If torch on CPU uses fused
multiply-add (``lerp``, ``addcmul``, and similar functions, depending on the vector width), the last
bits of float32 differ.
"""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from sbpflow.embedding.plan.tables import Shard, TableConfig
from sbpflow.embedding.rules.base import SparseOptimizer
from sbpflow.embedding.rules.registry import sparse_optimizer
from sbpflow.embedding.storage.lookup import Lookup
from sbpflow.embedding.storage.rounding import RowNoise
from sbpflow.embedding.storage.torch_storage import TorchStorage
from sbpflow.embedding.storage.triton_storage import TritonStorage
from sbpflow.errors import SbpError

# On CPU, the kernels run in the interpreter (see tests/conftest.py); on a GPU, they are compiled.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
RULES = {
    "sgd": sparse_optimizer("sgd", lr=0.1),
    "decayed": sparse_optimizer("adagrad", lr=0.1, weight_decay=0.1),
    "adagrad": sparse_optimizer("adagrad", lr=0.1),
    "rowwise_adagrad": sparse_optimizer("rowwise_adagrad", lr=0.1),
    "lazy_adam": sparse_optimizer("lazy_adam", lr=0.1),
    "ftrl": sparse_optimizer("ftrl", lr=0.1, beta=1.0, l1=0.01, l2=0.1),
}
MOST_IDS = 200


@st.composite
def lookups(draw):
    """Return (rows, lookup, generator) with few rows and long runs, or with many rows; bags contain
    one, several, or no ids.
    """
    rows = draw(st.sampled_from([1, 3, 20, 300]))
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    count = draw(st.integers(1, MOST_IDS))
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    addresses = (torch.rand(count, generator=generator) ** 2 * rows).to(dtype)
    offsets = None
    if draw(st.booleans()):
        cuts = torch.randint(0, count + 1, (draw(st.integers(0, 30)),), generator=generator)
        offsets = torch.cat([torch.tensor([0]), cuts.sort().values, torch.tensor([count])])
    weights = torch.randn(count, generator=generator) if draw(st.booleans()) else None
    tensors = [None if t is None else t.to(DEVICE) for t in (addresses, offsets, weights)]
    return rows, Lookup(*tensors), generator


def noise_of(rows: int, width: int) -> RowNoise:
    """Return the noise of two shards, so that the kernel must search for the shard of a row."""
    first = rows // 2
    shards = [
        Shard(
            table=TableConfig(name=name, features=(name,), num_rows=count + 5, dim=width + 2),
            rank=0,
            row_start=5,
            row_stop=5 + count,
            col_start=2,
            col_stop=2 + width,
            base=base,
        )
        for name, count, base in (("a", first, 0), ("b", rows - first, first))
        if count
    ]
    return RowNoise(shards, 7, DEVICE)


def both(rows, width, optimizer, row_dtype=None, **kwargs):
    noise = noise_of(rows, width) if row_dtype else None
    shared = {"dim": width, "optimizer": optimizer, "device": DEVICE, "row_dtype": row_dtype}
    shared |= {"dtype": torch.float32, "noise": noise}
    one = TorchStorage(rows, width, **shared, **kwargs)
    other = TritonStorage(rows, width, **shared, **kwargs)
    generator = torch.Generator().manual_seed(rows)
    start = torch.rand(rows, width, generator=generator) - 0.5
    for storage in (one, other):
        storage.weights.copy_(start)
    return one, other


@settings(max_examples=25, deadline=None)
@given(lookups(), st.sampled_from([1, 5, 16]), st.sampled_from([None, torch.bfloat16]))
def test_lookup_matches_torch(case, width, row_dtype):
    rows, lookup, _ = case
    one, other = both(rows, width, RULES["sgd"], row_dtype)
    wanted, found = one.lookup(lookup), other.lookup(lookup)
    if lookup.weights is None:
        assert torch.equal(found, wanted)
    else:  # torch uses fused multiply-add; sums have up to 200 terms of about 1
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)


@settings(max_examples=25, deadline=None)
@given(lookups(), st.sampled_from([1, 5, 16]))
def test_runs_group_positions_of_equal_rows(case, width):
    _, lookup, _ = case
    runs = lookup.runs()
    keys = runs.keys.tolist()
    assert keys == sorted(lookup.addresses.tolist())
    for at, (start, stop) in enumerate(zip(runs.start.tolist(), runs.stop.tolist(), strict=True)):
        assert start <= at < stop
        assert set(keys[start:stop]) == {keys[at]}
        assert keys[start - 1 : start] != [keys[at]] or start == 0
        assert keys[stop : stop + 1] != [keys[at]]


@pytest.mark.few(3)
@pytest.mark.parametrize("name", RULES)
@settings(max_examples=3, deadline=None)
@given(
    case=lookups(),
    width=st.sampled_from([1, 5, 16]),
    row_dtype=st.sampled_from([None, torch.bfloat16, torch.float16]),
)
def test_update_matches_torch(name, case, width, row_dtype):
    rows, lookup, generator = case
    one, other = both(rows, width, RULES[name], row_dtype)
    for step in (1, 2):
        grads = torch.randn(lookup.num_bags, width, generator=generator).to(DEVICE)
        for storage in (one, other):
            storage.update(lookup, grads, 0.1, step)
        compare(one, other, row_dtype)
        # Start the next step from equal values: FTRL's state depends on how rows were rounded.
        other.weights.copy_(one.weights)
        for key, value in one.state.items():
            other.state[key].copy_(value)


def compare(one, other, row_dtype=None):
    # The tolerance covers the rounding errors of adding up to 200 float32 gradients of about 1 in
    # another order, and of squaring such sums.
    for key in one.state:
        torch.testing.assert_close(other.state[key], one.state[key], rtol=2e-5, atol=2e-5)
    if row_dtype is None:
        # The learning rate, 0.1, also scales the error of the gradients, so a smaller tolerance
        # is enough for weights than for the state.
        torch.testing.assert_close(other.weights, one.weights, rtol=2e-6, atol=6e-6)
        return
    # The last bit of a float32 value occasionally changes the rounding of a half-precision row.
    differ = (other.weights != one.weights).sum()
    assert differ <= max(2, 0.02 * one.weights.numel())
    torch.testing.assert_close(other.weights, one.weights, rtol=2**-6, atol=2**-6)


@dataclass(frozen=True, kw_only=True)
class Large(SparseOptimizer):
    """An optimizer with more constants than the kernel supports."""

    name: str = "large"
    kernels: ClassVar = {"triton": "tests.embedding.test_triton:five_constants"}

    def step(self, block):
        raise NotImplementedError


def five_constants(optimizer):
    return None, (1.0,) * 5


def test_optimizer_with_too_many_constants_is_rejected():
    _, storage = both(3, 4, Large())
    with pytest.raises(SbpError, match="large has 5 constants and 0 states"):
        storage.update(
            Lookup(torch.tensor([0], device=DEVICE)), torch.ones(1, 4, device=DEVICE), 0.1, 1
        )
