"""Tests that every scheme on 1 to 4 ranks trains like plain PyTorch in one process, over 100 or
fewer steps.

The reference (tests/reference_wdl.py) shares only the starting values with sbpflow.
"""

import functools
from itertools import pairwise

import numpy as np
import pytest
import torch

from sbpflow.config.schema import Config
from sbpflow.config.table_rules import TableRule
from sbpflow.embedding.rules.ftrl import Ftrl
from sbpflow.runtime.random.streams import fill_uniform
from tests.quick import diagonal, quick
from tests.reference_wdl import ReferenceWdl, SparseRule
from tests.training.wdl_case import (
    FIELDS,
    NUM_ROWS,
    SPARSE,
    join_tables,
    make_batches,
    make_config,
    train,
)

SCHEMES = ["dp", "1", "2", "3"]
STEPS, FEW = 100, 25
# With more than two ranks, steps mostly wait for cores, so these full-length tests are marked slow.
LENGTHS = [FEW, pytest.param(STEPS, marks=pytest.mark.slow)]


def make_reference(config: Config) -> ReferenceWdl:
    dtype = torch.float64
    columns = list(NUM_ROWS)
    tables: dict[str, dict[str, tuple[int, torch.Tensor]]] = {"wide": {}, "deep": {}}
    for column, (feature, rows) in enumerate(NUM_ROWS.items()):
        kind, dim = ("wide", 1) if "x" in feature else ("deep", config.model.embedding_dim)
        name = f"{kind}.{feature}"
        weights = torch.empty(rows, dim, dtype=dtype)
        fill_uniform(weights, seed=config.run.seed, name=name, bound=0.05, num_columns=dim)
        tables[kind][name] = (column, weights)
    assert len(columns) == 6
    widths = [4 * config.model.embedding_dim + len(FIELDS.dense), *config.model.hidden, 1]
    linears = []
    for index, (inputs, outputs) in enumerate(pairwise(widths)):
        weight = torch.empty(outputs, inputs, dtype=dtype)
        bound = (6 / (inputs + outputs)) ** 0.5
        fill_uniform(
            weight,
            seed=config.run.seed,
            name=f"mlp.{index}.weight",
            bound=bound,
            num_columns=inputs,
        )
        bias = torch.zeros(outputs, dtype=dtype, requires_grad=True)
        linears.append((weight.requires_grad_(True), bias))
    flat = [p for pair in linears for p in pair]
    dense = config.optimizer.dense
    optimizer = {
        "sgd": lambda: torch.optim.SGD(flat, lr=dense.lr, momentum=getattr(dense, "momentum", 0)),
        "adam": lambda: torch.optim.Adam(flat, lr=dense.lr),
        "adamw": lambda: torch.optim.AdamW(flat, lr=dense.lr, weight_decay=0.01),
    }[dense.name]()
    sparse = config.optimizer.sparse
    rule = SparseRule(sparse.name, sparse.lr)
    model = ReferenceWdl(tables["wide"], tables["deep"], linears, rule, optimizer)
    if (wide := config.optimizer.tables.get("wide.*")) is not None:
        model.wide_rule = SparseRule("ftrl", wide.lr, beta=wide.beta, l1=wide.l1, l2=wide.l2)
    return model


@functools.cache
def reference_run(
    sparse: str, dense: str, steps: int, wide: Ftrl | None = None
) -> tuple[list[float], ReferenceWdl]:
    model = make_reference(make_config("dp", sparse, dense=dense, wide=wide))
    losses = [
        model.step(batch.labels.double(), batch.dense.double(), batch.ids)
        for batch in make_batches(steps, 30)
    ]
    return losses, model


def check_float64(
    ranks, world_size: int, config: Config, sparse: str, dense: str, steps: int = STEPS
) -> None:
    results = ranks(world_size, train, config, steps)
    losses, model = reference_run(sparse, dense, steps, config.optimizer.tables.get("wide.*"))
    for result in results:
        np.testing.assert_allclose(result["losses"], losses, rtol=1e-10, atol=0)
    for name, weights in join_tables(results, config.model.embedding_dim).items():
        expected = model.tables()[name][1].numpy()
        np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-9, err_msg=name)
    for index, (weight, bias) in enumerate(model.linears):
        for part, expected in (("weight", weight), ("bias", bias)):
            got = results[-1]["dense"][f"mlp.{index}.{part}"]
            np.testing.assert_allclose(got, expected.detach().numpy(), rtol=0, atol=1e-9)


# On one rank, every scheme runs the same code, so one scheme suffices.
PLACES = [(1, "1"), *((2, scheme) for scheme in SCHEMES)]


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("world_size", "scheme", "sparse", "steps"),
    [
        *((1, "1", rule, FEW) for rule in SPARSE),
        *((2, *pair, FEW) for pair in zip(SCHEMES, SPARSE, strict=True)),
        (2, "3", "rowwise_adagrad", STEPS),
        *quick(((*place, rule, STEPS) for place in PLACES for rule in SPARSE), lambda n: False),
    ],
)
def test_schemes_train_like_one_process_in_float64(ranks, world_size, scheme, sparse, steps):
    check_float64(ranks, world_size, make_config(scheme, sparse), sparse, "sgd", steps)


# Most sizes do not divide evenly among three ranks.
@pytest.mark.few(2)
@pytest.mark.parametrize("steps", LENGTHS)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    ("world_size", "sparse"),
    [
        *quick(((3, rule) for rule in SPARSE), lambda n: n == 0),
        *quick(((4, rule) for rule in SPARSE), lambda n: False),
    ],
)
def test_schemes_on_more_ranks_train_like_one_process(ranks, world_size, scheme, sparse, steps):
    check_float64(ranks, world_size, make_config(scheme, sparse), sparse, "sgd", steps)


