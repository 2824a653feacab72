"""Tests ids passed by callers: validation, error messages, and replacement of out-of-range ids."""

import pytest
import torch

from sbpflow.embedding.ids.batch_ids import Bags, BatchIds, IdBounds, Lists
from sbpflow.embedding.ids.reader import IdReader
from sbpflow.embedding.plan.embedding_plan import EmbeddingPlan, plan_embeddings
from sbpflow.embedding.plan.tables import FeatureConfig, OutputConfig, TableConfig, TableLayout
from sbpflow.embedding.rules.registry import sparse_optimizer
from sbpflow.errors import ConfigError, DataError
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Split, parse_nd_sbp

FEATURES = (
    FeatureConfig(name="a"),
    FeatureConfig(name="b", hotness=2),
    FeatureConfig(name="c", hotness=3, ragged=True),
    FeatureConfig(name="d", hotness=2, weighted=True),
)
ROWS = {"a": 10, "b": 20, "c": 30, "d": 40}


def plan_tables(outputs, layouts, *, size, features=FEATURES, policy="error") -> EmbeddingPlan:
    return plan_embeddings(
        outputs,
        layouts,
        features=features,
        optimizer=sparse_optimizer("sgd", lr=0.1),
        dtype=torch.float32,
        world=Placement.line("cpu", size),
        backend="gloo",
        batch_size=8,
        out_of_range=policy,
    )


def make_plan(policy: str = "error", features: tuple[FeatureConfig, ...] = FEATURES, unused=()):
    tables = tuple(
        TableConfig(name=f"t.{f.name}", features=(f.name,), num_rows=ROWS[f.name], dim=4)
        for f in features
        if f.name not in unused
    )
    layout = TableLayout(layout=Layout(Placement.line("cpu", 2), (Split(0),)), exchange="unique")
    return plan_tables(
        [OutputConfig(name="deep", tables=tables)],
        {table.name: layout for table in tables},
        size=2,
        features=features,
        policy=policy,
    )


def reader(plan: EmbeddingPlan) -> IdReader:
    return IdReader(plan, 1, torch.device("cpu"))


def good() -> dict:
    return {
        "a": torch.tensor([1, 2]),
        "b": torch.tensor([[3, 4], [5, 6]], dtype=torch.int32),
        "c": Bags(torch.tensor([7, 8, 9]), torch.tensor([0, 0, 3])),
        "d": Bags(torch.tensor([1, 2, 3]), torch.tensor([0, 1, 3]), torch.tensor([0.5, 1.0, 2.0])),
    }


def test_matrix_and_lists_are_ordered_by_sample():
    batch = reader(make_plan()).read(good())
    assert batch.matrix.tolist() == [[1, 3, 4], [2, 5, 6]]
    assert batch.matrix.dtype == torch.int32
    assert batch.lists.lengths.tolist() == [[0, 1], [3, 2]]
    assert batch.lists.values.tolist() == [1, 7, 8, 9, 2, 3]
    assert batch.lists.weights.tolist() == [0.5, 1.0, 1.0, 1.0, 1.0, 2.0]


