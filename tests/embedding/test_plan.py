"""Tests plans, addresses, initial values, and kernel choice without any ranks."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.planner_memory import allocated_bytes
from sbpflow.embedding.ids.addresses import LocalAddresses, OwnerAddresses
from sbpflow.embedding.ids.batch_ids import BatchIds
from sbpflow.embedding.plan.embedding_plan import plan_embeddings
from sbpflow.embedding.plan.exchanges import check_exchange
from sbpflow.embedding.plan.growth import Eviction, Growth
from sbpflow.embedding.plan.table_batch import TableBatch
from sbpflow.embedding.plan.tables import (
    FeatureConfig,
    OutputConfig,
    TableConfig,
    TableLayout,
)
from sbpflow.embedding.rules.kernels import StackFacts
from sbpflow.embedding.rules.registry import sparse_optimizer
from sbpflow.embedding.storage.choose import choose_kernel, choose_kernels
from sbpflow.embedding.storage.lookup import Lookup
from sbpflow.errors import ConfigError
from sbpflow.runtime.random.streams import fill_uniform
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Split
from tests.embedding.cases import Case, Spec

CPU = torch.device("cpu")
SGD = sparse_optimizer("sgd", lr=0.1)
TABLES = (("deep.a", 41, 6), ("deep.b", 3, 6), ("deep.c", 64, 6), ("deep.d", 9, 6))


def make_case(**specs: Spec) -> Case:
    return Case(
        tables={"deep": TABLES},
        specs={f"deep.{name}": spec for name, spec in specs.items()},
        optimizer=sparse_optimizer("sgd", lr=0.1),
    )


def stack_of(case: Case, world_size: int, exchange: str) -> TableBatch:
    (group,) = [g for g in case.plan(world_size).groups if g.exchange == exchange]
    return group.stacks[0]


def test_ranks_receive_only_the_ids_of_their_tables():
    whole = {name: Spec("B", "columns", ranks=(n % 2,)) for n, name in enumerate("abcd")}
    plan = make_case(**whole).plan(2)
    assert plan.needed == ((0, 2), (1, 3))
    (step,) = plan.id_steps(30)
    assert step.collective == "all_to_all"
    # each rank keeps its 15 rows of two columns and sends the two other columns, 4 bytes per value
    assert [step.bytes_sent(rank) for rank in (0, 1)] == [15 * 2 * 4] * 2


def test_ids_needed_by_all_ranks_are_gathered_once():
    plan = make_case(**{name: Spec("S(1)", "columns") for name in "abcd"}).plan(2)
    (step,) = plan.id_steps(30)
    assert (step.collective, step.shape) == ("all_gather", (30, 4))


def test_tables_share_one_exchange_per_direction():
    mixed = {
        "a": Spec("S(1)", "columns"),
        "b": Spec("B", "columns", ranks=(1,)),
        "c": Spec("S(1)", "columns", ranks=(2, 0), sizes=(1, 5)),
        "d": Spec("S(1)", "columns"),
    }
    plan = make_case(**mixed).plan(3)
    (group,) = plan.groups
    assert [stack.tables[0].name for stack in group.stacks] == ["deep.a", "deep.b", "deep.c"]
    assert len(group.conversion(30, "vectors")) == len(group.conversion(30, "gradients")) == 1
    assert sum(group.rank_width(rank) for rank in range(3)) == 4 * 6


def test_one_rank_needs_no_transfers():
    plan = make_case(**{name: Spec("S(0)", "unique") for name in "abcd"}).plan(1)
    assert [group.exchange for group in plan.groups] == ["local"]
    assert plan.ahead_steps(30) == plan.forward_steps(30) == plan.steps(30, "gradients") == ()


@pytest.mark.parametrize("sizes", [None, (0, 41, 0), (1, 0, 40)])
def test_owner_addresses_identify_rows(sizes):
    specs = {name: Spec("S(0)", "unique") for name in "bcd"}
    case = make_case(a=Spec("S(0)", "unique", sizes=sizes), **specs)
    stack = stack_of(case, 3, "unique")
    addresses = OwnerAddresses(stack, range(3), CPU)
    where = {}
    for rank in range(3):
        for piece in stack.shards(rank):
            for row in range(piece.row_start, piece.row_stop):
                local = addresses.bases[rank] + piece.base + row - piece.row_start
                where[piece.table.name, row] = local
    longest = max(rows for _, rows, _ in TABLES)
    ids = torch.stack([torch.arange(longest) % rows for _, rows, _ in TABLES], 1).int()
    found = addresses.make_lookup(BatchIds(ids, None)).addresses.view(longest, 4)
    for row in range(longest):
        for column, (name, rows, _) in enumerate(TABLES):
            assert found[row, column] == where[name, row % rows]
    assert sorted(where.values()) == list(range(sum(rows for _, rows, _ in TABLES)))


def test_local_addresses_leave_out_remote_rows():
    stack = stack_of(make_case(**{name: Spec("S(0)", "reduce") for name in "abcd"}), 3, "reduce")
    ids = torch.tensor([[0, 0, 63, 8], [40, 2, 0, 0]], dtype=torch.int32)
    held = 0
    for rank in range(3):
        bases = {piece.table.name: piece for piece in stack.shards(rank)}
        lookup = LocalAddresses(stack, rank, CPU).make_lookup(BatchIds(ids, None), pooled=False)
        assert lookup.num_bags == 8
        for bag in range(8):
            rows = lookup.addresses[lookup.offsets[bag] : lookup.offsets[bag + 1]]
            table, row = TABLES[bag % 4][0], int(ids.view(-1)[bag])
            piece = bases.get(table)
            here = piece is not None and piece.row_start <= row < piece.row_stop
            assert rows.tolist() == ([piece.base + row - piece.row_start] if here else [])
            held += here
    assert held == 8


def test_ids_of_other_ranks_take_little_memory_while_they_are_left_out():
    stack = stack_of(make_case(**{name: Spec("S(0)", "reduce") for name in "abcd"}), 3, "reduce")
    ids = BatchIds(torch.zeros(400_000, 4, dtype=torch.int32), None)
    addresses = LocalAddresses(stack, 2, CPU)
    # per id: a flag, and the end of its bag with a copy
    assert allocated_bytes(lambda: addresses.make_lookup(ids, pooled=False)) < 21 * 1_600_000


def test_row_gradients_sum_all_bags_of_a_row():
    lookup = Lookup(torch.tensor([5, 2, 5, 9]), torch.tensor([0, 2, 2, 4]))
    grads = torch.tensor([[1.0], [10.0], [100.0]])
    rows, sums = lookup.row_gradients(grads)
    assert rows.tolist() == [2, 5, 9]
    assert sums.tolist() == [[1.0], [101.0], [100.0]]
    assert lookup.inverse().tolist() == [1, 0, 1, 2]


def test_initial_values_depend_on_the_position_in_the_table():
    whole = torch.empty(50, 12)
    fill_uniform(whole, seed=3, name="t", bound=0.5, num_columns=12)
    part = torch.empty(7, 5, dtype=torch.float64)
    fill_uniform(part, seed=3, name="t", bound=0.5, num_columns=12, first_row=20, first_column=4)
    assert torch.equal(part.float(), whole[20:27, 4:9])
    other = torch.empty(50, 12)
    fill_uniform(other, seed=3, name="u", bound=0.5, num_columns=12)
    assert not torch.isclose(other, whole).any()


def test_initial_values_are_uniform_and_uncorrelated():
    values = torch.empty(40_000, 8)
    fill_uniform(values, seed=1, name="t", bound=1.0, num_columns=8)
    assert values.abs().max() <= 1.0
    assert abs(float(values.mean())) < 5 * (1 / 3 / values.numel()) ** 0.5
    assert abs(float(values.var()) - 1 / 3) < 0.005
    correlation = np.corrcoef(values.T.numpy()) - np.eye(8)
    assert np.abs(correlation).max() < 5 / 40_000**0.5
    # For 32 equal bins (31 degrees of freedom), chi-squared exceeds 70 for one seed in 10,000.
    counts, _ = np.histogram(values.numpy(), bins=32, range=(-1, 1))
    expected = values.numel() / 32
    assert ((counts - expected) ** 2 / expected).sum() < 70


FACTS = {
    "width": 16,
    "optimizer": sparse_optimizer("rowwise_adagrad", lr=0.1),
    "dtype": torch.float32,
    "row_dtype": torch.float32,
    "column_split": False,
    "device_type": "cpu",
}
NO_NUMBA = {"numba": "numba is not installed"}


@pytest.mark.parametrize(
    ("change", "kernel", "reason"),
    [
        ({}, "fbgemm", "equal results"),
        ({"optimizer": SGD, "column_split": True}, "fbgemm", "equal results"),
        ({"column_split": True}, "torch", "state among ranks"),
        (
            {"optimizer": sparse_optimizer("lazy_adam", lr=0.1)},
            "torch",
            "kernel fbgemm does not support lazy_adam",
        ),
        ({"optimizer": replace(SGD, weight_decay=0.1)}, "torch", "ignores weight decay"),
        ({"width": 6}, "torch", "width 6 is not a multiple of 4"),
        ({"dtype": torch.float64}, "torch", "does not support float64 rows"),
        ({"row_dtype": torch.bfloat16}, "torch", "half-precision rows stochastically"),
    ],
)
def test_fbgemm_is_chosen_only_if_results_are_equal(change, kernel, reason):
    choice = choose_kernel("auto", StackFacts(**{**FACTS, **change}), NO_NUMBA)
    assert choice.name == kernel
    assert reason in choice.reason
    # numba supports all of these optimizers on CPU
    assert choose_kernel("auto", StackFacts(**{**FACTS, **change}), {}).name == "numba"
    facts = StackFacts(**{**FACTS, **change, "device_type": "cuda"})
    assert choose_kernel("auto", facts, {"triton": "Triton is not installed"}).name == kernel
    # on CUDA in float32, Triton is chosen if FBGEMM is not
    other = "torch" if facts.dtype == torch.float64 else "triton"
    assert choose_kernel("auto", facts, {}).name == (kernel if kernel == "fbgemm" else other)
    assert choose_kernel("numba", facts, {}).reason == "numba compiles only for CPUs"


def test_triton_does_not_round_growing_tables():
    half = {"row_dtype": torch.bfloat16, "device_type": "cuda"}
    assert choose_kernel("auto", StackFacts(**{**FACTS, **half}), {}).name == "triton"
    growing = StackFacts(**{**FACTS, **half, "grows": True})
    assert choose_kernel("auto", growing, {}).name == "torch"
    assert "rounded by key" in choose_kernel("triton", growing, {}).reason


def test_torch_is_chosen_if_no_other_kernel_is_installed(monkeypatch):
    monkeypatch.setattr("sbpflow.embedding.rules.kernels.has_fbgemm", lambda: False)
    monkeypatch.setattr("sbpflow.embedding.rules.kernels.find_spec", lambda name: None)
    plan = make_case(**{name: Spec("S(1)", "columns") for name in "abcd"}).plan(2)
    assert {c.reason for c in choose_kernels(plan, "auto").values()} == {"FBGEMM is not installed"}
    for name, product in (("fbgemm", "FBGEMM"), ("numba", "numba"), ("triton", "Triton")):
        message = rf"kernels: {name} is not available, because {product} is not installed"
        with pytest.raises(ConfigError, match=message):
            choose_kernels(plan, name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float32"}, "dtype must be torch.float32 or torch.float64, got 'float32'"),
        ({"dtype": torch.int64}, "dtype must be torch.float32 or torch.float64, got torch.int64"),
        ({"backend": "mpi"}, "backend must be gloo or nccl, got 'mpi'"),
        ({"backend": None}, "backend must be gloo or nccl, got None"),
        (
            {"row_dtype": "float16"},
            r"row_dtype must be torch.float32, torch.float16, or torch.bfloat16 .*got 'float16'",
        ),
        (
            {"comm_dtype": "bfloat16"},
            r"comm_dtype must be torch.float32, torch.float16, or torch.bfloat16 .*got 'bfloat16'",
        ),
        ({"out_of_range": "wrap"}, "out_of_range must be error or clamp or hash, got 'wrap'"),
    ],
)
def test_invalid_arguments_are_reported_with_the_choices(change, message):
    world = Placement.line("cpu", 2)
    table = TableConfig(name="a", features=("a",), num_rows=8, dim=4)
    given = {"dtype": torch.float32, "backend": "gloo", **change}
    layout = TableLayout(
        layout=Layout(world, (Split(0),)),
        exchange="unique",
        comm_dtype=given.pop("comm_dtype", None),
    )

    def plan(**arguments):
        return plan_embeddings(
            [OutputConfig(name="out", tables=(table,))],
            {"a": layout},
            features=[FeatureConfig(name="a")],
            optimizer=sparse_optimizer("sgd", lr=0.1),
            world=world,
            batch_size=8,
            **arguments,
        )

    with pytest.raises(ConfigError, match=message):
        plan(**given)


@pytest.mark.parametrize(
    ("dim", "sizes", "fix"), [(8, (8, 0), "sizes of 1 or more"), (1, None, "a dim of 2 or more")]
)
def test_unique_rows_of_a_rank_without_columns_are_refused(dim, sizes, fix):
    table = TableConfig(name="a", features=("a",), num_rows=8, dim=dim)
    world = Placement.line("cpu", 2)
    layout = TableLayout(layout=Layout(world, (Split(1, sizes),)), exchange="unique")
    message = rf"only 1 of 2 ranks have columns; use exchange columns, or {fix}$"
    with pytest.raises(ConfigError, match=message):
        check_exchange(table, layout, world)


@pytest.mark.parametrize("features", [("f",), ("f", "g"), ("g", "f"), ("h",)])
@pytest.mark.parametrize("max_rows", [1 << 16, 1 << 17])
def test_tables_that_share_features_with_a_growing_table_must_grow_like_it(features, max_rows):
    layout = TableLayout(layout=Layout(Placement.line("cpu", 2), (Split(0),)), exchange="reduce")
    tables = tuple(
        TableConfig(
            name=name,
            features=own,
            num_rows=rows,
            dim=4,
            growth=Growth(evict=Eviction(max_rows=rows)),
        )
        for name, own, rows in (("t", ("f", "g"), 1 << 16), ("u", features, max_rows))
    )

    def plan() -> None:
        plan_embeddings(
            [OutputConfig(name="o", tables=tables)],
            {"t": layout, "u": layout},
            features=[FeatureConfig(name=name) for name in "fgh"],
            optimizer=sparse_optimizer("sgd", lr=0.1),
            dtype=torch.float32,
            world=Placement.line("cpu", 2),
            backend="gloo",
            batch_size=8,
        )

    if features == ("h",) or (features == ("f", "g") and max_rows == 1 << 16):
        plan()
    else:
        shared = re.escape(str(sorted({*features} & {"f", "g"})))
        with pytest.raises(ConfigError, match=rf"shares features {shared} with growing table"):
            plan()
