"""Tests that a model's compiled program scores a few rows as torch does."""

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("numba", reason="the loops need numba")

from sbpflow.serving import dense_loops, encoder_loops
from sbpflow.serving.encoder import Encoded
from sbpflow.serving.lookups import plan_lookups
from sbpflow.serving.operations import Graph
from sbpflow.serving.row_store import Store
from sbpflow.serving.scorer import Model, Version

ROWS, DIM, NUM_DENSE = 40, 3, 2
FEATURES = {"a": (0, 1), "b": (1, 2), "c": (2, 5), "d": (5, 7)}


def table(feature, store, first, rows, pooling="sum"):
    return {"store": store, "first": first, "rows": rows, "pooling": pooling,
            "features": [feature]}  # fmt: skip


def ref(name):
    return {"ref": name}


NODES = [
    ["aten.cat.default", "cat", [[ref("deep"), ref("dense")], -1], {}],
    ["aten.linear.default", "hidden", [ref("cat"), ref("w0"), ref("b0")], {}],
    ["aten.relu.default", "relu", [ref("hidden")], {}],
    ["aten.dropout.default", "drop", [ref("relu"), 0.2, False], {}],
    ["aten.linear.default", "gate", [ref("cat"), ref("w1")], {}],
    ["aten.sigmoid.default", "gated", [ref("gate")], {}],
    ["aten.mul.Tensor", "product", [ref("drop"), ref("gated")], {}],
    ["aten.sub.Tensor", "less", [ref("product"), ref("gate")], {}],
    ["aten.linear.default", "top", [ref("less"), ref("w2"), ref("b2")], {}],
    ["aten.add.Tensor", "add", [ref("top"), ref("wide")], {}],
]


def content_of(nodes=NODES, output="add"):
    weights = {name: f"dense.{name}" for name in ("w0", "b0", "w1", "w2", "b2")}
    inputs = {"dense": "dense", "vectors.wide": "wide", "vectors.deep": "deep"}
    return {
        "dtype": "float32", "out_of_range": "error", "hashed": [], "columns": FEATURES,
        "stores": [{}, {}], "num_dense": NUM_DENSE,
        "tables": {
            "wide.a": table("a", 0, 0, 20), "wide.c": table("c", 0, 20, 20),
            "deep.a": table("a", 1, 0, 10), "deep.b": table("b", 1, 10, 10),
            "deep.c": table("c", 1, 20, 10, "mean"), "deep.d": table("d", 1, 30, 10),
        },
        "outputs": [
            {"name": "wide", "sums": True, "tables": ["wide.a", "wide.c"]},
            {"name": "deep", "sums": False, "tables": ["deep.a", "deep.b", "deep.c", "deep.d"]},
        ],
        "graph": {"nodes": nodes, "weights": weights, "inputs": inputs, "output": output},
    }  # fmt: skip


def model_of(**changes) -> Model:
    content = content_of(**changes)
    torch.manual_seed(0)
    width, hidden = 4 * DIM + NUM_DENSE, 5
    shapes = {"w0": (hidden, width), "b0": (hidden,), "w1": (hidden, width), "w2": (1, hidden),
              "b2": (1,)}  # fmt: skip
    weights = {f"dense.{name}": torch.randn(shape) for name, shape in shapes.items()}
    stores = tuple(Store([torch.randn(ROWS, dim)], torch.float32) for dim in (1, DIM))
    gathers, segments = plan_lookups(content, encoder_loops)
    bind = Graph(content["graph"]).bind
    dims = [store.dim for store in stores]
    program = encoder_loops.compile_model(content, segments, gathers, dims, weights)
    return Model(
        Version("test", 1), {}, content, None, stores, weights, bind, bind(weights), gathers,
        segments, program,
    )  # fmt: skip


def rows_of(number):
    draw = np.random.default_rng(number)
    ids = draw.integers(0, 10, (number, 7), dtype=np.int32)
    return Encoded(ids, draw.normal(size=(number, NUM_DENSE)).astype(np.float32))


