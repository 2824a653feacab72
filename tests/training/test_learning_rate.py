"""Tests learning-rate schedules and accumulation of several batches in one step."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from sbpflow.config.parse import build
from sbpflow.config.schema import OptimizerConfig, ScheduleConfig
from sbpflow.embedding.rules.ftrl import Ftrl
from sbpflow.errors import ConfigError
from sbpflow.runtime.random.streams import stream_key
from sbpflow.runtime.ranks.world import World
from sbpflow.training.learning_rate import constant, rate_factor
from tests.quick import diagonal
from tests.training.wdl_case import dense_of, make_batches, make_config, make_job, pieces_of


def test_warm_up_plateau_and_decay():
    config = ScheduleConfig(warmup_steps=3, decay_start=5, decay_steps=4, power=2.0, end_factor=0.2)
    factors = [rate_factor(config)(step) for step in range(1, 12)]
    rise, plateau = [0.25, 0.5, 0.75], [1.0, 1.0]
    fall = [0.2 + 0.8 * left**2 for left in (0.75, 0.5, 0.25, 0.0, 0.0, 0.0)]
    assert factors == pytest.approx(rise + plateau + fall)
    assert [rate_factor(ScheduleConfig())(step) for step in (1, 10**6)] == [1.0, 1.0]
    assert constant(7) == 1.0


def test_a_decay_inside_the_warm_up_is_refused():
    with pytest.raises(
        ConfigError, match=r"decay_start: 2 is before the end of the warm-up; use 5"
    ):
        ScheduleConfig(warmup_steps=5, decay_start=2, decay_steps=10)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"decay_start": 20, "end_factor": 0.0}, "decay_start: 20 has no effect without"),
        ({"end_factor": 0.1}, "end_factor: 0.1 has no effect without"),
        ({"power": 2.0, "warmup_steps": 3}, "power: 2.0 has no effect without"),
    ],
)
def test_decay_without_effect_is_refused(given, message):
    with pytest.raises(ConfigError, match=f"^optimizer.schedule.{message}"):
        ScheduleConfig(**given)


def test_decay_may_end_at_one_or_zero():
    for end in (0.0, 1.0):
        config = ScheduleConfig(decay_start=2, decay_steps=2, end_factor=end)
        assert rate_factor(config)(9) == end


@pytest.mark.parametrize("end", [5.0, -0.5])
def test_decay_ends_between_zero_and_one(end):
    with pytest.raises(ConfigError, match=rf"^end_factor must be .*0.*1, got {end}"):
        build(ScheduleConfig, {"decay_steps": 10, "end_factor": end})


def test_ftrl_has_no_schedule():
    with pytest.raises(ConfigError, match=r"ftrl accumulates sums.*constant learning rate"):
        OptimizerConfig(sparse=Ftrl(), schedule=ScheduleConfig(warmup_steps=5))
    with pytest.raises(ConfigError, match=r"optimizer\.tables\.wide\.\*\.name: adagrad"):
        OptimizerConfig(tables={"wide.*": Ftrl()}, schedule=ScheduleConfig(decay_steps=5))
    OptimizerConfig(sparse=Ftrl(), tables={"wide.*": Ftrl()}, schedule=ScheduleConfig())


def run(world: World, config: Any, together: int, announce: bool) -> dict[str, Any]:
    """Train on 12 batches of at most 30 rows, ``together`` batches per step."""
    job = make_job(world, config)
    batches = [b.part(world.rank, world.size) for b in make_batches(12, 30)]
    losses = []
    for start in range(0, 12, together):
        group = batches[start : start + together]
        if announce and start == 0:
            job.trainer.announce(batches[0])
        if announce:
            for batch in batches[start + 1 : start + together + 1]:
                job.trainer.announce(batch)
        losses.append(float(job.trainer.step(group)))
    return {"losses": losses, "pieces": pieces_of(job), "dense": dense_of(job)}


def run_whole(world: World, config: Any) -> dict[str, Any]:
    """Train on the rows of the 12 batches in 4 larger batches."""
    job = make_job(world, config)
    batches = make_batches(12, 30)
    losses = []
    for start in range(0, 12, 3):
        parts = batches[start : start + 3]
        whole = replace(
            parts[0],
            labels=torch.cat([b.labels for b in parts]),
            dense=torch.cat([b.dense for b in parts]),
            ids=torch.cat([b.ids for b in parts]),
            batch_size=sum(b.batch_size for b in parts),
        )
        losses.append(float(job.trainer.step(whole)))
    return {"losses": losses, "pieces": pieces_of(job), "dense": dense_of(job)}


@pytest.mark.parametrize(
    ("sparse", "scheme"), diagonal(["sgd", "rowwise_adagrad", "lazy_adam"], ["dp", "1", "2", "3"])
)
def test_accumulated_batches_are_one_step_of_all_their_rows(ranks, scheme, sparse):
    config = make_config(scheme, sparse, dense="adam")
    (whole,) = ranks(1, run_whole, config)
    tables = {name: weights for name, _, weights, _ in whole["pieces"]}
    for result in ranks(2, run, config, 3, True):
        # float64 sums are computed in another order over four steps
        np.testing.assert_allclose(result["losses"], whole["losses"], rtol=0, atol=1e-11)
        for name, value in result["dense"].items():
            np.testing.assert_allclose(value, whole["dense"][name], rtol=0, atol=1e-9)
        for name, (r0, r1, c0, c1), weights, _ in result["pieces"]:
            want = tables[name][r0:r1, c0:c1]
            np.testing.assert_allclose(weights, want, rtol=0, atol=1e-9, err_msg=name)


def mask_seeds(world: World, together: int) -> list[int]:
    """Train on 6 batches, ``together`` per step; return the seed of each forward pass."""
    job = make_job(world, make_config("dp", "sgd"))
    model = type(job.model)
    seeds, real = [], model.forward

    def forward(self, *args, seed, **kwargs):
        seeds.append(seed)
        return real(self, *args, seed=seed, **kwargs)

    model.forward = forward
    try:
        batches = [batch.part(world.rank, world.size) for batch in make_batches(6, 30)]
        for start in range(0, 6, together):
            job.trainer.step(batches[start : start + together])
    finally:
        model.forward = real
    return seeds


def test_every_accumulated_batch_has_different_dropout_masks(ranks):
    one, three = ranks(2, mask_seeds, 1)[0], ranks(2, mask_seeds, 3)
    assert three[0] == three[1]
    assert len(set(three[0])) == len(set(one)) == 6
    # A step's first batch has the same seed as a step with one batch, so that recorded results
    # stay valid.
    assert [three[0][0], three[0][3]] == one[:2]
    seed = make_config("dp", "sgd").run.seed
    assert one == [stream_key(seed, f"dropout/{step}") for step in range(1, 7)]
