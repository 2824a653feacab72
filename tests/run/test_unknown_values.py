"""Tests that if/elif chains raise an error for an unknown value instead of silently taking one of
their branches.

Each test lets an unknown value pass the checks at its source, like a value that is added there but
not to the chains.
"""

from dataclasses import fields, replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import get_args

import polars as pl
import pytest
import torch

from sbpflow.boxing.copies import neutral
from sbpflow.boxing.dry_run import DryBoxing
from sbpflow.config.metrics import METRICS, Metric
from sbpflow.config.table_rules import ParallelConfig
from sbpflow.config.train_options import ScheduleConfig
from sbpflow.data.prepare.keys import key_of
from sbpflow.data.prepare.split import SplitRule
from sbpflow.embedding.cache.records import RECORDS
from sbpflow.embedding.exchange.base import ExchangeOptions
from sbpflow.embedding.ids.batch_ids import Bags
from sbpflow.embedding.ids.reader import IdReader
from sbpflow.embedding.plan.embedding_plan import plan_embeddings
from sbpflow.embedding.plan.out_of_range import SUBSTITUTES, OutOfRange
from sbpflow.embedding.plan.row_storage import Outside
from sbpflow.embedding.plan.tables import FeatureConfig, OutputConfig, TableConfig, TableLayout
from sbpflow.embedding.rules.base import SparseOptimizer
from sbpflow.embedding.rules.kernels import COMPILED, CompiledKernel
from sbpflow.embedding.rules.registry import sparse_optimizer
from sbpflow.embedding.storage.choose import KernelChoice, make_kernel
from sbpflow.embedding.storage.lookup import Lookup
from sbpflow.errors import ConfigError, SbpError
from sbpflow.run.export.row_formats import make_rows
from sbpflow.sbp.layout import Layout
from sbpflow.sbp.placement import Placement
from sbpflow.sbp.sbp import Broadcast
from sbpflow.tensor.global_tensor import GlobalTensor
from sbpflow.training.dense_optimizers import make_dense_optimizer, state_per_element
from sbpflow.training.learning_rate import rate_factor
from sbpflow.training.metrics import GROUPED, Evaluation

CPU = torch.device("cpu")


def test_a_kernel_refuses_an_unknown_rule():
    """The numba kernel gets an optimizer rule that has no function for numba."""
    if find_spec("numba") is None:
        pytest.skip("numba is not installed")

    class Momentum(SparseOptimizer):
        def step(self, block):
            raise AssertionError("numba was chosen")

    choice = KernelChoice("numba", "for the test")
    options = {
        "dim": 4,
        "optimizer": Momentum(name="mine:Momentum", lr=0.1),
        "dtype": torch.float32,
        "device": CPU,
    }
    storage = make_kernel(choice, 5, 4, **options)
    lookup = Lookup(torch.tensor([1, 2]), None, None)
    with pytest.raises(SbpError, match=r"kernel numba does not support mine:Momentum"):
        storage.update(lookup, torch.ones(2, 4), 0.1, 1)
    assert not storage.weights.any()


def test_every_metric_has_an_entry():
    assert tuple(METRICS) == get_args(Metric)
    assert {name for name, kind in METRICS.items() if kind.needs_groups} == set(GROUPED)
    assert set(METRICS) <= {field.name for field in fields(Evaluation)}
    assert METRICS["auc"].is_better(0.9, 0.5, 0.0)
    assert METRICS["logloss"].is_better(0.5, 0.9, 0.0)


def test_options_of_groups_are_keys_with_the_same_defaults():
    assert ExchangeOptions.of(ParallelConfig()) == ExchangeOptions()
    config = replace(ParallelConfig(), row_buffer_fraction=0.5)
    assert ExchangeOptions.of(config) == ExchangeOptions(row_buffer_fraction=0.5)


def test_every_kernel_policy_and_storage_kind_has_an_entry():
    assert set(COMPILED) == set(get_args(CompiledKernel))
    assert {"error", *SUBSTITUTES} == set(get_args(OutOfRange))
    assert set(RECORDS) == set(get_args(Outside))


@pytest.mark.parametrize("ragged", [False, True])
def test_an_unknown_policy_for_bad_ids_is_refused(ragged):
    table = TableConfig(name="t", features=("f",), num_rows=4, dim=2)
    world = Placement.line("cpu", 1)
    plan = plan_embeddings(
        [OutputConfig(name="o", tables=(table,))],
        {"t": TableLayout(layout=Layout(world, (Broadcast(),)), exchange="local")},
        features=[FeatureConfig(name="f", hotness=2, ragged=ragged)],
        optimizer=sparse_optimizer("sgd", lr=0.1),
        dtype=torch.float32,
        world=world,
        backend="gloo",
        batch_size=2,
        out_of_range="hash",
    )
    ids = {"f": torch.tensor([[0, 9], [1, 2]])}
    if ragged:
        ids = {"f": Bags(torch.tensor([0, 9, 2]), torch.tensor([0, 2, 3]))}
    IdReader(plan, 0, CPU).read(ids)
    with pytest.raises(KeyError, match="drop"):
        IdReader(replace(plan, out_of_range="drop"), 0, CPU).read(ids)


def _schedule():
    config = ScheduleConfig(decay_steps=10)
    object.__setattr__(config, "shape", "linear")
    return rate_factor(config)(5)


def _norm():
    from sbpflow.models.layers import Layers

    one = torch.ones(2)
    layers = SimpleNamespace(
        parameters={"m.weight": one, "m.bias": one},
        buffers={"m.running_mean": one, "m.running_var": one},
        _cast=lambda x, dtype, id: x,
    )
    return Layers._norm(layers, "group", "m", torch.ones(3, 2))


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda: neutral("mean", torch.float32), ValueError, "'mean' .*sum or max or min"),
        (_schedule, ValueError, "shape: 'linear' .*polynomial or cosine"),
        (
            lambda: make_rows("t", torch.ones(2, 64), "int4", torch.float32),
            ValueError,
            "'int4' .*as_trained or float16 or int8",
        ),
        (
            lambda: OutputConfig(
                name="o",
                tables=(TableConfig(name="t", features=("f",), num_rows=4, dim=2),),
                combine="max",
            ),
            ConfigError,
            "output o: combine must be concat or sum, got 'max'",
        ),
        (
            lambda: GlobalTensor.from_local(
                torch.ones(2, device="meta"),
                Layout(Placement.line("cpu", 2), "B"),
                (2,),
                DryBoxing(2),
                replicas="frist",
            ),
            SbpError,
            "replicas must be equal or first, got 'frist'",
        ),
        (lambda: key_of(pl.Series("a", ["x"]), "date"), ValueError, "'date' .*hex or string or"),
        (lambda: key_of(pl.Series("a", [1.5]), "date"), ValueError, "'date' .*hex or string or"),
        (lambda: key_of(pl.Series("a", [1]), "date"), ValueError, "'date' .*hex or string or"),
        (lambda: SplitRule("day").of_piece("a", (1,), 3), ValueError, "'day' .*time or date or"),
        (lambda: state_per_element(SimpleNamespace()), KeyError, "SimpleNamespace"),
        (
            lambda: make_dense_optimizer(SimpleNamespace(lr=0.1), [torch.ones(1)]),
            KeyError,
            "SimpleNamespace",
        ),
        (_norm, ValueError, "model.norm: 'group' .*none or batch or layer"),
    ],
)
def test_an_unknown_value_is_refused(use, error, message):
    with pytest.raises(error, match=message):
        use()
