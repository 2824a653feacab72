"""Tests that training under any layout on 1 to 4 ranks equals a float64 reference written without
sbpflow.

The tolerance covers float64 sums in a different order: with table values near 0.1 and three steps,
errors stay below 1e-12.
"""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from sbpflow.embedding.rules.registry import sparse_optimizer
from sbpflow.errors import ConfigError
from sbpflow.runtime.random.streams import fill_uniform
from tests.embedding.cases import SEED, Case, Spec, join_outputs, join_tables, train
from tests.quick import quick
from tests.reference_wdl import ReferenceWdl, SparseRule

WIDE = (("wide.a", 37, 1), ("wide.b", 5, 1))
DEEP = (("deep.a", 41, 6), ("deep.b", 3, 6), ("deep.c", 64, 6))
ALL = {
    "dp": Spec("B", "local"),
    "reduce": Spec("S(0)", "reduce"),
    "unique": Spec("S(0)", "unique"),
    "columns": Spec("S(1)", "columns"),
    "unique_columns": Spec("S(1)", "unique"),
}
SCHEMES = {
    "dp": ("dp", "dp"),
    "scheme1": ("reduce", "columns"),
    "scheme2": ("reduce", "reduce"),
    "scheme3": ("unique", "unique"),
    "unique columns": ("unique", "unique_columns"),
}
OPTIMIZERS = ["sgd", "adagrad", "rowwise_adagrad", "lazy_adam"]


def make_case(wide: str, deep: str, optimizer: str, **changes: Spec) -> Case:
    specs = {name: ALL[wide] for name, _, _ in WIDE} | {name: ALL[deep] for name, _, _ in DEEP}
    return Case(
        tables={"wide": WIDE, "deep": DEEP},
        specs=specs | {name.replace("_", "."): spec for name, spec in changes.items()},
        optimizer=sparse_optimizer(optimizer, lr=0.1),
        sums=("wide",),
    )


def reference(case: Case) -> tuple[list[dict[str, np.ndarray]], ReferenceWdl]:
    """Return the outputs per step, and the trained reference."""
    tables: dict[str, tuple[int, torch.Tensor]] = {}
    for out in case.outputs():
        for table in out.tables:
            weights = torch.empty(table.shape, dtype=torch.float64)
            fill_uniform(weights, seed=SEED, name=table.name, bound=0.05, num_columns=table.dim)
            tables[table.name] = (case.features().index(table.features[0]), weights)
    rule = SparseRule(case.optimizer.name, case.optimizer.lr)
    model = ReferenceWdl({}, tables, [], rule)
    outputs = []
    for ids, weights in case.batches():
        model.num_steps += 1
        for _, table in tables.values():
            table.requires_grad_(True).grad = None
        vectors = {}
        for out in case.outputs():
            parts = [tables[t.name][1][ids[:, tables[t.name][0]].long()] for t in out.tables]
            vectors[out.name] = sum(parts) if out.combine == "sum" else torch.cat(parts, 1)
        sum((vectors[n].tanh() * w).sum() for n, w in weights.items()).backward()
        for name, (column, table) in tables.items():
            touched = torch.zeros(table.shape[0], dtype=torch.bool)
            touched[ids[:, column].long()] = True
            model._update(name, table.detach(), table.grad, touched)
            table.requires_grad_(False)
        outputs.append({name: v.detach().numpy() for name, v in vectors.items()})
    return outputs, model


def check(ranks, world_size: int, case: Case, tolerance: float = 1e-12) -> list[dict]:
    results = ranks(world_size, train, case)
    outputs, model = reference(case)
    for step, expected in zip(join_outputs(results), outputs, strict=True):
        for name, value in expected.items():
            np.testing.assert_allclose(step[name], value, rtol=0, atol=tolerance)
    for name, (weights, state) in join_tables(case, results).items():
        np.testing.assert_allclose(
            weights, model.deep[name][1].numpy(), rtol=0, atol=tolerance, err_msg=name
        )
        for key, value in state.items():
            expected_state = model.state[name][key].numpy()
            np.testing.assert_allclose(value, expected_state, rtol=0, atol=tolerance, err_msg=key)
    return results


@pytest.mark.few(14)
@pytest.mark.parametrize(
    ("world_size", "scheme", "optimizer"),
    quick(product([1, 2, 3, 4], SCHEMES, OPTIMIZERS), lambda n: n % 3 == 0),
)
def test_scheme_equals_the_reference(ranks, world_size, scheme, optimizer):
    check(ranks, world_size, make_case(*SCHEMES[scheme], optimizer))


@pytest.mark.few(8)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_compiled_kernels_equal_the_reference(ranks, scheme, optimizer):
    pytest.importorskip("numba")
    check(ranks, 3, replace(make_case(*SCHEMES[scheme], optimizer), kernel="numba"))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_mixed_layouts_equal_the_reference(ranks, optimizer):
    case = make_case(
        "reduce",
        "columns",
        optimizer,
        wide_b=Spec("S(0)", "columns", ranks=(2,)),
        deep_a=Spec("S(0)", "unique", ranks=(0, 3), sizes=(41, 0)),
        deep_b=Spec("B", "columns", ranks=(1,)),
        deep_c=Spec("S(1)", "columns", ranks=(2, 0), sizes=(1, 5)),
    )
    check(ranks, 4, case)


