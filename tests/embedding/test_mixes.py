"""Tests that random mixes of all engine features equal a reference written without sbpflow.

Float64 sums in a different order stay within 1e-10 over 20 steps; comments explain the bounds for
float32.
"""

from collections import Counter
from dataclasses import replace
from importlib.util import find_spec
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, note, seed, settings
from hypothesis import strategies as st

from sbpflow.embedding.plan.tables import FeatureConfig, OutputConfig, TableConfig
from sbpflow.embedding.rules.base import SparseOptimizer
from sbpflow.embedding.rules.registry import sparse_optimizer
from sbpflow.embedding.storage.store import DeviceStore
from sbpflow.errors import DataError
from tests.embedding.cases import Spec
from tests.embedding.mixes import Mix, as_input, expected, make_collection, train
from tests.embedding.reference import ReferenceTable
from tests.quick import diagonal

KERNELS = ["torch", *(["numba"] if find_spec("numba") else [])]
RULES = [
    sparse_optimizer("sgd", lr=0.1, weight_decay=0.3),
    sparse_optimizer("adagrad", lr=0.1, initial_accumulator=0.1),
    sparse_optimizer("rowwise_adagrad", lr=0.1, eps=1e-3),
    sparse_optimizer("rowwise_adagrad", lr=0.1, weight_decay=0.1),
    sparse_optimizer("lazy_adam", lr=0.1),
    sparse_optimizer("ftrl", lr=0.1, beta=1.0, l1=0.02, l2=0.1),
    sparse_optimizer("ftrl", lr=0.1, beta=0.0),
]


@st.composite
def features(draw, number: int) -> FeatureConfig:
    ragged = draw(st.booleans())
    return FeatureConfig(
        name=f"f{number}",
        hotness=draw(st.sampled_from([1, 1, 1, 2, 5])),
        ragged=ragged,
        weighted=draw(st.booleans()) and draw(st.booleans()),
    )


@st.composite
def specs(draw, rows: int, dim: int, world_size: int) -> Spec:
    kinds = ["local", "whole", "reduce", "unique"]
    if dim >= 2 and world_size >= 2:
        kinds += ["columns", *(["grid"] if world_size == 4 else [])]
    if world_size >= 2:
        kinds.append("two level")
    kind = draw(st.sampled_from(kinds))
    ranks = draw(st.permutations(range(world_size)))
    if kind == "local":
        return Spec("B", "local")
    if kind == "whole":
        return Spec(draw(st.sampled_from(["B", "S(0)", "S(1)"])), "columns", ranks=(ranks[0],))
    if kind == "grid":
        return Spec("(S(0), S(1))", "reduce", ranks=(tuple(ranks[:2]), tuple(ranks[2:])))
    if kind == "two level":
        width = draw(st.sampled_from([n for n in (1, 2, world_size) if world_size % n == 0]))
        hosts = tuple(tuple(sorted(ranks[n : n + width])) for n in range(0, world_size, width))
        return Spec("(S(0), S(0))", "unique", ranks=hosts)
    if kind == "columns":
        count = draw(st.integers(2, min(dim, world_size)))
        if count == world_size and draw(st.booleans()):
            return Spec("S(1)", "unique", ranks=tuple(ranks))
        return Spec("S(1)", "columns", ranks=tuple(ranks[:count]))
    count = draw(st.integers(1, world_size))
    cuts = sorted(draw(st.lists(st.integers(0, rows), min_size=count - 1, max_size=count - 1)))
    edges = [0, *cuts, rows]
    uneven = tuple(b - a for a, b in pairwise(edges))
    sizes = draw(st.sampled_from([None, uneven]))
    return Spec("S(0)", kind, ranks=tuple(ranks[:count]), sizes=sizes)


@st.composite
def mixes(draw) -> Mix:
    world_size = draw(st.integers(1, 4))
    listed = tuple(draw(features(n)) for n in range(draw(st.integers(1, 5))))
    outputs: list[OutputConfig] = []
    chosen: dict[str, Spec] = {}
    for name in draw(st.sampled_from([("deep",), ("deep", "wide")])):
        tables: list[TableConfig] = []
        common = draw(st.integers(1, 6))
        for number in range(draw(st.integers(1, 4))):
            rows = draw(st.sampled_from([1, 3, 17, 64]))
            dim = common if name == "wide" else draw(st.sampled_from([common, 1, 4]))
            of = draw(st.lists(st.sampled_from(listed), min_size=1, max_size=2, unique=True))
            table = TableConfig(
                name=f"{name}.{number}",
                features=tuple(feature.name for feature in of),
                num_rows=rows,
                dim=dim,
                pooling=draw(st.sampled_from(["sum", "mean"])),
                optimizer=draw(st.sampled_from([None, *RULES])),
            )
            tables.append(table)
            chosen[table.name] = draw(specs(rows, dim, world_size))
        combine = "sum" if name == "wide" else "concat"
        outputs.append(OutputConfig(name=name, tables=tuple(tables), combine=combine))
    return Mix(
        features=listed,
        outputs=tuple(outputs),
        specs=chosen,
        optimizer=draw(st.sampled_from(RULES)),
        world_size=world_size,
        seed=draw(st.integers(0, 999)),
        accumulate=draw(st.sampled_from([1, 1, 2])),
        overlap=draw(st.booleans()),
        ids_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        kernel=draw(st.sampled_from(KERNELS)),
    )


