"""Tests state names, full shapes, and the rectangles that cover them, in any layout."""

import numpy as np
import pytest
import torch

from sbpflow.boxing.executor import Boxing
from sbpflow.embedding.collection import EmbeddingCollection
from sbpflow.embedding.rules.base import SparseOptimizer
from sbpflow.embedding.rules.registry import sparse_optimizer
from sbpflow.runtime.random.streams import fill_uniform
from sbpflow.runtime.ranks.world import World
from tests.embedding.cases import SEED, Case, Spec

TABLES = (("w", 9, 4), ("x", 21, 4), ("y", 8, 4), ("z", 5, 4))
SPECS = {
    "w": Spec("B", "local"),
    "x": Spec("S(0)", "unique"),
    "y": Spec("S(1)", "columns"),
    "z": Spec("(S(0), S(1))", "reduce", ranks=((0, 1), (3, 2))),
}


def make_case(rule: SparseOptimizer) -> Case:
    return Case(tables={"deep": TABLES}, specs=SPECS, optimizer=rule)


def rectangles(world: World, case: Case) -> dict[str, tuple[tuple[int, ...], list]]:
    """Mark each state element with its position; return name -> (shape, [(position, values)])."""
    collection = EmbeddingCollection(case.plan(world.size), Boxing(world), seed=SEED)
    found = {}
    for name, tensor in collection.state().items():
        parts = []
        for part in tensor.rectangles:
            at = part.place
            if name.count("/") == 2:
                columns = torch.arange(at.col_start, at.col_stop, dtype=torch.float64)
                rows = torch.arange(at.row_start, at.row_stop, dtype=torch.float64)
                marks = rows if part.values.ndim == 1 else rows.unsqueeze(1) * 100 + columns
                part.values.copy_(marks)  # the state is a view: the next read shows the marks
            place = (at.row_start, at.row_stop, at.col_start, at.col_stop)
            parts.append((place, None))
        again = collection.state()[name].rectangles
        parts = [(at, r.values.numpy().copy()) for (at, _), r in zip(parts, again, strict=True)]
        found[name] = (tensor.shape, parts)
    return found


RULES = [
    (sparse_optimizer("sgd", lr=0.1), {}),
    (sparse_optimizer("lazy_adam", lr=0.1), {"exp_avg": 4, "exp_avg_sq": 4}),
    (sparse_optimizer("rowwise_adagrad", lr=0.1), {"sum": None}),
    (sparse_optimizer("rowwise_adagrad", lr=0.1, row_state="per_shard"), {"sum": "shards"}),
]
COLUMN_SHARDS = {"w": 1, "x": 1, "y": 4, "z": 2}  # numbers of column shards on 4 ranks


@pytest.mark.parametrize(("rule", "states"), RULES)
def test_state_names_are_equal_on_all_ranks_and_rectangles_cover_it(ranks, rule, states):
    results = ranks(4, rectangles, make_case(rule))
    shapes = {name: shape for name, (shape, _) in results[0].items()}
    want = {f"tables/{name}": (rows, dim) for name, rows, dim in TABLES}
    for name, rows, _ in TABLES:
        for key, width in states.items():
            width = COLUMN_SHARDS[name] if width == "shards" else width
            want[f"tables/{name}/{key}"] = (rows,) if width is None else (rows, width)
    assert shapes == want
    for name, shape in shapes.items():
        whole = np.full((*shape, 1)[:2], np.nan)
        for result in results:
            assert result[name][0] == shape
            for (r0, r1, c0, c1), values in result[name][1]:
                cut = whole[r0:r1, c0:c1]
                values = values.reshape(cut.shape)
                assert np.all(np.isnan(cut) | (cut == values)), name
                whole[r0:r1, c0:c1] = values
        rows, columns = np.indices(whole.shape)
        expected = rows if len(shape) == 1 else rows * 100 + columns
        if name.count("/") == 1:
            expected = torch.empty(shape, dtype=torch.float64)
            fill_uniform(expected, seed=SEED, name=name[7:], bound=0.05, num_columns=shape[1])
        np.testing.assert_array_equal(whole, expected, err_msg=name)