CHANGES = {
    "feature c is missing": {"c": None},
    "feature x is unknown": {"x": torch.tensor([1, 2])},
    "must have the same number of samples": {"a": torch.tensor([1, 2, 3])},
    "feature a has exactly 1 ids per sample, got Bags": {
        "a": Bags(torch.ones(2).int(), torch.arange(3))
    },
    "feature c .* pass Bags": {"c": torch.tensor([1, 2])},
    r"feature b: ids must be .* got torch.int64\[2\]": {"b": torch.tensor([1, 2])},
    r"feature a: ids must be .* got torch.float32\[2\]": {"a": torch.tensor([1.0, 2.0])},
    "feature c: values and offsets must be .* got values torch.float32": {
        "c": Bags(torch.ones(3), torch.tensor([0, 0, 3]))
    },
    "feature c: offsets must run from 0 to 3": {
        "c": Bags(torch.tensor([7, 8, 9]), torch.tensor([0, 0, 2]))
    },
    r"feature c: sample 1 has 4 ids, but 0\.\.3": {
        "c": Bags(torch.tensor([7, 8, 9, 1]), torch.tensor([0, 0, 4]))
    },
    "feature c: sample 0 has -1 ids": {"c": Bags(torch.tensor([7]), torch.tensor([0, -1, 1]))},
    r"feature d: weights must have shape \[3\], one per id, got none": {
        "d": Bags(torch.tensor([1, 2, 3]), torch.tensor([0, 1, 3]))
    },
    r"feature c: offsets must have shape \[samples \+ 1\], got \[0\]": {
        "c": Bags(torch.tensor([7]), torch.tensor([], dtype=torch.int64))
    },
    "feature c: values and offsets must be .* got values torch.int64.*offsets torch.float32": {
        "c": Bags(torch.tensor([7, 8, 9]), torch.tensor([0.0, 1.7, 3.0]))
    },
    "feature a: ids must be a tensor or Bags, got list": {"a": [1, 2]},
    "feature c is not a weighted feature, got weights": {
        "c": Bags(torch.tensor([7, 8, 9]), torch.tensor([0, 0, 3]), torch.ones(3))
    },
    r"field a has id 10 in row 1 of rank 1's part of the batch, but only ids 0\.\.9": {
        "a": torch.tensor([0, 10])
    },
    r"feature d: weights are treated as data.*pass weights.detach\(\)": {
        "d": Bags(
            torch.tensor([1, 2, 3]),
            torch.tensor([0, 1, 3]),
            torch.tensor([0.5, 1.0, 2.0], requires_grad=True),
        )
    },
    r"field b has id -1 in row 0 of rank 1's part of the batch, but only ids 0\.\.19": {
        "b": torch.tensor([[0, -1], [5, 6]])
    },
    r"field c has id 30 in row 1 of rank 1's part of the batch, but only ids 0\.\.29": {
        "c": Bags(torch.tensor([7, 8, 30]), torch.tensor([0, 0, 3]))
    },
}


@pytest.mark.parametrize("message", CHANGES)
def test_malformed_ids_are_rejected_with_the_feature_name(message):
    ids = good() | CHANGES[message]
    if None in ids.values():
        ids = {name: value for name, value in ids.items() if value is not None}
    with pytest.raises(DataError, match=message):
        reader(make_plan()).read(ids)


def test_a_matrix_is_accepted_only_for_fixed_length_features():
    with pytest.raises(DataError, match=r"pass a dictionary with Bags for \['c', 'd'\]"):
        reader(make_plan()).read(torch.zeros(2, 3, dtype=torch.int32))
    with pytest.raises(DataError, match=r"must be int32 or int64 \[samples, 3\]"):
        reader(make_plan(features=FEATURES[:2])).read(torch.zeros(2, 2, dtype=torch.int32))


@pytest.mark.parametrize("policy", ["error", "clamp", "hash"])
def test_ids_of_unused_features_are_not_checked(policy):
    ids = torch.tensor([[1, -7, 2**40], [2, 10**12, -1]])
    one = reader(make_plan(policy, FEATURES[:2], unused=("b",)))
    assert one.read(ids).matrix[:, 0].tolist() == [1, 2]
    assert one.out_of_range.tolist() == [0, 0]
    ids[1, 0] = 10
    if policy == "error":
        with pytest.raises(DataError, match=r"field a has id 10 in row 1.*only ids 0\.\.9"):
            one.read(ids)
    else:
        one.read(ids)
        assert one.out_of_range.tolist() == [1, 0]


def plan_shared(policy: str, big: int = 1000) -> EmbeddingPlan:
    tables = tuple(
        TableConfig(name=name, features=("x",), num_rows=rows, dim=4)
        for name, rows in (("small", 10), ("big", big))
    )
    layout = TableLayout(layout=Layout(Placement.line("cpu", 2), (Split(0),)), exchange="unique")
    outputs = [OutputConfig(name=t.name, tables=(t,)) for t in tables]
    layouts = {table.name: layout for table in tables}
    features = (FeatureConfig(name="x"),)
    return plan_tables(outputs, layouts, size=2, features=features, policy=policy)


@pytest.mark.parametrize("policy", ["clamp", "hash"])
def test_replacing_ids_requires_tables_of_equal_size(policy):
    message = (
        f"feature x: out_of_range {policy} .* small \\(10 rows\\), big \\(1000 rows\\); "
        ".*give all the same num_rows, or use out_of_range: error"
    )
    with pytest.raises(ConfigError, match=message):
        plan_shared(policy)
    ids = reader(plan_shared(policy, big=10)).read(torch.tensor([[500], [3]])).matrix
    assert 0 <= int(ids[0, 0]) < 10
    assert int(ids[1, 0]) == 3