def check(ranks, mix: Mix, tolerance: float, rtol: float = 0.0) -> None:
    results = ranks(mix.world_size, train, mix)
    outputs, tables = expected(mix)
    for step, values in enumerate(outputs):
        for name, value in values.items():
            got = np.concatenate([result["outputs"][step][name] for result in results])
            np.testing.assert_allclose(
                got, value, rtol=rtol, atol=tolerance, err_msg=f"{name} {step}"
            )
    covered = {name: np.zeros(table.weights.shape, bool) for name, table in tables.items()}
    for result in results:
        for name, (r0, r1, c0, c1), weights, state in result["pieces"]:
            table = tables[name]
            np.testing.assert_allclose(
                weights, table.weights[r0:r1, c0:c1], rtol=rtol, atol=tolerance, err_msg=name
            )
            covered[name][r0:r1, c0:c1] = True
            for key, value in state.items():
                whole = table.state.get(key)
                if whole is None:  # no rank has touched a row of this table
                    continue
                want = whole[r0:r1] if whole.ndim == 1 else whole[r0:r1, c0:c1]
                np.testing.assert_allclose(value, want, rtol=rtol, atol=tolerance, err_msg=key)
    assert all(cover.all() for cover in covered.values())


@pytest.mark.slow
@seed(20)
@settings(
    max_examples=8,
    deadline=None,
    database=None,
    derandomize=False,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(mix=mixes())
def test_random_mix_equals_the_reference(ranks, mix):
    note(f"from tests.embedding.test_mixes import *\ncheck(ranks, {mix!r}, 1e-10)")
    check(ranks, mix, 1e-10)


FEATURES = (
    FeatureConfig(name="one"),
    FeatureConfig(name="three", hotness=3),
    FeatureConfig(name="bags", hotness=4, ragged=True, weighted=True),
)


UNIQUE_COLUMNS = "unique S(1)"


def mix_of(exchange: str, dim: int, rule: SparseOptimizer, **changes) -> Mix:
    """Return a mix with all kinds of features, on two ranks, whose tables all have the same
    layout.
    """
    tables = tuple(
        TableConfig(name=f"deep.{n}", features=names, num_rows=rows, dim=dim, pooling=pooling)
        for n, (names, rows, pooling) in enumerate(
            [(("one",), 40, "sum"), (("three", "one"), 9, "mean"), (("bags",), 64, "sum")]
        )
    )
    sbp = {"local": "B", "columns": "S(1)", UNIQUE_COLUMNS: "S(1)"}.get(exchange, "S(0)")
    return Mix(
        features=FEATURES,
        outputs=(OutputConfig(name="deep", tables=tables),),
        specs={table.name: Spec(sbp, exchange.split()[0]) for table in tables},
        optimizer=rule,
        world_size=2,
        **changes,
    )


EXCHANGES = ["local", "columns", "reduce", "unique", UNIQUE_COLUMNS]


# FBGEMM gives equal results for these optimizers, except where ranks share a row's state.
FBGEMM_RULES = [sparse_optimizer("sgd", lr=0.1), RULES[1], RULES[2]]
FBGEMM_CASES = [
    (exchange, rule)
    for exchange in EXCHANGES
    for rule in FBGEMM_RULES
    if rule.name != "rowwise_adagrad" or exchange not in ("columns", "unique S(1)")
]


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("exchange", "rule"), FBGEMM_CASES, ids=lambda value: getattr(value, "name", value)
)
def test_fbgemm_equals_the_reference(ranks, exchange, rule):
    # Weights are near 0.05 and updates near 0.1, so float32 rounding adds an error of about 1e-8 in
    # each of the 20 steps. Adagrad's first steps divide small gradients by their own magnitude, so
    # that three more digits may be lost. Adagrad's sums of squares reach about 100, with a relative
    # accuracy of 1e-6.
    pytest.importorskip("fbgemm_gpu")
    mix = mix_of(exchange, 8, rule, dtype=torch.float32, kernel="fbgemm")
    check(ranks, mix, 2e-5, rtol=1e-6)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("comm_dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float16, 2e-2)]
)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_vectors_in_half_precision_stay_close(ranks, exchange, comm_dtype, tolerance):
    # With vectors of either dtype, gradients are sent as bf16 (8 significant bits). The gradients
    # are at most 4 in magnitude, the learning rate is at most 0.1, and there are 20 steps.
    mix = mix_of(exchange, 8, sparse_optimizer("sgd", lr=0.1), comm_dtype=comm_dtype)
    check(ranks, mix, tolerance)