@pytest.mark.few(1)
@pytest.mark.parametrize("dense", ["adam", "adamw"])
def test_dense_adam_trains_like_one_process_in_float64(ranks, dense):
    check_float64(ranks, 2, make_config("1", "lazy_adam", dense=dense), "lazy_adam", dense)


@pytest.mark.few(2)
@pytest.mark.parametrize("steps", LENGTHS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_wide_part_can_have_its_own_optimizer(ranks, scheme, steps):
    wide = Ftrl(lr=0.1, l1=0.05, l2=0.1)
    config = make_config(scheme, "rowwise_adagrad", wide=wide)
    check_float64(ranks, 3, config, "rowwise_adagrad", "sgd", steps)
    _, model = reference_run("rowwise_adagrad", "sgd", steps, wide)
    zeros = [int((table == 0).sum()) for _, table in model.wide.values()]
    assert min(zeros) > 0  # with l1, FTRL sets some weights to exactly zero
    assert all((table != 0).all() for _, table in model.deep.values())


@pytest.mark.parametrize("steps", LENGTHS)
def test_overrides_per_table_train_like_one_process(ranks, steps):
    tables = {
        "deep.C1": TableRule(sbp="S(0)", ranks=(0, 2), sizes=(30, 7), exchange="unique"),
        "deep.C2": TableRule(sbp="S(0)", ranks=(1,)),
        "deep.C3": TableRule(sbp="S(1)", ranks=(2, 1), sizes=(1, 4)),
        "wide.C3xC4": TableRule(sbp="B"),
    }
    config = make_config("2", "rowwise_adagrad", tables=tables)
    check_float64(ranks, 3, config, "rowwise_adagrad", "sgd", steps)


@pytest.mark.parametrize("steps", LENGTHS)
def test_a_grid_and_uneven_rows_train_like_one_process(ranks, steps):
    tables = {
        "deep.C1": TableRule(sbp="(S(0), S(1))", ranks=((0, 1), (2, 3))),
        "deep.C3": TableRule(sbp="(S(0), S(1))", ranks=((3, 1),), sizes=((53,), (1, 4))),
        "deep.C4": TableRule(sbp="S(0)", ranks=(0, 1, 3), sizes=(0, 1, 2)),
    }
    config = make_config("1", "rowwise_adagrad", tables=tables)
    check_float64(ranks, 4, config, "rowwise_adagrad", "sgd", steps)


def columns_on_some_ranks(dim: int) -> dict[str, TableRule]:
    return {
        "deep.C1": TableRule(sbp="S(1)", sizes=(dim, 0)),
        "deep.C2": TableRule(sbp="S(1)", sizes=(0, dim)),
        "deep.C3": TableRule(sbp="(S(0), S(1))", ranks=((1, 0),), sizes=((53,), (0, dim))),
        "wide.*": TableRule(sbp="S(1)", sizes=(0, 1)),
    }


@pytest.mark.few(1)
@pytest.mark.parametrize("sparse", quick(SPARSE, lambda n: n > 1))
def test_ranks_without_a_column_train_like_one_process(ranks, sparse):
    config = make_config("1", sparse, tables=columns_on_some_ranks(5))
    check_float64(ranks, 2, config, sparse, "sgd")


@pytest.mark.parametrize("sparse", quick(SPARSE, lambda n: n > 1))
def test_ranks_without_a_column_agree_with_one_in_float32(ranks, sparse):
    # A different order of sums changes results by 1e-7 per step.
    rules = columns_on_some_ranks(8)
    config = make_config("1", sparse, dtype="float32", kernel="auto", dim=8, tables=rules)
    alone = make_config("dp", sparse, dtype="float32", dim=8, kernel="torch")
    (single,) = ranks(1, train, alone, 10)
    for result in ranks(2, train, config, 10):
        np.testing.assert_allclose(result["losses"], single["losses"], rtol=1e-5, atol=0)


@pytest.mark.parametrize(("sparse", "scheme"), diagonal(list(SPARSE), list(SCHEMES)))
def test_schemes_agree_in_float32_over_ten_steps(ranks, scheme, sparse):
    # A different order of sums changes results by 1e-7 per step.
    config = make_config(scheme, sparse, dtype="float32", kernel="auto", dim=8)
    alone = make_config("dp", sparse, dtype="float32", dim=8, kernel="torch")
    (single,) = ranks(1, train, alone, 10)
    for result in ranks(2, train, config, 10):
        np.testing.assert_allclose(result["losses"], single["losses"], rtol=1e-5, atol=0)


DENSE_LAYOUTS = {
    "column then row": {"mlp.0.*": "S(0)", "mlp.1.weight": "S(1)"},
    "all columns": {"mlp.0.*": "S(0)", "mlp.1.*": "S(0)"},
    "all rows": {"mlp.*.weight": "S(1)"},
}


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "world_size"), diagonal(list(DENSE_LAYOUTS), [2, 3]))
def test_split_linears_train_like_one_process(ranks, world_size, name):
    # mlp.2.weight is [1, 6]: "all rows" splits its six inputs.
    config = make_config("1", "sgd", dense_layouts=DENSE_LAYOUTS[name])
    results = ranks(world_size, train, config, 40)
    losses, _ = reference_run("sgd", "sgd", 40)
    for result in results:
        np.testing.assert_allclose(result["losses"], losses, rtol=1e-10, atol=0)