@pytest.mark.parametrize("kernel", ["auto", "torch"])
@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "lazy_adam"])
def test_unique_rows_of_uneven_columns_equal_the_reference(ranks, optimizer, kernel):
    case = make_case(
        "unique",
        "unique_columns",
        optimizer,
        deep_a=Spec("S(1)", "unique", ranks=(2, 0, 1), sizes=(3, 1, 2)),
        deep_b=Spec("S(1)", "unique", ranks=(2, 0, 1), sizes=(3, 1, 2)),
    )
    check(ranks, 3, replace(case, kernel=kernel))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_uneven_row_shards_and_rank_subsets_equal_the_reference(ranks, optimizer):
    case = make_case(
        "unique",
        "reduce",
        optimizer,
        wide_a=Spec("S(0)", "reduce", ranks=(1,)),
        deep_a=Spec("S(0)", "reduce", ranks=(0, 2), sizes=(1, 40)),
        deep_b=Spec("B", "local"),
        deep_c=Spec("S(0)", "reduce", ranks=(0, 2), sizes=(60, 4)),
    )
    check(ranks, 3, case)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_ranks_without_a_column_equal_the_reference(ranks, optimizer):
    case = make_case(
        "reduce",
        "columns",
        optimizer,
        wide_a=Spec("S(1)", "columns", sizes=(0, 0, 1, 0)),
        deep_a=Spec("S(1)", "columns", sizes=(0, 6, 0, 0)),
        deep_b=Spec("S(1)", "columns", ranks=(2, 0), sizes=(6, 0)),
        deep_c=Spec("(S(0), S(1))", "reduce", ranks=GRID, grid_sizes=((41, 23), (0, 6))),
    )
    check(ranks, 4, case)


GRID = ((0, 1), (3, 2))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_grids_equal_the_reference(ranks, optimizer):
    case = make_case(
        "reduce",
        "columns",
        optimizer,
        deep_a=Spec("(S(0), S(1))", "reduce", ranks=GRID),
        deep_b=Spec("(S(0), S(1))", "reduce", ranks=GRID, grid_sizes=((0, 3), (5, 1))),
        deep_c=Spec("(S(0), S(1))", "reduce", ranks=GRID),
    )
    results = check(ranks, 4, case)
    moved = {name for result in results for name, *_ in result["records"]}
    assert "deep/reduce/fwd/vectors" in moved


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "lazy_adam"])
def test_summed_tables_on_a_grid_of_some_ranks_equal_the_reference(ranks, optimizer):
    tables = (("w.a", 21, 4), ("w.b", 2, 4))
    case = Case(
        tables={"w": tables, "deep": DEEP},
        specs={name: Spec("(S(0), S(1))", "reduce", ranks=((2, 0),)) for name, *_ in tables}
        | {name: Spec("S(0)", "unique") for name, *_ in DEEP},
        optimizer=sparse_optimizer(optimizer, lr=0.1),
        sums=("w",),
    )
    check(ranks, 3, case)


PER_SHARD = sparse_optimizer("rowwise_adagrad", lr=0.1, row_state="per_shard")
# (spec, columns of each shard)
SHARDED = {
    "S(1)": (Spec("S(1)", "columns"), (4, 4, 4, 4)),
    "uneven": (Spec("S(1)", "columns", ranks=(2, 0), sizes=(12, 4)), (12, 4)),
    "grid": (Spec("(S(0), S(1))", "reduce", ranks=((0, 1), (3, 2))), (8, 8)),
    "nothing": (
        Spec("(S(0), S(1))", "reduce", ranks=((0, 1), (3, 2)), grid_sizes=((20, 21), (0, 16))),
        (0, 16),
    ),
    "no columns": (Spec("S(1)", "columns", sizes=(0, 16, 0, 0)), (16,)),
}


@pytest.mark.parametrize("kernel", ["torch", "fbgemm"])
@pytest.mark.parametrize("name", SHARDED)
def test_state_per_shard_updates_every_shard_independently(ranks, name, kernel):
    spec, widths = SHARDED[name]
    if kernel == "fbgemm":
        pytest.importorskip("fbgemm_gpu")
    case = Case(
        tables={"deep": (("t", 41, 16),)},
        specs={"t": spec},
        optimizer=PER_SHARD,
        dtype=torch.float32 if kernel == "fbgemm" else torch.float64,
        kernel=kernel,
    )
    results = ranks(4, train, case)
    assert not [step for result in results for step, *_ in result["records"] if "state" in step]
    weights = torch.empty(41, 16, dtype=torch.float64)
    fill_uniform(weights, seed=SEED, name="t", bound=0.05, num_columns=16)
    shards = [part.clone() for part in weights.split(widths, 1)]
    sums = [torch.zeros(41, 1, dtype=torch.float64) for _ in shards]
    for ids, coefficients in case.batches():
        rows = ids[:, 0].long()
        for shard, total, mine in zip(
            shards, sums, coefficients["deep"].split(widths, 1), strict=True
        ):
            vectors = shard[rows]
            grad = torch.zeros_like(shard)
            grad.index_add_(0, rows, (1 - vectors.tanh() ** 2) * mine)
            if shard.shape[1]:
                total += (grad**2).mean(1, keepdim=True)
            shard -= torch.where(grad == 0, 0, 0.1 * grad / (total.sqrt() + PER_SHARD.eps))
    (found,) = (weights for weights, _ in join_tables(case, results).values())
    atol = 1e-12 if kernel == "torch" else 2e-5
    np.testing.assert_allclose(found, torch.cat(shards, 1).numpy(), rtol=0, atol=atol)
    # The reference has one state per logical row, so the results equal it only if one shard has all
    # columns.
    _, logical = reference(replace(case, optimizer=replace(PER_SHARD, row_state="logical")))
    apart = np.abs(found - logical.deep["t"][1].numpy()).max()
    assert (apart > 1e-3) == (16 not in widths)


def test_only_rowwise_optimizers_have_row_state():
    with pytest.raises(ConfigError, match=r"adagrad has no option row_state"):
        sparse_optimizer("adagrad", lr=0.1, row_state="per_shard")