@pytest.mark.few(4)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 5e-2), (torch.float16, 6e-3)])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_rows_in_half_precision_stay_close(ranks, exchange, dtype, tolerance):
    # Values reach 1.2, where neighboring values differ by 2^-7 in bf16 and by 2^-10 in fp16. The
    # standard deviation of one random rounding error is at most half this distance, and that of a
    # sum of 20 such errors is at most 2.3 times the distance. The bounds are six times the
    # distance.
    mix = mix_of(exchange, 8, sparse_optimizer("sgd", lr=0.1), row_dtype=dtype)
    check(ranks, mix, tolerance)


@pytest.mark.few(2)
@pytest.mark.parametrize(("exchange", "kernel"), diagonal(list(EXCHANGES), ["auto", "torch"]))
def test_overlap_and_table_order_do_not_change_results(ranks, exchange, kernel):
    few = (13, 8, 0, 17, 5, 1, 9, 4, 12, 3)
    mix = mix_of(exchange, 8, RULES[2], dtype=torch.float32, kernel=kernel, batch_sizes=few)
    (output,) = mix.outputs
    others = [
        replace(mix, overlap=False),
        replace(mix, outputs=(replace(output, tables=output.tables[::-1]),)),
        # The first table is never alone: the second table, which shares a feature with it, has
        # fewer rows, which limit the sampled ids.
        *(
            replace(mix, outputs=(replace(output, tables=tables),))
            for tables in (output.tables[:2], output.tables[1:2], output.tables[2:])
        ),
    ]
    together = pieces_of(ranks(2, train, mix))
    seen: set[str] = set()
    for other in others:
        for (name, place), weights in pieces_of(ranks(2, train, other)).items():
            np.testing.assert_array_equal(weights, together[name, place], err_msg=name)
            seen.add(name)
    assert seen == {table.name for table in output.tables}


def pieces_of(run) -> dict:
    return {
        (name, place): weights for result in run for name, place, weights, _ in result["pieces"]
    }


def bytes_of(world, mix: Mix) -> dict[str, int]:
    """Return the bytes that this rank sends in each transfer, summed over all batches."""
    world.log.records.clear()
    world.log.enabled = True
    train(world, mix)
    sent: dict[str, int] = {}
    for record in world.log.records:
        sent[record.step_id] = sent.get(record.step_id, 0) + record.bytes_sent
    return sent