def check(model):
    assert model.program is not None
    encoded = rows_of(133)
    wanted = replace(model, program=None).score_encoded(encoded)
    assert wanted.std() > 0.1
    for number in (1, 2, 7, 20, 64, 133):
        part = Encoded(encoded.ids[:number], encoded.dense[:number])
        found = model.program.scores(model.gathers, model.stores, part.ids, part.dense)
        np.testing.assert_allclose(found, model.logits(part).sigmoid().numpy(), rtol=0, atol=5e-7)
        np.testing.assert_allclose(model.score_encoded(part), wanted[:number], rtol=0, atol=1e-6)


@pytest.mark.parametrize("rows", [1, 3, 4, 9])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 5), (4, 64), (7, 33), (8, 429)])
def test_products_equal_those_of_float64(rows, outputs, inputs):
    draw = np.random.default_rng(rows * outputs)
    weights, bias, x = (
        draw.normal(size=shape).astype(np.float32)
        for shape in ((outputs, inputs), (outputs,), (rows, inputs + outputs + 4))
    )
    before = x.copy()
    dense_loops.multiply(weights, bias, x, 1, inputs + 2)
    wanted = before[:, 1 : inputs + 1].astype(np.float64) @ weights.T.astype(np.float64) + bias
    np.testing.assert_allclose(x[:, inputs + 2 : -2], wanted, rtol=0, atol=2e-5)
    kept = [*range(inputs + 2), -2, -1]
    np.testing.assert_array_equal(x[:, kept], before[:, kept])


def test_a_few_rows_score_as_with_torch():
    check(model_of())


def test_more_rows_are_scored_by_torch(monkeypatch):
    monkeypatch.setattr(dense_loops, "_MOST_PRODUCTS", 5 * (5 * 14 + 5 * 14 + 5))
    model = model_of()
    assert model.program.max_rows == 5
    counted = []
    monkeypatch.setattr(type(model.program), "scores", lambda *args: counted.append(len(args[3])))
    for number in (5, 6):
        model.score_encoded(rows_of(number))
    assert counted == [5]


def test_changed_rows_and_weights_are_used():
    model = model_of()
    rows = np.arange(10)
    tables = {name: (rows, np.random.default_rng(1).normal(size=(10, dim)).astype(np.float32))
              for name, dim in (("wide.a", 1), ("deep.a", DIM))}  # fmt: skip
    dense = {"dense.w0": -model.weights["dense.w0"], "dense.b2": torch.tensor([0.5])}
    changed = model.with_changes(tables, dense, Version("test", 2))
    check(changed)
    one = rows_of(1)
    assert abs(changed.score_encoded(one) - model.score_encoded(one)) > 1e-3
    check(model)


@pytest.mark.parametrize("change", [
    {"nodes": [["aten.exp.default", "e", [ref("wide")], {}]], "output": "e"},
    {"nodes": [["aten.add.Tensor", "e", [ref("wide"), ref("wide")], {"alpha": 2}]], "output": "e"},
    {"nodes": [["aten.add.Tensor", "e", [ref("wide"), 1.0], {}]], "output": "e"},
    {"nodes": [["aten.cat.default", "e", [[ref("wide")], 0], {}]], "output": "e"},
    {"nodes": [], "output": "deep"},
])  # fmt: skip
def test_models_with_other_operations_are_scored_by_torch(change):
    assert model_of(**change).program is None


def test_an_id_outside_its_table_follows_the_policy():
    model = model_of()
    one = rows_of(1)
    one.ids[0, 0] = 39
    with pytest.raises(IndexError, match="a: the id 39 in row 0 is not a row of its table"):
        model.score_encoded(one)


def test_a_very_negative_logit_scores_zero():
    model = model_of()
    for bias, score in ((-1e6, 0.0), (1e6, 1.0), (float("nan"), float("nan"))):
        changed = model.with_changes({}, {"dense.b2": torch.tensor([bias])}, Version("test", 2))
        for number in (1, 2):
            found = changed.score_encoded(rows_of(number))
            np.testing.assert_array_equal(found, np.full(number, score, np.float32))
