"""Tests the collection and its optimizers through the public API."""

from ast import literal_eval

import pytest
import torch

from sbpflow.boxing.executor import Boxing
from sbpflow.embedding.collection import EmbeddingCollection
from sbpflow.embedding.rules.registry import sparse_optimizer
from sbpflow.embedding.rules.sgd import Sgd
from sbpflow.errors import ConfigError, SbpError
from sbpflow.runtime.ranks.world import World
from tests.embedding.cases import SEED, Case, Spec
from tests.quick import quick

CASE = Case(
    tables={"deep": (("deep.a", 9, 4),)},
    specs={"deep.a": Spec("S(0)", "unique")},
    optimizer=sparse_optimizer("sgd", lr=1.0),
)
IDS = torch.tensor([[3], [5]])


def make(world: World) -> EmbeddingCollection:
    return EmbeddingCollection(CASE.plan(world.size), Boxing(world), seed=SEED)


def forward_twice(world: World) -> None:
    collection = make(world)
    mine = IDS[world.rank : world.rank + 1] if world.size > 1 else IDS

    def forward(training: bool = True) -> torch.Tensor:
        return collection.forward(mine, 2, training=training)["deep"]

    first = forward()
    first.sum().backward()
    forward(training=False)  # an evaluation must keep the pending gradient
    with pytest.raises(
        SbpError,
        match=r"apply_gradients\(step\).*start_id_exchange.*receive_grads.*update\(step\)",
    ):
        forward()
    collection.apply_gradients(1)  # the gradient of the first batch is still pending
    second = forward()
    torch.testing.assert_close(second, first - 1.0)
    with pytest.raises(RuntimeError, match="output deep has no gradient"):
        collection.apply_gradients(2)
    forward()


@pytest.mark.parametrize("world_size", quick([1, 2], lambda n: n == 1))
def test_a_second_training_forward_is_rejected_before_gradients_are_lost(ranks, world_size):
    ranks(world_size, forward_twice)


def accumulate(world: World) -> torch.Tensor:
    """Accumulate as the error message suggests: one update for two batches."""
    collection = make(world)
    before = collection.forward(IDS, 2, training=False)["deep"]
    for _ in range(2):
        batch = collection.start_id_exchange(IDS, 2, training=True)
        collection.lookup(batch)
        collection.gather_outputs(batch)["deep"].sum().backward()
        collection.send_grads(batch)
        collection.receive_grads(batch)
    collection.update(1)
    return collection.forward(IDS, 2, training=False)["deep"] - before


def test_moves_accumulate_gradients_of_batches(ranks):
    (change,) = ranks(1, accumulate)
    torch.testing.assert_close(change, torch.full_like(change, -2.0))


OWNERS = {"betas": "lazy_adam", "eps": "adagrad", "initial_accumulator": "rowwise_adagrad"}
WRONG = {
    "lr": (0.0, -1.0, float("inf"), float("nan")),
    "eps": (-1.0, 0.0, float("nan"), float("inf")),
    "initial_accumulator": (-0.1, float("nan")),
    "weight_decay": (-0.1, float("inf")),
    "l1": (-1.0,),
    "l2": (-1.0,),
    "beta": (-1.0,),
    "betas": ((2, 2), (0.9, 1.0), (-0.1, 0.9), (0.9,), (0.9, 0.9, 0.9), (float("nan"), 0.9)),
}


@pytest.mark.parametrize(("key", "value"), [(key, v) for key, vs in WRONG.items() for v in vs])
def test_out_of_range_constant_is_reported_with_a_valid_one(key, value):
    name = OWNERS.get(key, "ftrl" if key in ("l1", "l2", "beta") else "sgd")
    with pytest.raises(ConfigError) as error:
        sparse_optimizer(name, **{"lr": 0.1, key: value})
    start, _, passes = str(error.value).partition(f", got {value} ")
    assert start.startswith(f"sparse optimizer {name}: {key} must be ")
    assert "0" in start
    example = passes.partition(f"for example, {key}=")[2].removesuffix(")")
    sparse_optimizer(name, **{"lr": 0.1, key: literal_eval(example)})


def test_constants_at_their_bounds_are_accepted():
    sparse_optimizer("lazy_adam", lr=1e-9, betas=(0, 0.999999), weight_decay=0)
    sparse_optimizer("ftrl", **dict.fromkeys(("initial_accumulator", "l1", "l2", "beta"), 0))


def test_unknown_optimizers_and_constants_are_rejected():
    for name, message in {
        "lazy_adm": r"'lazy_adm' is unknown; use one of adagrad, .*; did you mean lazy_adam\?",
        "my_rules:Sign": r"'my_rules:Sign': .* has not been imported",
    }.items():
        with pytest.raises(ConfigError, match=message):
            sparse_optimizer(name)
    with pytest.raises(ConfigError, match=r"ftrl has no option weight_decay; .* lr, beta, l1"):
        sparse_optimizer("ftrl", weight_decay=0.1)
    with pytest.raises(ConfigError, match=r"name must be 'sgd', got 'adagrad'"):
        Sgd(name="adagrad")