@pytest.mark.parametrize("exchange", ["unique", UNIQUE_COLUMNS])
def test_unique_sends_each_row_once_in_each_direction(ranks, exchange):
    mix = mix_of(exchange, 8, RULES[2], dtype=torch.float32)
    sent = ranks(2, bytes_of, mix)
    by_rows = exchange == "unique"
    rows = 0  # number of rows that one rank requests and the other stores, at least in part
    for step, size in enumerate(mix.batch_sizes):
        bags = mix.bags(step)
        for rank in range(2):
            low, high = (0, (size + 1) // 2) if rank == 0 else ((size + 1) // 2, size)
            for table in mix.tables():
                named = {
                    row
                    for feature in table.features
                    for ids, _ in bags[feature][low:high]
                    for row in ids
                }
                # Rows are split evenly: rank 0 owns the rows below this number.
                first = (table.num_rows + 1) // 2
                rows += sum(not by_rows or (row < first) != (rank == 0) for row in named)
    assert rows > 0
    width = 8 if by_rows else 4
    for suffix, itemsize in (
        ("fwd/ids", 4),
        *((f"{way}/vectors", 4 * width) for way in ("fwd", "bwd")),
    ):
        total = sum(n for s in sent for name, n in s.items() if name.endswith(suffix))
        assert total == rows * itemsize, suffix


@pytest.mark.parametrize("rule", [RULES[2], RULES[4]], ids=lambda rule: rule.name)
def test_grid_can_have_more_rank_columns_than_table_columns(ranks, rule):
    names = ("one", "three")
    tables = tuple(
        TableConfig(name=f"deep.{dim}", features=names[:count], num_rows=20, dim=dim)
        for dim, count in ((1, 2), (4, 1))
    )
    spec = Spec("(S(0), S(1))", "reduce", ranks=((0, 1), (3, 2)))
    mix = replace(
        mix_of("reduce", 4, rule),
        outputs=(OutputConfig(name="deep", tables=tables),),
        specs={table.name: spec for table in tables},
        world_size=4,
    )
    check(ranks, mix, 1e-10)


@pytest.mark.parametrize("name", ["adagrad", "rowwise_adagrad", "ftrl"])
def test_reference_keeps_fractions_of_integer_initial_state(name):
    rows = {0: np.full(2, 0.5)}
    for start in (1, 1.0):
        table = ReferenceTable(np.ones((3, 2)), "sum")
        table.update(sparse_optimizer(name, lr=0.1, initial_accumulator=start), rows, 1, 0.1)
        assert np.all(table.state["sum"][0] == 1.25)


def small_gradient(world, exchange: str, comm_dtype: torch.dtype | None) -> float:
    """Return how far Adagrad's first step moves a row whose gradient underflows if sent as fp16."""
    mix = mix_of(exchange, 8, sparse_optimizer("rowwise_adagrad", lr=0.1, eps=1e-12))
    mix = replace(mix, dtype=torch.float32, comm_dtype=comm_dtype, batch_sizes=(2,))
    collection = make_collection(world, mix)
    before = [stored.weights.clone() for stored in collection.stored()]
    ids = as_input(mix, mix.bags(0), slice(world.rank, world.rank + 1))
    (vectors,) = collection.forward(ids, 2, training=True).values()
    vectors.grad = torch.full_like(vectors, 1e-9)
    collection.apply_gradients(1)
    moved = [(s.weights - old).abs() for s, old in zip(collection.stored(), before, strict=True)]
    return max(float(part.max()) for part in moved if part.numel())


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_gradients_below_fp16_range_still_update_rows(ranks, exchange):
    moved = [
        max(ranks(2, small_gradient, exchange, comm_dtype)) for comm_dtype in (None, torch.float16)
    ]
    assert moved[1] == pytest.approx(moved[0], rel=0.02)
    assert moved[0] > 0.05


def passed_samples(world, exchange: str) -> str:
    mix = mix_of(exchange, 8, RULES[2])
    collection = make_collection(world, mix)
    ids = as_input(mix, mix.bags(0), slice(0, 3 + 2 * world.rank))
    with pytest.raises(DataError) as error:
        collection.start_id_exchange(ids, 8, training=True)
    return str(error.value)


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_batch_part_of_wrong_size_is_rejected(ranks, exchange):
    messages = ranks(2, passed_samples, exchange)
    assert "rank 0: got the ids of 3 samples; pass 4" in messages[0]
    assert "rank 1: got the ids of 5 samples" in messages[1]


class Watched(DeviceStore):
    """Counts leased rows, and records the order of calls for each batch."""

    def __init__(self, kernel) -> None:
        super().__init__(kernel)
        self.held = Counter()
        self.most = 0
        self.calls: dict[int, list[str]] = {}
        self.leased: dict[int, list[int]] = {}
        lookup, update = kernel.lookup, kernel.update

        def checked_lookup(wanted, lr=None):
            assert lr is None or set(wanted.addresses.tolist()) <= set(self.held)
            return lookup(wanted, lr)

        def checked_update(wanted, grads, lr, step):
            if not self.updates_others:
                assert set(wanted.addresses.tolist()) <= set(self.held)
            update(wanted, grads, lr, step)

        kernel.lookup, kernel.update = checked_lookup, checked_update

    updates_others = False

    def announce(self, number: int, addresses: torch.Tensor) -> None:
        self.calls[number] = ["announce"]
        self.leased[number] = addresses.tolist()
        self.held.update(self.leased[number])
        self.most = max(self.most, len(self.held))

    def admit(self, number: int) -> None:
        self.calls[number].append("admit")

    def release(self, number: int) -> None:
        self.calls[number].append("release")
        self.held.subtract(self.leased.pop(number))
        self.held = +self.held


def watch(world, mix: Mix) -> list[tuple[int, int, dict[int, list[str]]]]:
    """Return, for each of this rank's stores, the number of rows leased at the end, the maximum
    number of leased rows, and the calls by batch.
    """
    watched: list[Watched] = []

    def make(request) -> Watched:
        watched.append(Watched(request.make_kernel(request.num_rows)))
        watched[-1].updates_others = any("local" in spec.exchange for spec in mix.specs.values())
        return watched[-1]

    train(world, mix, stores=make)
    return [(len(store.held), store.most, store.calls) for store in watched]


@pytest.mark.few(4)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_rows_are_leased_from_announcement_to_release(ranks, exchange, accumulate):
    for result in ranks(2, watch, mix_of(exchange, 8, RULES[0], accumulate=accumulate)):
        assert result
        for held, most, calls in result:
            assert held == 0
            assert most > 0
            assert list(calls) == list(range(1, len(calls) + 1))
            admitted = ["announce", "release"] if "local" in exchange else []
            for made in calls.values():
                assert made in (["announce", "admit", "release"], admitted)