def test_id_must_be_a_row_of_every_table_of_its_feature():
    one = reader(plan_shared("error"))
    assert one.read(torch.tensor([[9]])).matrix.tolist() == [[9]]
    with pytest.raises(DataError, match=r"field x has id 500 in row 0.*only ids 0\.\.9"):
        one.read(torch.tensor([[500]]))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("policy", ["clamp", "hash"])
def test_out_of_range_ids_are_replaced_and_counted(policy, dtype):
    plan = make_plan(policy)
    ids = good() | {
        "a": torch.tensor([-5, 99], dtype=dtype),
        "c": Bags(torch.tensor([7, 1000, -1], dtype=dtype), torch.tensor([0, 1, 3])),
    }
    one, two = reader(plan), reader(plan)
    batch = one.read(ids)
    assert one.out_of_range.tolist() == [2, 0, 2, 0]
    inside = batch.lists.values[batch.lists.lengths.new_tensor([0, 2, 3]).long()]
    if policy == "clamp":
        assert batch.matrix[:, 0].tolist() == [0, 9]
        assert inside.tolist() == [7, 29, 0]
    assert 0 <= int(batch.matrix[:, 0].min()) <= int(batch.matrix[:, 0].max()) < 10
    assert 0 <= int(inside.min()) <= int(inside.max()) < 30
    assert int(inside[0]) == 7
    again = two.read(ids)
    assert torch.equal(batch.matrix, again.matrix)
    assert torch.equal(batch.lists.values, again.lists.values)


def test_hashed_ids_spread_over_the_table():
    plan = make_plan("hash", features=FEATURES[:1])
    ids = torch.arange(10, 10_010).unsqueeze(1)
    counts = torch.bincount(reader(plan).read(ids).matrix[:, 0].long(), minlength=10)
    # 10,000 ids over 10 rows; the limit is five standard deviations (30 ids each)
    assert (counts - 1000).abs().max() < 150


def test_invalid_plans_are_rejected():
    with pytest.raises(ConfigError, match="feature a: hotness must be 1 or more, got 0"):
        FeatureConfig(name="a", hotness=0)
    with pytest.raises(ConfigError, match=r"table t: features must contain at least one feature"):
        TableConfig(name="t", features=(), num_rows=1, dim=1)
    table = TableConfig(name="t", features=("nowhere",), num_rows=1, dim=1)
    world = Placement.line("cpu", 1)
    layouts = {"t": TableLayout(layout=Layout(world, (Split(0),)), exchange="unique")}

    def plan(outputs):
        return plan_tables(outputs, layouts, size=1)

    with pytest.raises(ConfigError, match="table t: the data has no feature 'nowhere'"):
        plan([OutputConfig(name="o", tables=(table,))])
    twice = [OutputConfig(name=name, tables=(table,)) for name in "op"]
    with pytest.raises(ConfigError, match="table t: this name is used twice"):
        plan(twice)


@pytest.mark.parametrize(
    ("sbp", "ranks", "exchange", "use"),
    [
        ("B", (0, 1), "reduce", "use local"),
        ("B", (0, 1), "unique", "use local"),
        ("B", (0,), "local", "use columns"),
        ("S(0)", (0, 1), "local", "use reduce or unique"),
        ("S(1)", (1,), "unique", "use columns"),
        (
            "(S(1), S(0))",
            ((0, 1), (2, 3)),
            "reduce",
            "use S(0), S(1), (S(0), S(1)), or, on all ranks, B or (S(0), S(0))",
        ),
    ],
)
def test_exchange_that_does_not_support_the_layout_is_rejected(sbp, ranks, exchange, use):
    size = 4 if isinstance(ranks[0], tuple) else 2
    table = TableConfig(name="t", features=("a",), num_rows=10, dim=4)
    layout = Layout(Placement.of("cpu", ranks), parse_nd_sbp(sbp))
    with pytest.raises(
        ConfigError, match=f"table t: exchange {exchange} does not support"
    ) as error:
        plan_tables(
            [OutputConfig(name="o", tables=(table,))],
            {"t": TableLayout(layout=layout, exchange=exchange)},
            size=size,
        )
    assert use in str(error.value)


def test_unique_columns_need_a_column_on_every_rank():
    table = TableConfig(name="t", features=("a",), num_rows=10, dim=1)
    layout = Layout(Placement.of("cpu", (0, 1)), parse_nd_sbp("S(1)"))
    layouts = {"t": TableLayout(layout=layout, exchange="unique")}
    with pytest.raises(ConfigError, match=r"table t: unique of S\(1\).*or a dim of 2"):
        plan_tables([OutputConfig(name="o", tables=(table,))], layouts, size=2)


BOUNDS = IdBounds(columns=(10, 20, 20), lists=(30, 40), lengths=(3, 2))


def as_batch(bounds=BOUNDS):
    """Return the ids of ``good`` as a loader delivers them."""
    return BatchIds(
        torch.tensor([[1, 3, 4], [2, 5, 6]], dtype=torch.int32),
        Lists(
            torch.tensor([[0, 1], [3, 2]], dtype=torch.int32),
            torch.tensor([1, 7, 8, 9, 2, 3], dtype=torch.int32),
            torch.tensor([0.5, 1, 1, 1, 1, 2]),
        ),
        bounds,
    )


@pytest.mark.parametrize("bounds", [BOUNDS, None])
def test_lists_of_a_loader_equal_those_of_a_mapping(bounds):
    got, want = reader(make_plan()).read(as_batch(bounds)), reader(make_plan()).read(good())
    for name in ("lengths", "values", "weights"):
        assert torch.equal(getattr(got.lists, name), getattr(want.lists, name))
    assert torch.equal(got.matrix, want.matrix)


def test_ids_with_fitting_bounds_are_not_copied():
    given = as_batch()
    got = reader(make_plan()).read(given)
    assert got.matrix is given.matrix
    assert got.lists.values is given.lists.values
    assert got.lists.lengths is given.lists.lengths
    assert got.lists.weights is given.lists.weights


@pytest.mark.parametrize(
    "bounds",
    [
        IdBounds((10, 20, 21), (30, 40), (3, 2)),
        IdBounds((10, 20, 20), (30, 41), (3, 2)),
        IdBounds((10, 20, 20), (30, 40), (3, 3)),
        IdBounds((10, 20), (30, 40), (3, 2)),
        None,
    ],
)
def test_ids_without_fitting_bounds_are_checked(bounds):
    """Table d has only 40 rows, so ids within larger bounds must still be checked."""
    given = as_batch(bounds)
    given.lists.values[5] = 40
    with pytest.raises(DataError, match="field d has id 40"):
        reader(make_plan()).read(given)
    assert reader(make_plan()).read(as_batch(bounds)).lists.values.tolist() == [1, 7, 8, 9, 2, 3]


def test_lists_of_unused_features_are_dropped():
    got = reader(make_plan(unused=("c",))).read(as_batch())
    assert got.lists.lengths.tolist() == [[1], [2]]
    assert got.lists.values.tolist() == [1, 2, 3]
    assert got.lists.weights.tolist() == [0.5, 1, 2]
    unweighted = reader(make_plan(unused=("d",))).read(as_batch())
    assert unweighted.lists.values.tolist() == [7, 8, 9]
    assert unweighted.lists.weights is None


def test_matrix_features_of_a_ragged_table_become_lists():
    """Features a and c share a table, and one of them has lists of ids."""
    layout = TableLayout(layout=Layout(Placement.line("cpu", 2), (Split(0),)), exchange="unique")
    features = FEATURES[:1] + FEATURES[2:3]
    table = TableConfig(name="t", features=("a", "c"), num_rows=30, dim=4)
    plan = plan_tables(
        [OutputConfig(name="deep", tables=(table,))], {"t": layout}, size=2, features=features
    )
    lists = Lists(as_batch().lists.lengths[:, :1], torch.tensor([7, 8, 9]).int(), None)
    matrix = as_batch().matrix[:, :1]
    got = reader(plan).read(BatchIds(matrix, lists, IdBounds((10,), (30,), (3,))))
    assert got.lists.lengths.tolist() == [[1, 0], [1, 3]]
    assert got.lists.values.tolist() == [1, 2, 7, 8, 9]


def test_batch_of_wrong_shape_is_rejected():
    given = as_batch()
    with pytest.raises(DataError, match=r"a matrix \[samples, 3\] .* got \[2, 2\] and 2 lists"):
        reader(make_plan()).read(BatchIds(given.matrix[:, :2], given.lists, BOUNDS))
    with pytest.raises(DataError, match="features must have the same number of samples"):
        reader(make_plan()).read(BatchIds(given.matrix[:1], given.lists, BOUNDS))
    with pytest.raises(DataError, match="and 0 lists"):
        reader(make_plan()).read(BatchIds(given.matrix, None, BOUNDS))
